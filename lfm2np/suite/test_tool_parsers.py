"""A parser of LFM2's replies: one test a property, one a case of chats.json that nobody disputes. See --tool-parser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from lfm2np.errors import Lfm2npError
from lfm2np.oracle.engines.protocol import load_factory
from lfm2np.suite.plugin import cases, chosen_profile, option
from lfm2np.suite.runner import profile
from lfm2np.suite.tool_parsers.properties import PROPERTIES, Check, check_case, cuts, replies

CHATS = json.loads((Path(__file__).parent / "tool_parsers" / "chats.json").read_text(encoding="utf-8"))
TOLD = [case for case in CHATS["cases"] if not (case["disputed"] or case["from_ids_only"] or case["in_reasoning"])]
WEIGHT = 15.0  # examples are small


@pytest.fixture(scope="session")
def factory(request: pytest.FixtureRequest) -> Any:
    try:
        return load_factory(option(request.config, "tool-parser") or "", "tool parser")
    except Lfm2npError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = cases({**PROPERTIES, **{case["id"]: case for case in TOLD}}, metafunc.config)
    name = "property_" if "property_" in metafunc.fixturenames else "case"
    metafunc.parametrize(name, [each for each in every if (each.id in PROPERTIES) == (name == "property_")])


def report(heading: str, check: Callable[[], None]) -> None:
    try:
        check()
    except Exception as error:
        failure = f"{heading}\n{type(error).__name__}: {error}"
    else:
        return
    pytest.fail(failure, pytrace=False)


def test_property(property_: tuple[str, Check], factory: Any, request: pytest.FixtureRequest) -> None:
    sentence, check = property_

    @profile(chosen_profile(request.config), WEIGHT)
    @given(replies, cuts)
    def test(reply: Any, cuts: list[int]) -> None:
        check(factory, reply, cuts)

    report(sentence, test)


def test_case(case: dict[str, Any], factory: Any) -> None:
    if case["message"]["reasoning"] is not None and "reasoning" in getattr(factory, "lacks", ()):
        pytest.skip("the parser lacks reasoning")
    report(f"{case['reason']} ({case['source']})", lambda: check_case(factory, case))
