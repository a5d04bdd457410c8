"""Traces as plain data: what is one, as JSON, with other tokens, one after another."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from any_traces import ALPHABET, any_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2np.errors import RequestError
from lfm2np.suite.fuzz.trace import MOST_REQUESTS, Sent, Trace, as_json, calm, from_json, joined, relabelled

FIRST = {"prompt": [5, 6], "max_tokens": 8}


@given(any_traces())
def test_a_trace_written_as_json_and_read_is_the_same(trace: Trace) -> None:
    assert from_json(json.loads(json.dumps(as_json(trace)))) == trace


def test_json_leaves_out_what_is_as_by_default() -> None:
    trace = Trace((Sent((5, 6)), Sent((7,), 3, after=0, cold=True)))
    rows = [{"prompt": (5, 6), "max_tokens": 1}, {"prompt": (7,), "max_tokens": 3, "after": 0, "cold": True}]
    assert as_json(trace) == {"requests": rows}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [5, True]}, "prompt"),
        ({"prompt": [5, 1.0]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens 0: expected a whole number, at least 1"),
        ({"max_tokens": None}, "max_tokens None"),
        ({"max_tokens": 2.0}, "max_tokens 2.0"),
        ({"max_tokens": True}, "max_tokens True"),
        ({"pause": -1}, "pause -1: expected a whole number, 0 to 60000"),
        ({"pause": 60_001}, "pause 60001"),
        ({"samples": 0, "temperature": 1.0}, "samples 0"),
        ({"samples": 65, "temperature": 1.0}, "samples 65"),
        ({"samples": 2}, "samples 2: expected 1 at temperature 0"),
        ({"seed": -1}, "seed -1"),
        ({"seed": None}, "seed None"),
        ({"after": 1}, "after 1: expected a whole number, 0 to 0"),
        ({"after": -1}, "after -1"),
        ({"after": 0, "after_tokens": 0}, "after_tokens 0"),
        ({"after_tokens": 1}, "after_tokens 1: expected `after`"),
        ({"abort_after": -1}, "abort_after -1"),
        ({"abort_after": "1"}, "abort_after '1'"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": -0.5}, "temperature -0.5"),
        ({"temperature": 101}, "temperature 101"),
        ({"temperature": "1"}, "temperature '1'"),
        ({"stop": ""}, "stop ''"),
        ({"stop": ["a"]}, "stop ['a']"),
        ({"cold": 1}, "true or false for cold"),
        ({"streamed": None}, "true or false for cold, streamed and scored"),
        ({"colour": 1}, "colour: expected one of abort_after"),
    ],
)
def test_each_wrong_field_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=r"^requests\[1\]") as caught:
        from_json({"requests": [FIRST, FIRST | fields]})
    assert named in str(caught.value)


def test_the_first_request_can_wait_for_none() -> None:
    with pytest.raises(RequestError, match=r"requests\[0\].after 0: expected none, as no request is before it"):
        from_json({"requests": [FIRST | {"after": 0}]})


@pytest.mark.parametrize(
    "raw",
    [
        *(None, [], {}, {"requests": None}, {"requests": []}, {"requests": [1]}, {"requests": [{"max_tokens": 1}]}),
        *({"requests": [{"prompt": "ab"}]}, {"requests": [FIRST], "more": 1}),
        {"requests": [FIRST] * (MOST_REQUESTS + 1)},
    ],
)
def test_what_is_no_trace_at_all_is_refused(raw: Any) -> None:
    with pytest.raises(RequestError, match="expected"):
        from_json(raw)


def shared(trace: Trace) -> list[list[int]]:
    """How many tokens each two prompts have in common at their beginning."""
    return [[beginning(request.prompt, other.prompt) for other in trace.requests] for request in trace.requests]


def beginning(first: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(first, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@given(any_traces(), st.integers(0, 99))
def test_other_tokens_keep_what_was_shared_and_all_else(trace: Trace, seed: int) -> None:
    other = relabelled(trace, ALPHABET, seed)
    assert shared(other) == shared(trace)
    for old, new in zip(trace.requests, other.requests, strict=True):
        assert Sent(**{**vars(new), "prompt": old.prompt}) == old
        assert [token == 1 for token in new.prompt] == [token == 1 for token in old.prompt]  # the BOS stays
        assert all(token in ALPHABET for token in new.prompt if token != 1)


@given(st.integers(0, 999))
def test_tokens_change_places_so_that_each_has_one_and_one_has_each(seed: int) -> None:
    (request,) = relabelled(Trace((Sent(ALPHABET),)), ALPHABET, seed).requests
    assert sorted(request.prompt) == list(ALPHABET)
    assert request == relabelled(Trace((Sent(ALPHABET),)), ALPHABET, seed).requests[0]


def test_most_seeds_give_other_tokens() -> None:
    trace = Trace((Sent(ALPHABET[:3]),))
    assert len({relabelled(trace, ALPHABET, seed) for seed in range(50)}) > 40


@settings(max_examples=40)
@given(st.lists(any_traces(3), min_size=1, max_size=4))
def test_joined_traces_begin_one_after_another(traces: list[Trace]) -> None:
    whole = joined(traces)
    assert len(whole.requests) == sum(len(drawn.requests) for drawn in traces)
    start = 0
    for number, trace in enumerate(traces):
        for index, old in enumerate(trace.requests):
            new = whole.requests[start + index]
            after = start - 1 if old.after is None else old.after + start
            assert new.after == (None if number == 0 and old.after is None else after)
            assert Sent(**{**vars(new), "after": old.after if index else None}) == old
        start += len(trace.requests)


@settings(max_examples=40)
@given(any_traces())
def test_tokens_are_wanted_one_by_one_where_somebody_counts_them(trace: Trace) -> None:
    for index, request in enumerate(trace.requests):
        counted = any(other.after == index and other.after_tokens for other in trace.requests)
        assert trace.is_streamed(index) == (request.streamed or request.abort_after is not None or counted)


def test_a_calm_trace_has_the_same_requests_one_after_another() -> None:
    trace = Trace((Sent((5,), 4), Sent((6,), 2), Sent((7,), after=0, after_tokens=2, abort_after=0)))
    moments = [(request.after, request.after_tokens, request.pause > 0) for request in calm(trace).requests]
    assert moments == [(None, None, False), (0, None, True), (1, None, True)]
    assert [(request.prompt, request.max_tokens, request.abort_after) for request in calm(trace).requests] == [
        ((5,), 4, None),
        ((6,), 2, None),
        ((7,), 1, 0),
    ]
