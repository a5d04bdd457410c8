"""What came of a trace: plain data that any player makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lfm2np.fuzz.trace import Trace
from lfm2np.oracle.targets.records import Answer
from lfm2np.oracle.targets.target import Abilities

# What can go wrong with a request beside its tokens, the worst first.
DEAD, HANG, FAILED, BROKEN, REFUSED, IMPOSSIBLE, LEAK = "dead", "hang", "5xx", "broken", "refused", "impossible", "leak"


@dataclass(frozen=True)
class Trouble:
    """`kind` is one of those above; `what` one line."""

    kind: str
    what: str


@dataclass(frozen=True)
class Reply:
    """What came of one request. Seconds count from the trace's first; None: it never came to that."""

    answers: tuple[Answer, ...] = ()  # one a sample; with `error` where it can't be judged
    trouble: Trouble | None = None
    sent: float | None = None
    first: float | None = None  # when its first token came, if it was streamed
    ended: float | None = None
    left: bool = False  # aborted, as the trace wants it
    cached: int | None = None  # prompt tokens that the server did not compute again, as it says


@dataclass(frozen=True)
class Played:
    """`counted` are numbers that the server tells of itself, by which traces that reach something new are known."""

    replies: tuple[Reply, ...]
    trouble: Trouble | None = None  # of the server, not of one request
    counted: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Takes:
    """What an engine can be asked, beside greedy answers to prompts."""

    abilities: Abilities
    samples: bool = False
    sampling: bool = False
    stops: bool = False
    longest: int | None = None  # tokens of prompt and answer; None: as many as the model has
    slots: int | None = None  # requests that run at once; None: not told


class Player(Protocol):
    """A way to carry out traces on one engine."""

    def probe(self) -> Takes:
        """TargetError if the engine can't be reached, or is none."""

    def play(self, trace: Trace) -> Played:
        """Never raises for what the engine does. TargetError if it is gone for good."""

    def close(self) -> None:
        """Ends what the player began. Any number of times."""
