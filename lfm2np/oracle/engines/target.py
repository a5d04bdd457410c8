"""What a target is: an engine of any kind that plays traces, and says what it accepts and reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lfm2np.errors import Lfm2npError
from lfm2np.oracle.engines.records import NO_ABORT, Answer, Pair, Request, Trace, failed, samples_of

AT_ONCE = 16  # requests in flight together, unless the engine takes fewer
MOST_AT_ONCE = 64  # of an engine that reports how many it computes together
LEAK = "leak"  # the kind of trouble: something is held though all requests have ended
LEAST_AT_ONCE = 8  # likewise: where it has fewer slots, some requests wait
Answers = tuple[Answer, ...]  # to one request: one a sample, or a single one with `error`
Together = Callable[[Sequence[Request]], Sequence[Answers]]  # computes requests in one batch


class TargetError(Lfm2npError):
    """The engine can't be run or reached at all. A single request that fails is an Answer with `error`."""

    exit_code = 3


@dataclass(frozen=True)
class Abilities:
    """What an engine accepts and reports, found out before the first trace."""

    engine: str  # its name and version, as it says itself
    takes_token_ids: bool = True  # otherwise only requests with a prompt_text can be sent
    tells_token_ids: bool = True
    tells_logprobs: bool = False
    num_top_logprobs: int = 0
    tells_prompt_logprobs: bool = False
    tells_texts: bool = True  # False: it reports an empty text of tokens that have one
    at_once: int = 1  # most requests in flight together; 1: it has no neighbours
    can_abort: bool = False
    takes_stops: bool = False
    takes_sampling: bool = False  # temperatures; and log-probabilities of sampled tokens are of the raw logits
    takes_seeds: bool = False  # and keeps to them without a setting of the server
    takes_samples: bool = False  # n > 1
    processors: tuple[str, ...] = ()  # those of records.PROCESSORS that it takes
    takes_streams: bool = False  # and its events hold all tokens, and log-probabilities where other answers do
    takes_cold: bool = False  # a request can do without the cached prefixes of others
    is_streaming: bool = False  # its tokens come one by one, so that others can be sent at one of them
    slots: int | None = None  # requests that it computes together, others wait; None: not reported, as for the next
    block: int | None = None  # tokens of a cache block
    chunk: int | None = None  # most tokens of a step
    longest: int | None = None  # tokens of prompt and answer
    refused: tuple[str, ...] = ()  # probes for more than that, and why each failed


@dataclass(frozen=True)
class Trouble:
    """What is wrong with the engine itself: `kind` is one of the records' or LEAK; `what` one line."""

    kind: str
    what: str


@dataclass(frozen=True)
class Played:
    """The answers to a trace, in the order of its requests.

    trouble  of the engine, not of one request
    clock    the unit of times
    """

    answers: tuple[Answers, ...]
    trouble: Trouble | None = None
    clock: str = "seconds"

    def pairs(self, trace: Trace) -> list[Pair]:
        """Each sample of each request with its answer; a request that failed has the same answer for each."""
        pairs: list[Pair] = []
        for request, answers in zip(trace.requests, self.answers, strict=True):
            samples = samples_of(request)
            each = answers * len(samples) if len(answers) == 1 else answers
            pairs += zip(samples, each, strict=False)  # of an aborted request some samples may not have begun
        return pairs


class Target(Protocol):
    """One engine behind an adapter."""

    def probe(self) -> Abilities:
        """TargetError if there is no such engine, or it can't be reached."""

    def play(self, trace: Trace) -> Played:
        """Sends all requests as the trace says, at most `at_once` together.

        Whatever the engine answers, it raises nothing: errors are Answers with `error`, of kind DEAD where it is gone.
        TargetError if it was gone before.
        """

    def close(self) -> None:
        """Releases what the target started. Any number of times."""


def in_flight(at_once: int | None, slots: int | None) -> int:
    """The most requests in flight together: as given, else by the engine's slots."""
    return at_once or (AT_ONCE if slots is None else max(LEAST_AT_ONCE, min(slots, MOST_AT_ONCE)))


def play_in_rounds(trace: Trace, abilities: Abilities, together: Together) -> Played:
    """For engines that can't be watched while they compute: `together(requests)` of at most at_once.

    A request that waits for the end of another is in a later round, all others together. One that is to be aborted is
    not sent where that is impossible.
    """
    done: dict[int, Answers] = {}
    for number, indices in enumerate(rounds_of(trace)):
        possible = [i for i in indices if abilities.can_abort or trace.requests[i].abort_after is None]
        for index in set(indices) - set(possible):
            done[index] = (replace(failed(NO_ABORT), is_aborted=True),)
        for start in range(0, len(possible), abilities.at_once):
            some = possible[start : start + abilities.at_once]
            for index, answers in zip(some, together([trace.requests[i] for i in some]), strict=True):
                is_aborted = trace.requests[index].abort_after is not None
                done[index] = tuple(
                    replace(answer, is_aborted=is_aborted, sent=float(number), ended=float(number + 1))
                    for answer in answers
                )
    return Played(tuple(done[index] for index in range(len(trace.requests))), clock="rounds")


def rounds_of(trace: Trace) -> list[list[int]]:
    """Indices by round: a request that waits for tokens of another is in its round; for its end, in a later one."""
    rounds: list[int] = []
    for request in trace.requests:
        before = -1 if request.after is None else rounds[request.after]
        rounds.append(before + (request.after is None or request.after_tokens is None))
    return [[index for index, number in enumerate(rounds) if number == each] for each in range(max(rounds) + 1)]
