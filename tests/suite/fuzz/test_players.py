"""Traces carried out on right engines: no finding, and each in its order. On wrong ones: a finding of its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from served_here import folder, model, player_of, serving

from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import FAILED, IMPOSSIBLE, NO_ABORT, Answer, Request, Trace, greedy
from lfm2np.oracle.engines.target import LEAK, Played
from lfm2np.suite.adapters import Own
from lfm2np.suite.fuzz.draw_traces import alphabet_of
from lfm2np.suite.fuzz.judge import ByTruth, Finding

pytestmark = pytest.mark.rounding
A = alphabet_of(model().tokenizer, 300)
STOPS = model().tokenizer.decode(A[:1])
EVERYTHING = Trace(
    (
        greedy("", (1, *A[:20]), 8),
        greedy("", (1, *A[:16]), 6, after=0, after_tokens=3),
        greedy("", (1, *A[:18], A[3]), 9, streamed=True, abort_after=2),
        greedy("", (1, *A[:33]), 5, after=1, after_tokens=1, abort_after=0),
        greedy("", (1, *A[:20]), 4, after=0, cold=True),
        greedy("", (1, *A[5:15]), 4, temperature=1.0, seed=3, n=2),
        greedy("", (1, *A[5:15]), 4, temperature=1.0, seed=3, streamed=True, after=5, n=2),
        greedy("", (1, *A[:12]), 12, stop=STOPS),
        greedy("", (1, *A[:12]), 12, stop=STOPS, streamed=True, pause=5),
        greedy("", A[:1], 1, temperature=1.0),
    )
)


def finding(trace: Trace, played: Played) -> Finding | None:
    return ByTruth(model(), "float32").finding(trace, played)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["exact", "float32"])
def test_a_right_server_gets_no_finding_for_a_trace_of_everything(numerics: str) -> None:
    with serving(numerics) as here, player_of(here) as player:
        abilities = player.probe()
        assert (abilities.takes_samples, abilities.takes_sampling, abilities.takes_stops) == (True, True, True)
        for _ in range(2):  # cold and warm
            played = player.play(EVERYTHING)
            assert finding(EVERYTHING, played) is None
    assert [len(answers) for answers in played.answers] == [1, 1, 1, 1, 1, 2, 2, 1, 1, 1]
    firsts = [answers[0] for answers in played.answers]
    aborted = {index for index, answer in enumerate(firsts) if answer.is_aborted}
    assert aborted in ({2}, {2, 3})  # a quick server may have answered 3 before it was aborted
    times = [(answer.sent, answer.ended) for answer in firsts]
    for sent, ended in times:
        assert sent is not None and ended is not None and sent <= ended
    assert times[4][0] >= times[0][1] and times[6][0] >= times[5][1]  # type: ignore[operator]
    assert firsts[1].sent >= firsts[0].first  # type: ignore[operator]


def steps(make: Callable[[], Any]) -> PythonTarget:
    return PythonTarget(lambda *_: make(), folder())


def test_a_request_is_added_before_the_step_that_follows_the_tokens_it_waits_for() -> None:
    calls: list[str] = []

    class Noted(Own):
        def add(self, request: Any) -> None:
            calls.append(f"add {request.request_id[-1]}" + (" salted" if request.cache_salt else ""))
            super().add(request)

        def step(self) -> Any:
            calls.append("step")
            return super().step()

        def abort(self, request_id: str) -> Any:
            calls.append(f"abort {request_id[-1]}")
            return super().abort(request_id)

    trace = Trace(
        (
            greedy("0", A[:3], 4),
            greedy("1", A[:2], 2, after=0, after_tokens=2),
            greedy("2", A[:2], 9, after=1, abort_after=1, cold=True),
            greedy("3", A[:2], 1, after=2),
        )
    )
    player = steps(lambda: Noted(model(), {}))
    player.probe()
    calls.clear()
    player.play(trace)
    expected = ["add 0", "step", "step", "add 1", "step", "step", "add 2 salted", "step", "abort 2", "add 3", "step"]
    assert calls == expected


def wrong(name: str, does: Any) -> PythonTarget:
    """Our engine, one of whose methods has its value changed; it was right when it was probed."""
    engine = Own(model(), {})
    player = steps(lambda: engine)
    player.probe()
    right = getattr(engine, name)
    setattr(engine, name, lambda *arguments: does(right(*arguments)))
    return player


def raises(value: Any) -> Any:
    raise ValueError("it broke")


def said(*answers: Any) -> Any:
    """The same for each request."""
    return lambda value: {name: list(answers) for name in value}


@pytest.mark.parametrize(
    ("name", "does", "kind", "told"),
    [
        *((name, raises, FAILED, f"{name}(): ValueError: it broke") for name in ("step", "abort", "state")),
        ("add", raises, FAILED, "ValueError: it broke"),
        ("step", said(None), FAILED, "step(): AttributeError"),
        ("step", said(*[Answer((5,), finish_reason="length")] * 2), IMPOSSIBLE, "2 samples"),
        ("step", said(Answer((5,), finish_reason="length")), IMPOSSIBLE, "after 1 of 4 tokens"),
        ("step", lambda value: {}, IMPOSSIBLE, "the engine says that it is done"),
        ("state", lambda value: None, FAILED, "state(): AttributeError"),
        ("state", lambda value: {**value, "free_slots": 3, "num_slots": 4}, LEAK, "1 of 4 slots are not free"),
    ],
)
def test_what_an_engine_does_wrong_is_one_finding_of_its_kind(name: str, does: Any, kind: str, told: str) -> None:
    trace = Trace((greedy("", A[:5], 4), greedy("", A[:5], 4, abort_after=1)))
    found = finding(trace, wrong(name, does).play(trace))
    assert found is not None and (found.kind, told in found.what) == (kind, True), found


# In rounds


class Generates:
    """Our engine without steps."""

    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        return Own(model(), {}).generate(requests)


def test_an_engine_without_steps_gets_no_finding_for_rounds() -> None:
    player = steps(Generates)
    abilities = player.probe()
    assert (abilities.can_abort, abilities.takes_cold, abilities.takes_samples) == (False, False, True)
    played = player.play(EVERYTHING)
    assert finding(EVERYTHING, played) is None
    firsts = [answers[0] for answers in played.answers]
    assert {index: answer.error for index, answer in enumerate(firsts) if answer.error} == {2: NO_ABORT, 3: NO_ABORT}
    assert [answer.sent for answer in firsts] == [0, 0, None, None, 1, 0, 1, 0, 0, 0] and played.clock == "rounds"
    assert [len(answers) for answers in played.answers] == [1, 1, 1, 1, 1, 2, 2, 1, 1, 1]
