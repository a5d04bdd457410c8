"""exec:COMMAND with an engine that is right, and with engines that do everything wrong. POSIX and CPython assumed."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from answering import answers_to
from jsonschema import Draft202012Validator
from of_schema import validator

import lfm2np
from lfm2np.commands.cli import check, main
from lfm2np.errors import RequestError
from lfm2np.oracle.check import Checked
from lfm2np.oracle.engines import exec_target
from lfm2np.oracle.engines.exec_target import ExecTarget
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import DEAD, FAILED, IMPOSSIBLE, NO_ABORT, NO_ANSWER, Answer, changed, failed, greedy
from lfm2np.oracle.engines.target import TargetError

pytestmark = pytest.mark.slow

PRELUDE = """
import json, os, subprocess, sys, time
def read(): return json.loads(sys.stdin.readline() or '{"kind": "bye"}')
def raw(content): os.write(1, content)
def write(line): raw(json.dumps(line).encode() + b"\\n")
def answer(name, **fields): write({"kind": "answer", "request_id": name, "token_ids": [1, 2], **fields})
def hello(**other):
    write({"kind": "hello", "protocol": 2, "engine": "tiny 1", "logprobs": True, "top_logprobs": 0,
           "prompt_logprobs": False, "at_once": 8, "abort": False} | other)
def requests():
    names = []
    while (line := read())["kind"] != "run":
        if line["kind"] == "bye": sys.exit()
        if line["kind"] == "request": names.append(line["request_id"])
    return names
read()
"""
REQUESTS = [greedy(name, (1, 2, 3), 2) for name in ("a", "b")]
TAP = """
import json, subprocess, sys
engine = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
log, owed = open(sys.argv[1], "w"), 0
for line in sys.stdin.buffer:
    engine.stdin.write(line); engine.stdin.flush(); kind = json.loads(line)["kind"]
    log.write(">" + line.decode()); owed += kind in ("request", "hello")
    while owed and kind in ("hello", "run"):
        said = engine.stdout.readline(); log.write("<" + said.decode()); owed -= 1
        sys.stdout.buffer.write(said); sys.stdout.flush()
log.close(); engine.communicate()
"""
SCHEMA = validator("exec-protocol").schema


def fits(value: Any, definition: str) -> bool:
    return Draft202012Validator({**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{definition}"}]}).is_valid(value)


is_to_engine, is_from_engine = partial(fits, definition="toEngine"), partial(fits, definition="fromEngine")
Make = Callable[..., ExecTarget]


@pytest.fixture
def make() -> Iterator[Make]:
    """An engine of a few lines of Python, ended after the test."""
    targets: list[ExecTarget] = []

    def build(script: str, *arguments: str, patience: float = 20.0) -> ExecTarget:
        command = shlex.join([sys.executable, "-I", "-S", "-c", PRELUDE + script, *arguments])
        targets.append(ExecTarget(command, "model", 512, patience))
        return targets[-1]

    yield build
    for target in targets:
        target.close()


# --- an engine that is right


@pytest.mark.rounding
def test_a_python_engine_behind_it_answers_as_in_this_process_and_in_lines_of_the_schema(
    model: lfm2np.Model, tmp_path: Path
) -> None:
    """Whole answers, aborted ones, prompts with log-probabilities, a request that can't be met, tapped on the way."""
    log = tmp_path / "log"
    engine = [sys.executable, "-m", "lfm2np.oracle.engines.exec_server", "lfm2np.suite.adapters:own"]
    target = ExecTarget(shlex.join([sys.executable, "-c", TAP, str(log), *engine]), model.path, 512)
    abilities = target.probe()
    assert abilities.tells_logprobs and abilities.tells_prompt_logprobs and abilities.can_abort
    requests = [
        greedy("scored", (5, 6, 7), 3, prompt_logprobs=0, stop="never"),
        greedy("cut", (1, 9, 30), 9, abort_after=4),
        greedy("whole", (1, 9, 30), 9, case="case", prompt_text="text", cold=True, streamed=True),
        greedy("at once", (1,), 1, abort_after=0),
        greedy("bad", (1, 512), 1),
    ]
    answers = answers_to(target, requests)
    target.close()
    here = answers_to(PythonTarget("lfm2np.suite.adapters:own", model.path), requests)
    fields = ("token_ids", "logprobs", "prompt_logprobs", "finish_reason", "error", "is_aborted")
    for answer, expected in zip(answers, here, strict=True):
        assert [getattr(answer, name) for name in fields] == [getattr(expected, name) for name in fields]
    assert answers[1].token_ids == answers[2].ids[:4] and answers[3].ids == ()
    assert answers[4].error == "RequestError: ids[1]: 512, expected 0 to vocab_size-1=511"
    lines = [(line[0], json.loads(line[1:])) for line in log.read_text().splitlines()]
    for direction, line in lines:
        assert (is_to_engine(line), is_from_engine(line)) == (direction == ">", direction == "<"), line
    said = [f"{direction}{line['kind']}" for direction, line in lines]
    assert said == [">hello", "<hello", *[">request"] * 5, ">run", *["<answer"] * 5, ">bye"]


def test_answers_come_in_any_order_and_are_returned_in_that_of_the_requests_also_of_one_put_twice(make: Make) -> None:
    script = "hello()\nwhile True:\n for n, name in enumerate(reversed(requests())): answer(name, logprobs=[n, -0.5])"
    target = make(script)
    for requests in (REQUESTS, [REQUESTS[0], REQUESTS[0]], REQUESTS[:1]):
        logprobs = [answer.logprobs for answer in answers_to(target, requests)]
        assert logprobs == [(1.0, -0.5), (0.0, -0.5)][-len(requests) :]


def test_no_run_has_more_requests_than_the_engine_takes_at_once_and_none_to_abort_if_it_can_not(make: Make) -> None:
    target = make(
        "hello(at_once=2)\nwhile True:\n names = requests()\n for one in names: answer(one, text=str(len(names)))"
    )
    requests = [greedy(str(n), (1,), 2) for n in range(5)]
    aborted, *others = answers_to(target, [changed(REQUESTS[0], abort_after=1), *requests])
    assert aborted == replace(failed(NO_ABORT), is_aborted=True)
    assert [answer.text for answer in others] == ["2", "2", "2", "2", "1"]


# --- bad answers: an error for that request, and the other one is answered. One engine gives them all, run after run

BAD_ANSWERS = {
    "NaN": ('bad(b\'"token_ids":[1],"logprobs":[NaN]\')', "logprobs[0] nan: expected a finite number", IMPOSSIBLE),
    "overflow": ('bad(b\'"token_ids":[1],"logprobs":[1e999]\')', "logprobs[0] inf: expected a finite", IMPOSSIBLE),
    "not JSON": ("bad(b'')", "not JSON", NO_ANSWER),
    "not UTF-8": ('bad(b\'"text":"\\xff"\')', "not JSON: 'utf-8' codec", NO_ANSWER),
    "too few log-probabilities": ("answer(a, logprobs=[0.0])", "logprobs: 1 entries for 2 token_ids", NO_ANSWER),
    "a field that is none": ("answer(a, logits=[])", "answer field 'logits'", NO_ANSWER),
    "a negative token": ("answer(a, token_ids=[-1])", "token_ids[0] -1: expected a token id", IMPOSSIBLE),
    "no tokens": ("write({'kind': 'answer', 'request_id': a})", "token_ids: missing", NO_ANSWER),
    "an error": ("write({'kind': 'answer', 'request_id': a, 'error': 'too\\nlong'})", "too long", FAILED),
    "twice": ("answer(a); answer(a)", "answered twice", NO_ANSWER),
}
NOISE = {
    "a log line": ("raw(b'loading...\\n')", "not JSON"),
    "another kind": ("write({'kind': 'log', 'request_id': a})", "a line of kind 'log', expected an answer"),
    "an unknown id": ("answer('0:c', error=5)", "an answer to '0:c', not asked in this run"),
    "bytes": ("raw(bytes(range(11, 256)) + b'\\n')", "'utf-8' codec can't decode"),
    "deep": ("raw(b'[' * 100_000 + b'\\n')", "not JSON"),
}
RUNS = """
def bad(content): raw(b'{"kind":"answer","request_id":"%s",%s}\\n' % (a.encode(), content))
hello()
for script in json.loads(sys.argv[1]):
    a, b = requests()
    exec(script)
"""


def in_runs(make: Make, scripts: list[str]) -> list[tuple[list[Answer], str]]:
    """Of each script, as one run of one engine: the two answers, and what it wrote besides."""
    target, results = make(RUNS, json.dumps(scripts)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exec_target, "MAX_LINE", 2**20)
        for _ in scripts:
            target._noise = ""
            results.append((answers_to(target, REQUESTS), target._noise))
    return results


def test_a_bad_answer_is_an_error_of_its_request_alone(make: Make) -> None:
    results = in_runs(make, [f"{script}; answer(b)" for script, _, _ in BAD_ANSWERS.values()])
    for (name, (_, error, kind)), ((bad, good), noise) in zip(BAD_ANSWERS.items(), results, strict=True):
        assert bad.error is not None and error in bad.error, name
        assert bad == failed(bad.error, kind), name
        assert good == Answer((1, 2)), name
        assert noise == "", name


def test_noise_is_told_and_harms_no_answer(make: Make) -> None:
    results = in_runs(make, [f"{script}; answer(a); answer(b)" for script, _ in NOISE.values()])
    for (name, (_, expected)), (answers, noise) in zip(NOISE.items(), results, strict=True):
        assert answers == [Answer((1, 2)), Answer((1, 2))], name
        assert expected in noise, name


def test_an_answer_that_comes_too_late_is_none_to_the_same_request_put_again(make: Make) -> None:
    target = make("hello()\n(a,) = requests()\nanswer(a); answer(a, token_ids=[9])\n(a,) = requests()\nanswer(a)")
    assert [answers_to(target, REQUESTS[:1]) for _ in range(2)] == [[Answer((1, 2))]] * 2


# --- engines that go

GONE = {  # after the first of two answers: what it does, and the end of the other's error
    "it ends": (
        "print('out of\\tmemory', file=sys.stderr); sys.exit(7)",
        "exit code 7; last on stderr: out of memory",
    ),
    "it is killed": ("os.kill(os.getpid(), 9)", "it ended by SIGKILL; nothing on stderr"),
    "half a line": (
        "raw(b'{')",
        "half a line, and then its output ended: '{'; it ended with exit code 0; nothing on stderr",
    ),
    "it closes its output": ("os.close(1); time.sleep(60)", "it still ran, and was ended; nothing on stderr"),
    "a long line": ("raw(b'x' * 2**21)", f"a line of more than {2**20} bytes"),
    "a flood on stderr": ("os.write(2, b'x' * 2**20 + b'\\nlast'); sys.exit(1)", " | last"),
    "silence": ("time.sleep(60)", "no answer in 2 s; nothing on stderr"),
    "a flood of garbage": (
        "while True: raw(b'x' * 1000 + b'\\n')",
        f"it also wrote: a line {'x' * 97 + '...'!r}: not JSON",
    ),
}


@pytest.mark.parametrize(("script", "error"), GONE.values(), ids=GONE)
def test_an_engine_that_goes_keeps_what_it_answered(
    make: Make, script: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_target, "MAX_LINE", 2**20)
    target = make(f"hello()\na, b = requests()\nanswer(a, logprobs=[-0.5, -0.5])\n{script}")
    target.probe()
    target.patience = 2.0  # from now on: a busy machine may take its time to start a process
    kept, lost = answers_to(target, REQUESTS)
    assert kept == Answer((1, 2), (-0.5, -0.5))
    assert lost.kind == DEAD and error in str(lost.error) and len(str(lost.error)) < 1001
    for again in (lambda: target.probe(), lambda: answers_to(target, REQUESTS)):
        with pytest.raises(TargetError, match=re.escape(str(lost.error))):
            again()


def test_an_engine_that_does_not_read_is_not_waited_for_longer(make: Make) -> None:
    target = make("hello()\ntime.sleep(60)")
    target.probe()
    target.patience = 0.4
    requests = [greedy(str(n), tuple(range(500)), 2) for n in range(200)]  # more than any pipe holds
    answers = answers_to(target, requests)
    assert all(answer.kind == DEAD and "no answer in" in str(answer.error) for answer in answers)


CHILD = """
child = "import sys, time\\nwhile True: open(sys.argv[1], 'a').write('x'); time.sleep(.01)"
subprocess.Popen([sys.executable, "-I", "-S", "-c", child, sys.argv[1]])
"""


@pytest.mark.night
@pytest.mark.parametrize("end", ["requests()", "sys.exit(5)", "time.sleep(60)"])
def test_what_an_engine_leaves_behind_is_ended_with_it(
    make: Make, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child holds the engine's pipes open, so their end is no sign of the engine's."""
    monkeypatch.setattr(exec_target, "GRACE", 0.2)
    beats = tmp_path / "beats"
    script = f"{CHILD}hello()\na, b = requests()\nwhile not os.path.exists(sys.argv[1]): pass\nanswer(a)\n{end}"
    target = make(script, str(beats))
    target.probe()
    target.patience = 2.0
    kept, lost = answers_to(target, REQUESTS)
    assert kept == Answer((1, 2)) and lost.error is not None
    target.close()
    size = beats.stat().st_size
    time.sleep(0.1)
    assert beats.stat().st_size == size


def test_an_engine_that_heeds_no_bye_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_target, "GRACE", 0.1)
    target = make("hello()\ntime.sleep(60)")
    target.probe()
    process = target._process
    assert process is not None
    target.close()
    assert process.process.poll() == -9
    target.close()
    with pytest.raises(TargetError, match="was closed"):
        answers_to(target, REQUESTS)


def test_an_engine_that_heeds_bye_is_not_killed(make: Make, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    target = make(f"hello()\nassert read() == {{'kind': 'bye'}}\nopen({str(mark)!r}, 'w').close()")
    target.probe()
    target.close()
    assert mark.exists()


# --- hellos and commands

HELLOS = {
    "other protocol": ("hello(protocol=1)", "hello: protocol 1, expected 2"),
    "1 is not true": ("hello(abort=1)", "hello: abort 1: expected true or false"),
    "a field less": ("write({'kind': 'hello', 'protocol': 2})", "hello: abort, at_once, engine, logprobs"),
    "another kind": ("write({'kind': 'answer'})", "expected kind hello"),
    "a banner": ("raw(b'Welcome\\n')", "its first line 'Welcome': not JSON"),
    "too long": ("raw(b'x' * 2**21 + b'\\n')", "a line of more than"),
    "nothing": ("sys.exit('no model')", "exit code 1; last on stderr: no model"),
    "silence": ("time.sleep(60)", "no answer in"),
}


@pytest.mark.parametrize(("script", "error"), HELLOS.values(), ids=HELLOS)
def test_another_hello_is_a_target_error(make: Make, script: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_target, "MAX_LINE", 2**20)
    target = make(f"{script}\nrequests()", patience=0.4 if error == "no answer in" else 20.0)
    with pytest.raises(TargetError) as caught:
        target.probe()
    assert error in str(caught.value)


def test_a_command_is_checked() -> None:
    for command in ("", "  ", "engine 'half"):
        with pytest.raises(RequestError, match="exec:"):
            ExecTarget(command, "model", 512).probe()
    with pytest.raises(TargetError, match=r"exec:no-such-engine --fast: can't be started: .*no-such-engine"):
        ExecTarget("no-such-engine --fast", "model", 512).probe()
    with pytest.raises(RequestError, match="patience"):
        ExecTarget("engine", "model", 512, patience=0.0).probe()


@pytest.mark.rounding
def test_a_check_ends_the_engine_before_it_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A large model would hold its memory beside the oracle's."""
    script = f"""
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
hello()
while True:
    for name in requests(): answer(name)
"""

    def judged(*arguments: Any, **options: Any) -> Checked:
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
        raise TargetError("as far as here")

    monkeypatch.setattr(check, "judged", judged)
    target = "exec:" + shlex.join([sys.executable, "-I", "-S", "-c", PRELUDE + script])
    assert main(["check", target, "--cases", "short-prompts"]) == 3
    assert "as far as here" in capsys.readouterr().err


# --- the schema


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
    hellos = ({"protocol": 1}, {"protocol": True}, {"at_once": 0}, {"top_logprobs": -1}, {"abort": 1}, {"more": 1})
    for change in hellos:
        assert not is_from_engine(hello | change)
    ids = ({"token_ids": [True]}, {"token_ids": [-1]}, {"token_ids": None}, {"request_id": 0}, {"logits": []})
    for change in (*ids, {"error": 3}, {"kind": "say"}, {"top_logprobs": [{"x": 0.0}]}, {"logprobs": ["nan"]}):
        assert not is_from_engine(answer | change)
