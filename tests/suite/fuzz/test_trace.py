"""Traces as plain data: what is one, as JSON, with other tokens, one after another."""

import json
import re
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
from any_traces import ALPHABET, any_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import MOST_REQUESTS, Trace, greedy
from lfm2np.oracle.engines.records_json import trace_as_json, trace_from_json
from lfm2np.suite.fuzz.trace import in_turn, joined, relabelled

FIRST = {"prompt_token_ids": [5, 6], "max_tokens": 8}


@pytest.mark.slow
@given(any_traces())
def test_a_trace_written_as_json_and_read_is_the_same(trace: Trace) -> None:
    assert trace_from_json(json.loads(json.dumps(trace_as_json(trace)))) == trace


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, -1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, True]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, 1.0]}, "prompt_token_ids"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids: str, expected a list"),
        ({"max_tokens": 0}, "max_tokens 0: expected a whole number, at least 1"),
        ({"max_tokens": None}, "max_tokens None"),
        ({"pause": -1}, "pause -1"),
        ({"pause": 60_001}, "pause 60001: expected a whole number, 0 to 60000"),
        ({"n": 0, "temperature": 1.0}, "n 0"),
        ({"n": 20_000, "temperature": 1.0}, "n 20000"),
        ({"n": 2}, "n 2: expected 1 with temperature 0"),
        ({"seed": -1}, "seed -1"),
        ({"priority": "first"}, "priority 'first'"),
        ({"sample": 1}, "sample 1: expected a whole number, 0 to 0"),
        ({"sample": None}, "sample None"),
        ({"request_id": 1}, "request_id 1"),
        ({"cache_salt": None}, "cache_salt None"),
        ({"tags": None}, "tags: NoneType, expected a JSON object"),
        ({"after": 1}, "after 1: expected a whole number, 0 to 0"),
        ({"after": -1}, "after -1"),
        ({"after": 0, "after_tokens": 0}, "after_tokens 0"),
        ({"after_tokens": 1}, "after_tokens 1: expected `after`"),
        ({"abort_after": -1}, "abort_after -1"),
        ({"abort_after": "1"}, "abort_after '1'"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"stop": ""}, "stop[0] ''"),
        ({"stop": [1]}, "stop[0]"),
        ({"cold": 1}, "true or false for cold"),
        ({"streamed": None}, "true or false for cold and streamed"),
        ({"colour": 1}, "colour: expected one of abort_after"),
    ],
)
def test_each_wrong_field_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=rf"^requests\[1\].*{re.escape(named)}"):
        trace_from_json({"requests": [FIRST, FIRST | fields]})


@pytest.mark.parametrize(
    "raw",
    [
        *(None, [], {}, {"requests": None}, {"requests": []}, {"requests": [1]}, {"requests": [{"max_tokens": 1}]}),
        *({"requests": [FIRST], "more": 1}, {"requests": [FIRST | {"after": 0}]}),
        {"requests": [FIRST] * (MOST_REQUESTS + 1)},
    ],
)
def test_what_is_no_trace_at_all_is_refused(raw: Any) -> None:
    with pytest.raises(RequestError, match="expected"):
        trace_from_json(raw)


def shared(trace: Trace) -> list[list[int]]:
    """How many tokens each two prompts have in common at their beginning."""
    prompts = [request.prompt_token_ids for request in trace.requests]
    alike = lambda pair: pair[0] == pair[1]  # noqa: E731
    return [[len([*takewhile(alike, zip(one, other, strict=False))]) for other in prompts] for one in prompts]


@pytest.mark.slow
@given(any_traces(), st.integers(0, 99))
def test_other_tokens_keep_what_was_shared_and_all_else(trace: Trace, seed: int) -> None:
    other = relabelled(trace, ALPHABET, seed)
    assert shared(other) == shared(trace)
    for old, new in zip(trace.requests, other.requests, strict=True):
        assert replace(new, prompt_token_ids=old.prompt_token_ids) == old
        pairs = list(zip(new.prompt_token_ids, old.prompt_token_ids, strict=True))
        assert all((token == 1) == (before == 1) for token, before in pairs)  # the BOS stays
        assert all(token in ALPHABET for token, _ in pairs if token != 1)


@pytest.mark.slow
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
            assert replace(new, after=old.after if index else None) == old
        start += len(trace.requests)


def test_a_calm_trace_has_the_same_requests_one_after_another() -> None:
    trace = Trace(
        (greedy("", (5,), 4), greedy("", (6,), 2), greedy("", (7,), 1, after=0, after_tokens=2, abort_after=0))
    )
    moments = [(request.after, request.after_tokens, request.pause > 0) for request in in_turn(trace.requests).requests]
    assert moments == [(None, None, False), (0, None, True), (1, None, True)]
    for old, new in zip(trace.requests, in_turn(trace.requests).requests, strict=True):
        assert replace(new, after=old.after, after_tokens=old.after_tokens, pause=0) == old
