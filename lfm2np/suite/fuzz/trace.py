"""Traces made of others: with other tokens, one behind another, one request at a time."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lfm2np.oracle.engines.records import MOMENT, Request, Trace

STOP_IN = "stop_in"  # the tag of a request whose stop string is chosen anew: it ends within this token of its answer


def relabelled(trace: Trace, alphabet: Sequence[int], seed: int) -> Trace:
    """The same trace with other tokens: the alphabet is permuted, so that shared prefixes stay shared.

    A server has the prefixes of a trace cached, so the same trace again would be another test.
    """
    others = list(alphabet)
    random.Random(seed).shuffle(others)
    place: Mapping[int, int] = dict(zip(alphabet, others, strict=True))
    return Trace(
        tuple(
            replace(request, prompt_token_ids=tuple(place.get(token, token) for token in request.prompt_token_ids))
            for request in trace.requests
        )
    )


def joined(traces: Sequence[Trace]) -> Trace:
    """One after another: each begins when the last request of the one before has ended (others of it may still run)."""
    requests: list[Request] = []
    for trace in traces:
        start = len(requests)
        for request in trace.requests:
            if request.after is not None:
                requests.append(replace(request, after=request.after + start))
            else:
                requests.append(replace(request, after=start - 1 if start else None))
    return Trace(tuple(requests))


def in_turn(requests: Sequence[Request]) -> Trace:
    """One at a time, each a moment after the end of the one before, when the engine has released it."""
    return Trace(
        tuple(
            replace(request, after=index - 1 if index else None, after_tokens=None, pause=MOMENT if index else 0)
            for index, request in enumerate(requests)
        )
    )
