"""Shrinks a failing trace: fewer requests, shorter prompts, simpler parameters, less overlap, in this order.

Each edit is applied to the smallest trace so far, and kept if it still fails, until a round of all edits changes
nothing. The caller decides whether a trace fails: on a server that takes several replays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import MOMENT, Request, Trace, changed

Edit = Callable[[Trace], Trace | None]  # None: it does not apply
Fails = Callable[[Trace], bool]


def shrunk(trace: Trace, fails: Fails, more: Callable[[], bool] = lambda: True) -> Trace:
    """`more` is called before each attempt: whether there is time left."""
    best, changed = trace, True
    while changed:
        changed = False
        for edits in (fewer_requests, shorter_prompts, simpler, less_overlap):
            for edit in edits(best):
                candidate = None
                with contextlib.suppress(RequestError, IndexError):
                    candidate = edit(best)
                if candidate is None or candidate == best:
                    continue
                if not more():
                    return best
                if fails(candidate):
                    best, changed = candidate, True
    return best


def halves(count: int) -> Iterator[int]:
    """count / 2, count / 4, ..., 1."""
    while count > 1:
        count //= 2
        yield count


def fewer_requests(trace: Trace) -> Iterator[Edit]:
    """Without halves, quarters and so on, from the first: the failing ones are often the last."""
    count = len(trace.requests)
    for size in halves(count):
        yield from (partial(without_up_to, left=left, size=size) for left in range(count, size - 1, -size))


def without_up_to(trace: Trace, left: int, size: int) -> Trace | None:
    """Without `size` requests that have `left - size` behind them: earlier edits change indices, not this number."""
    return without(trace, len(trace.requests) - left, size) if left <= len(trace.requests) else None


def without(trace: Trace, start: int, size: int) -> Trace | None:
    """A request that waited for a removed one waits for what that one waited for."""
    gone = set(range(start, start + size))
    kept = [index for index in range(len(trace.requests)) if index not in gone]
    if not kept or len(kept) == len(trace.requests):
        return None
    place = {old: new for new, old in enumerate(kept)}
    requests = []
    for index in kept:
        request = trace.requests[index]
        after, tokens = request.after, request.after_tokens
        while after is not None and after in gone:
            waited = trace.requests[after]
            after, tokens = waited.after, waited.after_tokens
        requests.append(replace(request, after=None if after is None else place[after], after_tokens=tokens))
    return Trace(tuple(requests))


def shorter_prompts(trace: Trace) -> Iterator[Edit]:
    """Without a piece of a prompt and of all others that begin with the same tokens; then of this prompt alone."""
    for index, request in enumerate(trace.requests):
        length = len(request.prompt_token_ids)
        for size in halves(length):
            for start in dict.fromkeys((length - size, (length - size) // 2, 0)):
                yield partial(cut, index=index, start=start, size=size, everywhere=True)
                yield partial(cut, index=index, start=start, size=size, everywhere=False)


def cut(trace: Trace, index: int, start: int, size: int, everywhere: bool) -> Trace | None:
    """Removes a piece of one prompt; `everywhere`: the same of each longer prompt that is equal up to its end."""
    prompt, stop = trace.requests[index].prompt_token_ids, start + size
    if stop > len(prompt) or size == len(prompt):
        return None
    requests = []
    for number, request in enumerate(trace.requests):
        ids = request.prompt_token_ids
        is_cut = everywhere and ids[:stop] == prompt[:stop] and len(ids) > size
        shorter = ids[:start] + ids[stop:] if is_cut or number == index else ids
        requests.append(replace(request, prompt_token_ids=shorter))
    return Trace(tuple(requests))


def simpler(trace: Trace) -> Iterator[Edit]:
    """Each request without its special parameters, and with fewer tokens."""
    for index, request in enumerate(trace.requests):
        yield from (partial(with_fields, index=index, fields=fields) for fields in simpler_fields(request))


def simpler_fields(request: Request) -> Iterator[Mapping[str, object]]:
    yield {"temperature": 0.0, "n": 1, "seed": None}
    yield {"n": 1}
    yield {"stop": ()}
    yield {"abort_after": None}
    yield {"cold": False}
    yield {"streamed": False}
    yield {"pause": 0}
    yield from ({"max_tokens": most} for most in (1, 2, *sorted(halves(request.max_tokens)), request.max_tokens - 1))
    yield from ({"abort_after": most} for most in range(request.abort_after or 0))
    yield from ({"after_tokens": most} for most in range(1, request.after_tokens or 1))


def with_fields(trace: Trace, index: int, fields: Mapping[str, object]) -> Trace | None:
    """None where that would be no simpler."""
    request = trace.requests[index]
    for name in ("max_tokens", "abort_after", "after_tokens"):
        now, then = getattr(request, name), fields.get(name)
        if isinstance(then, int) and (now is None or then >= now):
            return None
    return Trace((*trace.requests[:index], changed(request, **fields), *trace.requests[index + 1 :]))


def less_overlap(trace: Trace) -> Iterator[Edit]:
    """One request after another; if that does not fail, requests that wait for tokens are sent at once."""
    for index, request in enumerate(trace.requests):
        moments: list[dict[str, int | None]] = []
        if index and (request.after is None or request.after_tokens is not None):
            moments.append({"after": index - 1, "pause": MOMENT})
        if request.after_tokens is not None:
            moments.append({"after": None, "pause": 0})
        for moment in moments:
            yield partial(with_fields, index=index, fields={"after_tokens": None, **moment})
