"""Makes a trace that fails small: fewer requests, shorter prompts, simpler parameters, less overlap, in this order.

Each edit is tried on what the edits before it left, and kept if the trace still fails; rounds of all edits follow one
another until one changes nothing. Whether a trace fails is the caller's to say: on a server that takes replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from lfm2np.errors import RequestError
from lfm2np.fuzz.trace import MOMENT, Sent, Trace

Edit = Callable[[Trace], Trace | None]  # None: it can't be done to this one
Fails = Callable[[Trace], bool]


def shrunk(trace: Trace, fails: Fails, more: Callable[[], bool] = lambda: True) -> Trace:
    """`more` says before each try whether there is time left."""
    best, changed = trace, True
    while changed:
        changed = False
        for edits in (fewer_requests, shorter_prompts, simpler, less_overlap):
            for edit in edits(best):
                candidate = attempt(edit, best)
                if candidate is None or candidate == best:
                    continue
                if not more():
                    return best
                if fails(candidate):
                    best, changed = candidate, True
    return best


def attempt(edit: Edit, trace: Trace) -> Trace | None:
    try:
        return edit(trace)
    except (RequestError, IndexError):
        return None


def halves(count: int) -> Iterator[int]:
    """count / 2, count / 4, ..., 1."""
    while count > 1:
        count //= 2
        yield count


def fewer_requests(trace: Trace) -> Iterator[Edit]:
    """By halves, quarters and so on, from the first: those that fail are often the last."""
    count = len(trace.requests)
    for size in halves(count):
        yield from (partial(without_up_to, left=left, size=size) for left in range(count, size - 1, -size))


def without_up_to(trace: Trace, left: int, size: int) -> Trace | None:
    """Without `size` requests that have `left - size` behind them: counted from the end, which edits before leave."""
    return without(trace, len(trace.requests) - left, size) if left <= len(trace.requests) else None


def without(trace: Trace, start: int, size: int) -> Trace | None:
    """Those that waited for one that is gone wait for what that one waited for."""
    gone = set(range(start, start + size))
    kept = [index for index in range(len(trace.requests)) if index not in gone]
    if not kept or len(kept) == len(trace.requests):
        return None
    place = {old: new for new, old in enumerate(kept)}
    sent = []
    for index in kept:
        one = trace.requests[index]
        after, tokens = one.after, one.after_tokens
        while after is not None and after in gone:
            waited = trace.requests[after]
            after, tokens = waited.after, waited.after_tokens
        sent.append(replace(one, after=None if after is None else place[after], after_tokens=tokens))
    return Trace(tuple(sent))


def shorter_prompts(trace: Trace) -> Iterator[Edit]:
    """Pieces of a prompt, and of all others that begin with the same tokens; then of it alone."""
    for index, one in enumerate(trace.requests):
        length = len(one.prompt)
        for size in halves(length):
            for start in dict.fromkeys((length - size, (length - size) // 2, 0)):
                yield partial(cut_all, index=index, start=start, size=size)
                yield partial(cut_own, index=index, start=start, size=size)


def cut_all(trace: Trace, index: int, start: int, size: int) -> Trace | None:
    """Takes out a piece of one prompt, and the same of each that is equal up to the end of the piece."""
    own = trace.requests[index].prompt
    beginning = own[: start + size]
    if start + size > len(own) or size == len(own):
        return None
    return Trace(
        tuple(
            replace(one, prompt=one.prompt[:start] + one.prompt[start + size :])
            if one.prompt[: start + size] == beginning and len(one.prompt) > size
            else one
            for one in trace.requests
        )
    )


def cut_own(trace: Trace, index: int, start: int, size: int) -> Trace | None:
    own = trace.requests[index]
    if start + size > len(own.prompt) or size == len(own.prompt):
        return None
    return changed_one(trace, index, replace(own, prompt=own.prompt[:start] + own.prompt[start + size :]))


def changed_one(trace: Trace, index: int, sent: Sent) -> Trace:
    return Trace((*trace.requests[:index], sent, *trace.requests[index + 1 :]))


def simpler(trace: Trace) -> Iterator[Edit]:
    """Each request without what is special about it, and with fewer tokens."""
    for index, one in enumerate(trace.requests):
        yield from (partial(with_fields, index=index, fields=fields) for fields in simpler_fields(one))


def simpler_fields(one: Sent) -> Iterator[Mapping[str, object]]:
    yield {"temperature": 0.0, "samples": 1, "seed": 0}
    yield {"samples": 1}
    yield {"stop": None, "stop_in": None}
    yield {"abort_after": None}
    yield {"cold": False}
    yield {"streamed": False}
    yield {"pause": 0}
    yield from ({"max_tokens": most} for most in (1, 2, *sorted(halves(one.max_tokens)), one.max_tokens - 1))
    yield from ({"abort_after": most} for most in range(one.abort_after or 0))
    yield from ({"after_tokens": most} for most in range(1, one.after_tokens or 1))


def with_fields(trace: Trace, index: int, fields: Mapping[str, object]) -> Trace | None:
    """None where that would be no simpler."""
    one = trace.requests[index]
    for name in ("max_tokens", "abort_after", "after_tokens"):
        now, then = getattr(one, name), fields.get(name)
        if name in fields and (now is None or (isinstance(then, int) and then >= now)):
            return None
    return changed_one(trace, index, replace(one, **fields))  # type: ignore[arg-type]


def less_overlap(trace: Trace) -> Iterator[Edit]:
    """One after another; where that does not fail, those that wait for tokens go out at once."""
    for index, one in enumerate(trace.requests):
        if index and (one.after is None or one.after_tokens is not None):
            yield partial(with_moment, index=index, after=index - 1, pause=MOMENT)
        if one.after_tokens is not None:
            yield partial(with_moment, index=index, after=None, pause=0)


def with_moment(trace: Trace, index: int, after: int | None, pause: int) -> Trace | None:
    return changed_one(trace, index, replace(trace.requests[index], after=after, after_tokens=None, pause=pause))
