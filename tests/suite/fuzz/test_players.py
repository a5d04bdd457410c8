"""Traces carried out on right engines: no finding, and each in its order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lfm2np.suite.fuzz.play_engine import RoundsPlayer, StepsPlayer, rounds_of
from lfm2np.suite.fuzz.played import FAILED, HANG, IMPOSSIBLE, LEAK
from served_here import folder, model, player_of, serving

from lfm2np.oracle.engines.dialects import VLLM
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import HANG, IMPOSSIBLE, Answer, Trace, greedy
from lfm2np.oracle.engines.target import TargetError
from lfm2np.suite.adapters import Own
from lfm2np.suite.fuzz.draw_traces import alphabet_of
from lfm2np.suite.fuzz.finding import finding_of

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


@pytest.mark.parametrize(("numerics", "format_name"), [("exact", "float32"), ("float32", "float32")])
def test_a_right_server_gets_no_finding_for_a_trace_of_everything(numerics: str, format_name: str) -> None:
    with serving(numerics) as here, player_of(here) as player:
        takes = player.probe()
        assert (takes.samples, takes.sampling, takes.stops) == (True, True, True)
        for _ in range(2):  # cold and warm
            played = player.play(EVERYTHING)
            assert finding_of(model(), format_name, EVERYTHING, played) is None
    assert [len(reply.answers) for reply in played.replies] == [1, 1, 1, 0, 1, 2, 2, 1, 1, 1]
    left = {index for index, reply in enumerate(played.replies) if reply.left}
    assert left in ({2}, {2, 3})  # a quick server may have answered 3 before it was left
    times = played.replies
    assert times[1].sent >= times[0].first and times[4].sent >= times[0].ended and times[6].sent >= times[5].ended
    assert all(reply.sent <= reply.ended for reply in times)


def test_the_bodies_that_a_script_gets_are_those_that_are_sent() -> None:
    with serving() as here, player_of(here) as player:
        player.probe()
        bodies = [player.body(index, sent) for index, sent in enumerate(EVERYTHING.requests)]
        assert player.dialect is VLLM
    assert [body["prompt"] for body in bodies] == [list(request.prompt) for request in EVERYTHING.requests]
    assert bodies[5]["n"] == 2 and bodies[5]["temperature"] == 1.0 and bodies[7]["stop"] == [STOPS]
    assert [index for index, body in enumerate(bodies) if "cache_salt" in body] == [4]


def steps(make: Any = None, **sizes: Any) -> StepsPlayer:
    return StepsPlayer("own", folder(), make or (lambda: Own(model(), {"block_size": 4, **sizes})))


WITHOUT_STOPS = Trace(tuple(one for one in EVERYTHING.requests if one.stop is None))


def test_an_engine_that_steps_gets_no_finding_either() -> None:
    player = steps(max_num_seqs=3, max_num_batched_tokens=16)
    takes = player.probe()
    assert player.steps() and takes.sampling and takes.samples and takes.stops
    for _ in range(2):
        played = player.play(WITHOUT_STOPS)
        assert finding_of(model(), "float32", WITHOUT_STOPS, played) is None
    assert played.counted["cached_tokens"] > 0
    replies = played.replies
    assert len(replies[2].answers[0].token_ids or ()) == 2 and replies[2].left  # aborted after two
    assert replies[3].left and replies[3].answers[0].token_ids == ()
    assert replies[4].sent >= replies[0].ended
    player.close()


def test_the_named_factory_is_made_with_the_folder() -> None:
    player = StepsPlayer("lfm2np.suite.adapters:own", folder())
    assert finding_of(model(), "float32", WITHOUT_STOPS, player.play(WITHOUT_STOPS)) is None


def test_a_request_is_added_before_the_step_that_follows_the_tokens_it_waits_for() -> None:
    calls: list[str] = []

    class Noted(Own):
        def add(self, request: Any) -> None:
            calls.append(
                f"add {request.request_id[-1]} salted" if request.cache_salt else f"add {request.request_id[-1]}"
            )
            super().add(request)

        def step(self) -> Any:
            calls.append("step")
            return super().step()

        def abort(self, request_id: str) -> Any:
            calls.append(f"abort {request_id[-1]}")
            return super().abort(request_id)

    trace = Trace(
        (
            greedy("", A[:3], 4),
            greedy("", A[:2], 2, after=0, after_tokens=2),
            greedy("", A[:2], 9, after=1, abort_after=1, cold=True),
            greedy("", A[:2], 1, after=2),
        )
    )
    steps(lambda: Noted(model(), {})).play(trace)
    expected = ["add 0", "step", "step", "add 1", "step", "step", "add 2 salted", "step", "abort 2", "add 3", "step"]
    assert calls == expected


class Wrong(Own):
    """Our engine with one method that does `does`."""

    def __init__(self, does: Any) -> None:
        super().__init__(model(), {})
        self.does = does

    def step(self) -> Any:
        return self.does("step", super().step())

    def abort(self, request_id: str) -> Any:
        return self.does("abort", super().abort(request_id))

    def state(self) -> Any:
        return self.does("state", super().state())

    def metrics(self) -> Any:
        return self.does("metrics", super().metrics())

    def add(self, request: Any) -> None:
        self.does("add", None)
        super().add(request)


def doing(name: str, what: Any) -> Any:
    return lambda method, value: what(value) if method == name else value


def raises(value: Any) -> Any:
    raise ValueError("it broke")


def each(value: Any, entries: list[Any]) -> Any:
    """The same for each request."""
    return {name: list(entries) for name in value}


def renamed(value: Any) -> Any:
    return {f"{name}x": item for name, item in value.items()}


@pytest.mark.parametrize(
    ("does", "kind", "told"),
    [
        (doing("step", raises), FAILED, "step(): ValueError: it broke"),
        (doing("add", raises), FAILED, "ValueError: it broke"),
        (doing("abort", raises), FAILED, "abort(): ValueError: it broke"),
        (doing("step", lambda value: None), FAILED, "step(): AttributeError"),
        (doing("step", lambda value: dict.fromkeys(value)), FAILED, "step(): TypeError"),
        (doing("step", lambda value: each(value, [None])), FAILED, "step(): AttributeError"),
        (doing("step", lambda value: each(value, [Answer(None)])), FAILED, "step(): TypeError"),  # type: ignore[arg-type]
        (
            doing("step", lambda value: each(value, [Answer((999,), finish_reason="length")])),
            IMPOSSIBLE,
            "token id 999",
        ),
        (
            doing("step", lambda value: each(value, [Answer((5,) * 99, finish_reason="length")])),
            IMPOSSIBLE,
            "99 tokens",
        ),
        (doing("step", lambda value: each(value, [Answer((5,), finish_reason="length")] * 2)), IMPOSSIBLE, "2 samples"),
        (
            doing("step", lambda value: each(value, [Answer(("a",), finish_reason="length")])),
            IMPOSSIBLE,
            "no completion",
        ),  # type: ignore[arg-type]
        (
            doing("step", lambda value: each(value, [Answer((5,), finish_reason="length")])),
            IMPOSSIBLE,
            "after 1 of 4 tokens",
        ),
        (doing("step", lambda value: {}), IMPOSSIBLE, "the engine says that it is done"),
        (doing("step", renamed), IMPOSSIBLE, "the engine says that it is done"),
        (doing("state", raises), FAILED, "state(): ValueError"),
        (doing("state", lambda value: None), FAILED, "state(): AttributeError"),
        (doing("state", lambda value: {"free_slots": "a", "num_slots": 4}), FAILED, "state(): TypeError"),
        (doing("state", lambda value: {**value, "free_slots": 3, "num_slots": 4}), LEAK, "1 of 4 slots are not free"),
    ],
)
def test_what_an_engine_does_wrong_is_one_finding_of_its_kind(does: Any, kind: str, told: str) -> None:
    trace = Trace((greedy("", A[:5], 4), greedy("", A[:5], 4, abort_after=1)))
    player = steps(lambda: Wrong(does))
    finding = finding_of(model(), "float32", trace, player.play(trace))
    assert finding is not None and (finding.kind, told in finding.what) == (kind, True), finding


@pytest.mark.parametrize("what", [raises, lambda value: None, lambda value: {"cached_tokens": "many"}])
def test_invalid_metrics_only_do_not_steer(what: Any) -> None:
    trace = Trace((greedy("", A[:5], 2),))
    played = steps(lambda: Wrong(doing("metrics", what))).play(trace)
    assert finding_of(model(), "float32", trace, played) is None and played.counted == {}


def test_an_engine_that_never_finishes_hangs() -> None:
    class Busy(Own):
        def step(self) -> Any:
            return {}

        has_unfinished = True  # type: ignore[assignment]

    trace = Trace((greedy("", A[:2], 1),))
    finding = finding_of(model(), "float32", trace, steps(lambda: Busy(model(), {})).play(trace))
    assert finding is not None and (finding.kind, finding.request) == (HANG, 0)


def test_an_engine_is_made_anew_after_a_fault_and_when_closed() -> None:
    created: list[Wrong] = []

    def make() -> Wrong:
        created.append(Wrong(lambda method, value: raises(value) if method == "step" and len(created) == 1 else value))
        return created[-1]

    player, trace = steps(make), Trace((greedy("", A[:3], 2),))
    assert player.play(trace).replies[0].trouble is not None
    assert player.play(trace).replies[0].trouble is None
    player.play(trace)
    assert len(created) == 2
    player.close()
    player.play(trace)
    assert len(created) == 3


def test_a_factory_that_fails_is_a_target_error() -> None:
    with pytest.raises(TargetError, match="own: ValueError: it broke"):
        steps(lambda: raises(None)).steps()


# In rounds


def test_who_waits_for_an_end_goes_out_in_a_later_round() -> None:
    trace = Trace(
        (
            greedy("", (5,), 3),
            greedy("", (6,), 1, after=0),
            greedy("", (7,), 1, after=0, after_tokens=2),
            greedy("", (8,), 1, after=1, after_tokens=1),
            greedy("", (9,), 1, after=3),
            greedy("", (9,), 1),
        )
    )
    assert rounds_of(trace) == [[0, 2, 5], [1, 3], [4]]


@pytest.fixture
def rounds() -> Iterator[RoundsPlayer]:
    player = RoundsPlayer(PythonTarget("lfm2np.suite.adapters:own", folder()))
    yield player
    player.close()


def test_rounds_on_any_target_get_no_finding(rounds: RoundsPlayer) -> None:
    trace = Trace(tuple(request for request in WITHOUT_STOPS.requests if not request.temperature))
    takes = rounds.probe()
    assert (takes.sampling, takes.samples, takes.stops) == (False, False, False)
    played = rounds.play(trace)
    assert finding_of(model(), "float32", trace, played) is None
    assert [reply.sent for reply in played.replies] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert [len(reply.answers) for reply in played.replies][:3] == [1, 1, 1]


def test_what_a_target_refutes_is_impossible_and_what_it_fails_on_failed() -> None:
    class Said:
        def answer(self, requests: Any, left: Any) -> list[Answer]:
            return [
                Answer(error="no", kind="impossible" if request.request_id == "0" or None else "")
                for request in requests
            ]

    trace = Trace((greedy("", A[:2], 1), greedy("", A[:2], 1), greedy("", A[:2], 4, abort_after=1)))
    replies = RoundsPlayer(Said()).play(trace).replies  # type: ignore[arg-type]
    assert [reply.trouble and reply.trouble.kind for reply in replies] == [IMPOSSIBLE, FAILED, None]
