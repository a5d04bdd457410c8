"""Shrinking by predicates without a server, whose smallest traces are known."""

from collections.abc import Callable
from typing import Any

import pytest
from any_traces import any_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2np.oracle.engines.records import Request, Trace, greedy
from lfm2np.suite.fuzz.shrink import shrunk, without

Fails = Callable[[Trace], bool]
SEVEN = (10, 11, 12, 13, 14, 15, 16)
BIG = Trace(
    (
        greedy("", (17, 11), 6, streamed=True),
        greedy("", (*SEVEN, 17, 17), 6, after=0, after_tokens=2, temperature=1.0, seed=3, n=2),
        greedy("", (15,), 4, stop="x", cold=True),
        greedy("", (*SEVEN, 10, 11, 12), 5, after=1, pause=5, abort_after=3),
        greedy("", (12, 13), 2, after=3, after_tokens=1),
    )
)


def shares(trace: Trace) -> bool:
    """A request that waits for the end of another and begins with the same five tokens."""
    for request in trace.requests:
        if request.after is not None and request.after_tokens is None:
            other = trace.requests[request.after]
            if len(request.prompt_token_ids) >= 5 and request.prompt_token_ids[:5] == other.prompt_token_ids[:5]:
                return True
    return False


def test_a_shared_beginning_ends_as_two_bare_requests_of_five_tokens() -> None:
    small = shrunk(BIG, shares)
    first, second = small.requests
    assert first == greedy("", first.prompt_token_ids, 1) and second == greedy("", first.prompt_token_ids, 1, after=0)
    assert len(first.prompt_token_ids) == 5


def some(holds: Callable[[Request], object]) -> Fails:
    return lambda trace: any(holds(request) for request in trace.requests)


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (lambda trace: True, [{}]),
        (lambda trace: len(trace.requests) >= 3, [{}, {"after": 0}, {"after": 1}]),  # one after another
        (some(lambda request: 13 in request.prompt_token_ids), [{"prompt": 13}]),
        (some(lambda request: request.cold), [{"cold": True}]),
        (some(lambda request: request.stop), [{"stop": "x"}]),
        (some(lambda request: request.max_tokens >= 3), [{"max_tokens": 3}]),
        (some(lambda request: request.abort_after is not None), [{"abort_after": 0}]),
        (some(lambda request: request.after_tokens is not None), [{}, {"after": 0, "after_tokens": 1}]),
        (some(lambda request: request.params.temperature), [{"temperature": 1.0, "seed": 3}]),  # n = 2 goes before
    ],
)
def test_what_is_not_needed_goes(fails: Fails, expected: list[dict[str, Any]]) -> None:
    """Each request ends with a prompt of one token and an answer of the least that fails."""
    small = shrunk(BIG, fails)
    assert fails(small) and len(small.requests) == len(expected)
    for request, fields in zip(small.requests, expected, strict=True):
        prompt = (fields["prompt"],) if "prompt" in fields else request.prompt_token_ids
        wanted = {"max_tokens": 1, **{name: value for name, value in fields.items() if name != "prompt"}}
        assert len(prompt) == 1 and request == greedy("", prompt, **wanted)


def test_prompts_that_must_stay_equal_are_cut_together() -> None:
    def equal(trace: Trace) -> bool:
        return len({request.prompt_token_ids for request in trace.requests}) < len(trace.requests)

    first, second = shrunk(
        Trace((greedy("", SEVEN, 2), greedy("", (9, 8), 1), greedy("", SEVEN, 3, after=0))), equal
    ).requests
    assert first.prompt_token_ids == second.prompt_token_ids and len(first.prompt_token_ids) == 1


def test_it_stops_when_there_is_no_time_left() -> None:
    left = iter([True] * 3 + [False] * 1000)
    tried: list[Trace] = []
    shrunk(BIG, lambda trace: bool(tried.append(trace)), lambda: next(left))
    assert len(tried) == 3
    assert shrunk(BIG, lambda trace: pytest.fail("tried"), lambda: False) == BIG


@pytest.mark.slow
@settings(max_examples=30)
@given(any_traces(), st.integers(0, 2**16))
def test_it_ends_and_tries_only_traces_that_differ_from_the_best(trace: Trace, bits: int) -> None:
    """Whatever the predicate says; a trace that is none can't be made: its constructor raises."""
    best, tried = [trace], 0

    def fails(candidate: Trace) -> bool:
        nonlocal tried
        tried += 1
        assert candidate != best[0]
        assert tried < 5000
        failed = hash(candidate) & bits == 0
        best[0] = candidate if failed else best[0]
        return failed

    assert shrunk(trace, fails) == best[0]


def test_those_that_waited_for_one_that_is_gone_wait_for_what_it_waited_for() -> None:
    left = without(BIG, 1, 1)
    assert left is not None
    assert [request.after for request in left.requests] == [None, None, 0, 2]
    assert left.requests[2].after_tokens == 2
    assert without(BIG, 0, 5) is without(BIG, 5, 1) is None
