"""Each answer is handed over when it comes, not when its round is over: an interrupt loses none that came."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from answering import answers_to
from http_player import model, playing, request_of, target_of

from lfm2np.oracle.engines.exec_target import ExecTarget
from lfm2np.oracle.engines.file_target import Transcript
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Request, Trace
from lfm2np.oracle.engines.target import Abilities, Answers, Arrived, Played, Target, ignored
from lfm2np.oracle.sending import send_all

pytestmark = pytest.mark.rounding

REQUESTS = [request_of(name, max_tokens=count) for count, name in enumerate(("a", "b", "never"), 1)]


class Stuck:
    """Ends a request after as many steps as it has tokens, and never a third one."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def step(self) -> dict[str, list[Answer]]:
        first = self.requests.pop(0)
        assert not first.request_id.endswith("never"), "the answers before it were not handed over"
        return {first.request_id: [Answer((5,) * (first.params.max_tokens or 1), finish_reason="length")]}

    def abort(self, request_id: str) -> None:
        pass


def stuck(path: str, sizes: dict[str, Any]) -> Stuck:
    return Stuck()


STUCK = """
import json, sys, time
say = lambda line: print(json.dumps(line), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["kind"] == "hello":
        numbers = {"logprobs": False, "top_logprobs": 0, "prompt_logprobs": False, "at_once": 8, "abort": False}
        say({"kind": "hello", "protocol": 2, "engine": "stuck", **numbers})
    elif request["kind"] == "request" and "never" not in request["request_id"]:
        answer = {"token_ids": [5] * request["max_tokens"], "finish_reason": "length"}
        say({"kind": "answer", "request_id": request["request_id"], **answer})
"""


@contextlib.contextmanager
def stuck_target(route: str) -> Iterator[Target]:
    with contextlib.ExitStack() as stack:
        if route == "python":
            target: Target = PythonTarget("test_arrivals:stuck", model().path)
        elif route == "exec":
            target = ExecTarget(shlex.join([sys.executable, "-c", STUCK]), model().path, 512, patience=20.0)
        else:
            player = stack.enter_context(playing("vllm"))
            player.trouble = lambda handler: (
                (handler.path == "/metrics" and route == "http, counted" and (handler.say(COUNTED) or True))
                or never(player.seen[-1][2] or {}, player.freed.wait)
            )
            target = target_of(player)
        stack.callback(target.close)
        yield target


COUNTED = b"vllm:prefix_cache_hits_total 7.0"  # one answer of a round waits for this, and is not lost either


def never(body: dict[str, Any], wait: Callable[[float], bool]) -> bool:
    return body.get("max_tokens") == 3 and wait(20.0)


@pytest.mark.parametrize("route", ["python", "exec", "http", "http, counted"])
def test_an_interrupt_finds_what_came_before_it(route: str) -> None:
    came: list[str] = []

    def arrived(index: int, answers: Answers) -> None:
        came.append(REQUESTS[index].request_id)
        if len(came) == (1 if route == "http, counted" else 2):
            raise KeyboardInterrupt

    with stuck_target(route) as target, pytest.raises(KeyboardInterrupt):
        target.probe()
        answers_to(target, REQUESTS, arrived)
    assert sorted(set(came)) == ["a", "b"]


class Interrupted:
    """Answers three requests of a round of several, once; then it is interrupted. Later it answers all."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.is_late = False

    def probe(self) -> Abilities:
        return Abilities("interrupted", at_once=8)

    def play(self, trace: Trace, arrived: Arrived = ignored) -> Played:
        self.sent += [request.request_id for request in trace.requests]
        answers = tuple((Answer((3,) * request.max_tokens, finish_reason="length"),) for request in trace.requests)
        for index, some in enumerate(answers):
            if index == 3 and not self.is_late:
                raise KeyboardInterrupt
            arrived(index, some)
        return Played(answers)

    def close(self) -> None:
        pass


def test_a_check_that_is_interrupted_within_a_round_keeps_what_it_had_and_goes_on(tmp_path: Path) -> None:
    path, target = tmp_path / "answers.jsonl", Interrupted()
    with pytest.raises(KeyboardInterrupt), Transcript(path) as transcript:
        send_all(model(), target, 8, cases=["neighbours"], transcript=transcript)
    before = path.read_bytes()
    first = [request.request_id for request, _ in Transcript(path).pairs()]
    assert len(first) == 3
    path.write_bytes(before + b'{"request": {"request_id"')  # and a line that was torn
    target.is_late = True
    with pytest.warns(match="torn"):
        transcript = Transcript(path)
    with transcript:
        asked = send_all(model(), target, 8, cases=["neighbours"], transcript=transcript)
    after = path.read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == len(asked.pairs) + 1  # each answer once, and the end
    target.sent.clear()
    with Transcript(path) as transcript:
        assert send_all(model(), target, 8, cases=["neighbours"], transcript=transcript).pairs == asked.pairs
    assert not target.sent
