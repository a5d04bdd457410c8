"""One request of a trace: when it comes, how long it is, what it shares with others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from lfm2np.errors import RequestError
from lfm2np.values import show

NANOSECONDS = 1_000_000_000  # of a second: all times are whole nanoseconds, so that sums of them are exact
MOST_TOKENS = 1_000_000_000  # of a prompt or an output: more is a mistake
Runs = tuple[tuple[int, int], ...]  # of equal token ids: (token id, how many)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Token ids stand for content: two requests share a prefix as far as their ids are equal.

    at                 nanoseconds since the trace began
    prompt             runs of equal token ids: (token id, how many)
    num_output_tokens  that it will get
    output_token_id    of all of them
    max_tokens         that it asks for, at least num_output_tokens; None: num_output_tokens
    priority           see scheduler.Request
    abort_after        nanoseconds after its arrival at which its user leaves; None: never
    """

    at: int
    prompt: Runs
    num_output_tokens: int
    output_token_id: int
    max_tokens: int | None = None
    priority: int = 0
    abort_after: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt)


# Three kinds of content, which never collide: what may be shared (a block's hash, a system prompt), a request's prompt
# of its own, its outputs.


def shared_token_id(content: int) -> int:
    return 3 * content


def prompt_token_id(request: int) -> int:
    return 3 * request + 1


def output_token_id(request: int) -> int:
    return 3 * request + 2


def merge_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same tokens, in as few runs as there can be."""
    merged: list[tuple[int, int]] = []
    for token_id, count in runs:
        if merged and merged[-1][0] == token_id:
            merged[-1] = (token_id, merged[-1][1] + count)
        else:
            merged.append((token_id, count))
    return tuple(merged)


def moved(each: Arrival, at: int) -> Arrival:
    """The same at another time; dataclasses.replace would take as long as all else."""
    return Arrival(
        at,
        each.prompt,
        each.num_output_tokens,
        each.output_token_id,
        each.max_tokens,
        each.priority,
        each.abort_after,
    )


def faster(arrivals: Iterable[Arrival], speed: float) -> Iterator[Arrival]:
    """The same requests, `speed` times as fast one after another. Users are as patient as before."""
    if not 0 < speed < float("inf"):
        raise RequestError(f"speed {show(speed)}: expected a number above 0")
    numerator, denominator = Fraction(speed).as_integer_ratio()
    return (moved(each, each.at * denominator // numerator) for each in arrivals)


def first(arrivals: Iterable[Arrival], requests: int) -> Iterator[Arrival]:
    return itertools.islice(arrivals, requests)


def within(arrivals: Iterable[Arrival], start: int, stop: int) -> Iterator[Arrival]:
    """Those that arrive in [start, stop), in nanoseconds, with `start` as the beginning of the trace."""
    begun = itertools.dropwhile(lambda each: each.at < start, arrivals)
    return (moved(each, each.at - start) for each in itertools.takewhile(lambda each: each.at < stop, begun))
