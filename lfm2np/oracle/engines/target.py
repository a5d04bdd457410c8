"""What a target is: it sends several requests to an engine at once, and says what the engine reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from lfm2np.errors import Lfm2npError
from lfm2np.oracle.engines.records import NO_ABORT, Answer, Ask, failed

AT_ONCE = 16  # requests in flight together, unless the engine takes fewer
MOST_AT_ONCE = 64  # of an engine that reports how many it computes together
LEAST_AT_ONCE = 8  # likewise: where it has fewer slots, some requests wait
Arrived = Callable[[Answer], None]


class TargetError(Lfm2npError):
    """The engine can't be run or reached at all. A single request that fails is an Answer with `error`."""

    exit_code = 3


def ignored(answer: Answer) -> None:
    """Nobody waits for it."""


def in_flight(at_once: int | None, slots: int | None) -> int:
    """The most requests in flight together: as given, else by the engine's slots."""
    return at_once or (AT_ONCE if slots is None else max(LEAST_AT_ONCE, min(slots, MOST_AT_ONCE)))


@dataclass(frozen=True)
class Abilities:
    """What an engine accepts and reports, found out before the check begins."""

    engine: str  # its name and version, as it says itself
    takes_token_ids: bool = True  # otherwise only asks with a prompt_text can be sent
    tells_token_ids: bool = True
    tells_logprobs: bool = False
    num_top_logprobs: int = 0
    tells_prompt_logprobs: bool = False
    at_once: int = 1  # most asks in flight together; 1: it has no neighbours
    can_abort: bool = False
    takes_stops: bool = False
    takes_seeds: bool = False  # and temperatures
    takes_samples: bool = False  # n > 1
    takes_streams: bool = False  # and its events hold all tokens, and log-probabilities where other answers do
    slots: int | None = None  # requests that it computes together, others wait; None: not reported
    refused: tuple[str, ...] = ()  # probes for more than that, and why each failed


def in_turns(
    abilities: Abilities,
    asks: Sequence[Ask],
    aborted: Collection[str],
    together: Callable[[Sequence[Ask]], list[Answer]],
    arrived: Arrived,
) -> list[Answer]:
    """`together(asks)` of at most at_once; an ask that is to be aborted is not sent where that is impossible."""
    possible = [ask for ask in asks if abilities.can_abort or ask.id not in aborted]
    of_possible: list[Answer] = []
    for start in range(0, len(possible), abilities.at_once):
        newest = together(possible[start : start + abilities.at_once])
        for answer in newest:
            arrived(answer)
        of_possible += newest
    answers = iter(of_possible)
    return [next(answers) if abilities.can_abort or ask.id not in aborted else failed(ask, NO_ABORT) for ask in asks]


def requests_of(asks: Sequence[Ask]) -> list[list[Ask]]:
    """The asks of one request together: those for its samples follow each other."""
    requests: list[list[Ask]] = []
    for ask in asks:
        last = requests[-1][-1] if requests else ask
        is_same = (last.prompt_token_ids, last.seed, last.samples) == (ask.prompt_token_ids, ask.seed, ask.samples)
        if is_same and ask.sample > last.sample:
            requests[-1].append(ask)
        else:
            requests.append([ask])
    return requests


class Target(Protocol):
    """One engine behind an adapter."""

    def probe(self) -> Abilities:
        """TargetError if there is no such engine, or it can't be reached."""

    def answer(self, asks: Sequence[Ask], aborted: Collection[str] = (), arrived: Arrived = ignored) -> list[Answer]:
        """Sends all asks at once, and cancels those named in `aborted` midway. An Answer for each ask, in order.

        arrived  gets each answer as soon as it is there, in this thread; some perhaps twice, errors perhaps never

        Whatever the engine answers, it raises nothing: errors are Answers with `error`. TargetError if it is gone.
        """

    def close(self) -> None:
        """Releases what the target started. Any number of times."""
