"""exec-protocol.schema.json against real lines."""

from __future__ import annotations

import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from answering import answers_to
from jsonschema import Draft202012Validator

import lfm2np
from lfm2np import oracle
from lfm2np.oracle.engines import exec_target
from lfm2np.oracle.engines.exec_target import ExecTarget
from lfm2np.oracle.engines.records import greedy

SCHEMA = json.loads((Path(oracle.__file__).parent / "schemas" / "exec-protocol.schema.json").read_text())


def fits(value: Any, definition: str) -> bool:
    return Draft202012Validator({**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{definition}"}]}).is_valid(value)


is_to_engine, is_from_engine = partial(fits, definition="toEngine"), partial(fits, definition="fromEngine")


@pytest.mark.rounding
def test_the_schema_describes_what_is_really_said(tmp_path: Path) -> None:
    """Both directions of a conversation with our own engine, tapped on the way."""
    tap = "import json, subprocess, sys\n"
    tap += "engine = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
    tap += "log, owed = open(sys.argv[1], 'w'), 0\n"
    tap += "for line in sys.stdin.buffer:\n"
    tap += " engine.stdin.write(line); engine.stdin.flush(); kind = json.loads(line)['kind']\n"
    tap += " log.write('>' + line.decode()); owed += kind in ('request', 'hello')\n"
    tap += " while owed and kind in ('hello', 'run'):\n"
    tap += "  said = engine.stdout.readline(); log.write('<' + said.decode()); owed -= 1\n"
    tap += "  sys.stdout.buffer.write(said); sys.stdout.flush()\n"
    log = tmp_path / "log"
    engine = [sys.executable, "-m", "lfm2np.oracle.engines.exec_server", "lfm2np.suite.adapters:own"]
    command = shlex.join([sys.executable, "-c", tap, str(log), *engine])
    target = ExecTarget(command, lfm2np.trained_fixture(), 512)
    requests = [
        greedy("a", (1, 2, 3), 2, case="case", prompt_text="text", cold=True, streamed=True),
        greedy("b", (1, 2, 3), 2, abort_after=1),
        greedy("prompt", (1, 2, 3), 3, prompt_logprobs=0, stop="never"),
        greedy("bad", (999,), 1),
    ]
    answers = answers_to(target, requests)
    assert [answer.error is None for answer in answers] == [True, True, True, False]
    assert [answer.is_aborted for answer in answers] == [False, True, False, False]
    target.close()
    lines = [(line[0], json.loads(line[1:])) for line in log.read_text().splitlines()]
    for direction, line in lines:
        assert (is_to_engine(line), is_from_engine(line)) == (direction == ">", direction == "<"), line
    said = [f"{direction}{line['kind']}" for direction, line in lines]
    assert said == [">hello", "<hello", *[">request"] * 4, ">run", *["<answer"] * 4, ">bye"]


def test_every_example_of_the_schema_and_of_the_docstring_is_a_line() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    for name, definition in SCHEMA["$defs"].items():
        for example in definition.get("examples", []):
            assert fits(example, name), example
    documented = re.sub(r",\n {7}", ",", exec_target.__doc__ or "")
    lines = re.findall(r"^ {4}([<>]) (\{.*\})$", documented, re.MULTILINE)
    assert len(lines) == 8
    for direction, line in lines:
        assert is_to_engine(json.loads(line)) if direction == ">" else is_from_engine(json.loads(line))


def test_the_schema_refuses_what_the_reader_refuses() -> None:
    hello = SCHEMA["$defs"]["engineHello"]["examples"][0]
    answer = {"kind": "answer", "request_id": "0:a", "token_ids": [1]}
    assert is_from_engine(hello) and is_from_engine(answer)
    for change in (
        {"protocol": 1},
        {"protocol": True},
        {"at_once": 0},
        {"top_logprobs": -1},
        {"abort": 1},
        {"more": 1},
    ):
        assert not is_from_engine(hello | change)
    changes = ({"token_ids": [True]}, {"token_ids": [-1]}, {"token_ids": None}, {"logits": []}, {"error": 3})
    for change in (*changes, {"request_id": 0}, {"kind": "say"}, {"top_logprobs": [{"x": 0.0}]}, {"logprobs": ["nan"]}):
        assert not is_from_engine(answer | change)
