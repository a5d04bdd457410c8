"""A trace: requests, and when each is sent relative to the others. Plain data.

    {"requests": [{"prompt": [5, 6, 7], "max_tokens": 8},
                  {"prompt": [5, 6, 9], "max_tokens": 4, "after": 0, "after_tokens": 3, "abort_after": 2}]}

The second is sent after three tokens of the first, and aborted after two of its own.
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
    abort_after   close the connection when so many tokens have come (0: before the first); None: stay to the end
    cold          no cached prefix may be used, where the server supports that
    temperature   0: greedy, so each token is judged; else only log-probabilities are
    seed          of a sampled request
    samples       answers to one prompt
    stop          stop string
    stop_in       choose `stop` for each prompt anew: it ends within this token of the right answer
    streamed      stream the answer; requests that are aborted, or waited for, are streamed anyway
    scored        with the log-probabilities of the prompt, where the server reports them
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
    scored: bool = False

    @property
    def num_tokens(self) -> int:
        """Of prompt and answers, at most."""
        return len(self.prompt) + self.max_tokens * self.samples


@dataclass(frozen=True)
class Trace:
    """Requests, each of which waits for earlier ones only. RequestError otherwise."""

    requests: tuple[Sent, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.requests) <= MOST_REQUESTS:
            raise RequestError(f"requests: {len(self.requests)}, expected 1 to {MOST_REQUESTS}")
        for index, sent in enumerate(self.requests):
            require_sent(sent, index)

    @property
    def num_tokens(self) -> int:
        """Of all prompts and answers, at most."""
        return sum(sent.num_tokens for sent in self.requests)

    def is_streamed(self, index: int) -> bool:
        sent = self.requests[index]
        is_awaited = any(other.after == index and other.after_tokens is not None for other in self.requests)
        return sent.streamed or sent.abort_after is not None or is_awaited


def is_due(sent: Sent, num_tokens: Sequence[int], has_ended: Sequence[bool]) -> bool:
    """Whether a request is to be sent, by how many tokens of each request have come, and whether it has ended."""
    if sent.after is None or has_ended[sent.after]:
        return True
    return sent.after_tokens is not None and num_tokens[sent.after] >= sent.after_tokens


def require_sent(sent: Sent, index: int) -> None:
    where = f"requests[{index}]"
    if not sent.prompt or not all(type(token) is int and token >= 0 for token in sent.prompt):
        raise RequestError(f"{where}.prompt: expected token ids, at least one")
    checks: tuple[tuple[str, Any, int, int | None], ...] = (
        ("max_tokens", sent.max_tokens, 1, None),
        ("pause", sent.pause, 0, MOST_PAUSE),
        ("samples", sent.samples, 1, 64),
        ("seed", sent.seed, 0, None),
        ("after", sent.after, 0, index - 1),
        ("after_tokens", sent.after_tokens, 1, None),
        ("abort_after", sent.abort_after, 0, None),
        ("stop_in", sent.stop_in, 0, None),
    )
    for name, value, least, most in checks:
        is_whole = type(value) is int and value >= least and (most is None or value <= most)
        if not is_whole and (value is not None or name in ("max_tokens", "pause", "samples", "seed")):
            if most is not None and most < least:
                raise RequestError(f"{where}.{name} {value!r}: expected none, as no request is before it")
            limit = f"at least {least}" if most is None else f"{least} to {most}"
            raise RequestError(f"{where}.{name} {value!r}: expected a whole number, {limit}")
    if sent.after is None and sent.after_tokens is not None:
        raise RequestError(f"{where}.after_tokens {sent.after_tokens}: expected `after`, whose tokens they are")
    if type(sent.temperature) not in (int, float) or not 0 <= sent.temperature <= 100:
        raise RequestError(f"{where}.temperature {sent.temperature!r}: expected 0 to 100")
    if sent.samples > 1 and sent.temperature == 0:
        raise RequestError(f"{where}.samples {sent.samples}: expected 1 at temperature 0")
    if sent.stop is not None and (not isinstance(sent.stop, str) or not sent.stop):
        raise RequestError(f"{where}.stop {sent.stop!r}: expected a text")
    if not all(type(value) is bool for value in (sent.cold, sent.streamed, sent.scored)):
        raise RequestError(f"{where}: expected true or false for cold, streamed and scored")


def as_json(trace: Trace) -> dict[str, Any]:
    """Fields with their default value are left out."""
    defaults = dataclasses.asdict(Sent((0,)))
    rows = [dataclasses.asdict(sent) for sent in trace.requests]
    return {
        "requests": [
            {name: value for name, value in row.items() if name in ("prompt", "max_tokens") or value != defaults[name]}
            for row in rows
        ]
    }


def from_json(raw: Any) -> Trace:
    """RequestError that names the field for anything that `as_json` would not write."""
    if not isinstance(raw, dict) or set(raw) != {"requests"} or not isinstance(raw["requests"], list):
        raise RequestError("a trace: expected an object with a list `requests`")
    known = {field.name for field in dataclasses.fields(Sent)}
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
    """The same trace with other tokens: the alphabet is permuted, so that shared prefixes stay shared.

    A server has the prefixes of a trace cached, so the same trace again would be another test.
    """
    others = list(alphabet)
    random.Random(seed).shuffle(others)
    place: Mapping[int, int] = dict(zip(alphabet, others, strict=True))
    return Trace(
        tuple(replace(sent, prompt=tuple(place.get(token, token) for token in sent.prompt)) for sent in trace.requests)
    )


def joined(traces: Sequence[Trace]) -> Trace:
    """One after another: each begins when the last request of the one before has ended (others of it may still run)."""
    requests: list[Sent] = []
    for trace in traces:
        start = len(requests)
        for sent in trace.requests:
            if sent.after is not None:
                sent = replace(sent, after=sent.after + start)
            elif start:
                sent = replace(sent, after=start - 1)
            requests.append(sent)
    return Trace(tuple(requests))


def calm(trace: Trace) -> Trace:
    """Requests one at a time, each a moment after the end of the one before, when the server has released it."""
    return Trace(
        tuple(
            replace(sent, after=index - 1, after_tokens=None, pause=MOMENT) if index else sent
            for index, sent in enumerate(trace.requests)
        )
    )
