"""A parser of LFM2's replies: one test a property, one a case of chats.json that nobody disputes. See --tool-parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lfm2np.errors import Lfm2npError
from lfm2np.oracle.engines.protocol import load_factory
from lfm2np.suite.plugin import cases, chosen_profile, option
from lfm2np.suite.tool_parsers.properties import PROPERTIES, Check, check_case, draw

CHATS = json.loads((Path(__file__).parent / "tool_parsers" / "chats.json").read_text(encoding="utf-8"))
TOLD = {
    case["id"]: (f"{case['reason']} ({case['source']})", case)
    for case in CHATS["cases"]
    if not (case["disputed"] or case["from_ids_only"] or case["in_reasoning"])
}
TOLD |= {
    case["id"]: (f"Cut: {case['reason']}", {**TOLD[case["reply"]][1], "pieces": case["pieces"], "ids": case["ids"]})
    for case in CHATS["streams"]
    if case["reply"] in TOLD
}


@pytest.fixture(scope="session")
def factory(request: pytest.FixtureRequest) -> Any:
    try:
        return load_factory(option(request.config, "tool-parser") or "", "tool parser")
    except Lfm2npError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("told", cases({**PROPERTIES, **TOLD}, metafunc.config))


def test_parser(told: tuple[str, Check | dict[str, Any]], factory: Any, request: pytest.FixtureRequest) -> None:
    sentence, check = told

    try:
        if not isinstance(check, dict):
            return draw(check, factory, chosen_profile(request.config))
        if check["message"]["reasoning"] is None or "reasoning" not in getattr(factory, "lacks", ()):
            return check_case(factory, check)
    except Exception as error:
        failure = f"{sentence}\n{type(error).__name__}: {error}"
    else:
        pytest.skip("the parser lacks reasoning")
    pytest.fail(failure, pytrace=False)
