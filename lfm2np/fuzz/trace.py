"""What is tried on an engine that serves: requests, and when each is sent relative to the others. Plain data.

    {"requests": [{"prompt": [5, 6, 7], "max_tokens": 8},
                  {"prompt": [5, 6, 9], "max_tokens": 4, "after": 0, "after_tokens": 3, "abort_after": 2}]}

The second is sent when three tokens of the first have come, and left when two of its own have.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lfm2np.errors import RequestError

Ids = tuple[int, ...]
MOST_REQUESTS, MOST_PAUSE = 1000, 60_000
MOMENT = 10  # milliseconds


@dataclass(frozen=True)
class Sent:
    """One request of a trace.

    after         an earlier request, by its index; None: at once
    after_tokens  send this one when so many tokens of it have come; None: when it has ended
    pause         milliseconds to wait then
    abort_after   leave when so many tokens have come (0: before the first); None: stay to the end
    cold          nothing that was computed for another request may be used, where a server takes that wish
    temperature   0: greedy, so each token is judged; else only log-probabilities are
    seed          of a request that samples
    samples       so many answers to one prompt
    stop          ends at this text
    stop_in       `stop` is chosen anew for each prompt: such that it ends within this token of the right answer
    streamed      wish the answer token by token; those that are left, or waited for, are anyway
    """

    prompt: Ids
    max_tokens: int = 1
    after: int | None = None
    after_tokens: int | None = None
    pause: int = 0
    abort_after: int | None = None
    cold: bool = False
    temperature: float = 0.0
    seed: int = 0
    samples: int = 1
    stop: str | None = None
    stop_in: int | None = None
    streamed: bool = False


@dataclass(frozen=True)
class Trace:
    """Requests in an order in which each waits for earlier ones only. RequestError for what is none."""

    requests: tuple[Sent, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.requests) <= MOST_REQUESTS:
            raise RequestError(f"requests: {len(self.requests)}, expected 1 to {MOST_REQUESTS}")
        for index, one in enumerate(self.requests):
            require_sent(one, index)

    @property
    def num_tokens(self) -> int:
        """Of all prompts and answers, at most."""
        return sum(len(one.prompt) + one.max_tokens * one.samples for one in self.requests)

    def is_streamed(self, index: int) -> bool:
        """Whether the tokens of a request are wanted one by one."""
        one = self.requests[index]
        waited = any(other.after == index and other.after_tokens is not None for other in self.requests)
        return one.streamed or one.abort_after is not None or waited


def is_due(sent: Sent, num_tokens: Sequence[int], has_ended: Sequence[bool]) -> bool:
    """Whether a request is to be sent, by how many tokens of each request have come, and whether it has ended."""
    if sent.after is None or has_ended[sent.after]:
        return True
    return sent.after_tokens is not None and num_tokens[sent.after] >= sent.after_tokens


def require_sent(one: Sent, index: int) -> None:
    where = f"requests[{index}]"
    if not one.prompt or not all(type(token) is int and token >= 0 for token in one.prompt):
        raise RequestError(f"{where}.prompt: expected token ids, at least one")
    checks: tuple[tuple[str, Any, int, int | None], ...] = (
        ("max_tokens", one.max_tokens, 1, None),
        ("pause", one.pause, 0, MOST_PAUSE),
        ("samples", one.samples, 1, 64),
        ("seed", one.seed, 0, None),
        ("after", one.after, 0, index - 1),
        ("after_tokens", one.after_tokens, 1, None),
        ("abort_after", one.abort_after, 0, None),
        ("stop_in", one.stop_in, 0, None),
    )
    for name, value, least, most in checks:
        is_whole = type(value) is int and value >= least and (most is None or value <= most)
        if not is_whole and (value is not None or name in ("max_tokens", "pause", "samples", "seed")):
            if most is not None and most < least:
                raise RequestError(f"{where}.{name} {value!r}: expected none, as no request is before it")
            limit = f"at least {least}" if most is None else f"{least} to {most}"
            raise RequestError(f"{where}.{name} {value!r}: expected a whole number, {limit}")
    if one.after is None and one.after_tokens is not None:
        raise RequestError(f"{where}.after_tokens {one.after_tokens}: expected `after`, whose tokens they are")
    if type(one.temperature) not in (int, float) or not 0 <= one.temperature <= 100:
        raise RequestError(f"{where}.temperature {one.temperature!r}: expected 0 to 100")
    if one.samples > 1 and one.temperature == 0:
        raise RequestError(f"{where}.samples {one.samples}: expected 1 at temperature 0")
    if one.stop is not None and (not isinstance(one.stop, str) or not one.stop):
        raise RequestError(f"{where}.stop {one.stop!r}: expected a text")
    if type(one.cold) is not bool or type(one.streamed) is not bool:
        raise RequestError(f"{where}: expected true or false for cold and streamed")


def as_json(trace: Trace) -> dict[str, Any]:
    """Without what is as by default."""
    defaults = dataclasses.asdict(Sent((0,)))
    rows = [dataclasses.asdict(one) for one in trace.requests]
    return {
        "requests": [
            {name: value for name, value in row.items() if name in ("prompt", "max_tokens") or value != defaults[name]}
            for row in rows
        ]
    }


def from_json(raw: Any) -> Trace:
    """RequestError that names the field for what `as_json` did not write."""
    if not isinstance(raw, dict) or set(raw) != {"requests"} or not isinstance(raw["requests"], list):
        raise RequestError("a trace: expected an object with a list `requests`")
    known = {one.name for one in dataclasses.fields(Sent)}
    sent = []
    for index, row in enumerate(raw["requests"]):
        where = f"requests[{index}]"
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), list):
            raise RequestError(f"{where}: expected an object with a list `prompt`")
        if unknown := sorted(set(row) - known):
            raise RequestError(f"{where}.{unknown[0]}: expected one of {', '.join(sorted(known))}")
        sent.append(Sent(**{**row, "prompt": tuple(row["prompt"])}))
    return Trace(tuple(sent))


def relabelled(trace: Trace, alphabet: Sequence[int], seed: int) -> Trace:
    """The same trace of other tokens: those of the alphabet change places, so that what was shared still is.

    A server that was asked a trace has its prefixes cached: the same trace again is another test.
    """
    others = list(alphabet)
    random.Random(seed).shuffle(others)
    place: Mapping[int, int] = dict(zip(alphabet, others, strict=True))
    return Trace(
        tuple(replace(one, prompt=tuple(place.get(token, token) for token in one.prompt)) for one in trace.requests)
    )


def joined(traces: Sequence[Trace]) -> Trace:
    """One after another: each begins when the last request of the one before has ended (others of it may still run)."""
    sent: list[Sent] = []
    for trace in traces:
        start = len(sent)
        for one in trace.requests:
            if one.after is not None:
                sent.append(replace(one, after=one.after + start))
            else:
                sent.append(replace(one, after=start - 1) if start else one)
    return Trace(tuple(sent))


def calm(trace: Trace) -> Trace:
    """One request after another, each a moment after the end of the one before: a server has then put it away."""
    return Trace(
        tuple(
            replace(one, after=index - 1, after_tokens=None, pause=MOMENT) if index else one
            for index, one in enumerate(trace.requests)
        )
    )
