"""The result of playing a trace: plain data, the same from any player."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lfm2np.oracle.engines.records import Answer
from lfm2np.oracle.engines.target import Abilities
from lfm2np.suite.fuzz.trace import Trace

# What can go wrong with a request besides its tokens, the worst first.
DEAD, HANG, FAILED, BROKEN, REFUSED, IMPOSSIBLE, LEAK = "dead", "hang", "5xx", "broken", "refused", "impossible", "leak"


@dataclass(frozen=True)
class Trouble:
    """`kind` is one of those above; `what` one line."""

    kind: str
    what: str


@dataclass(frozen=True)
class Reply:
    """The result of one request. Times count from the trace's first; None: it did not happen."""

    answers: tuple[Answer, ...] = ()  # one for each sample; with `error` where it can't be judged
    trouble: Trouble | None = None
    sent: float | None = None
    first: float | None = None  # when its first token came, if it was streamed
    ended: float | None = None
    left: bool = False  # aborted, as the trace says
    cached: int | None = None  # prompt tokens from the cache, as the server reports


@dataclass(frozen=True)
class Played:
    """`counted` are the server's own counters, which steer the drawing towards traces that raise them.

    clock  the unit of times
    """

    replies: tuple[Reply, ...]
    trouble: Trouble | None = None  # of the server, not of one request
    counted: Mapping[str, float] = field(default_factory=dict)
    clock: str = "seconds"


@dataclass(frozen=True)
class Takes:
    """What an engine supports besides greedy requests."""

    abilities: Abilities
    samples: bool = False
    sampling: bool = False
    stops: bool = False
    longest: int | None = None  # tokens of prompt and answer; None: as many as the model has
    slots: int | None = None  # requests that run at once; None: not reported, as for the next two
    block: int | None = None  # tokens of a cache block
    chunk: int | None = None  # most tokens of a step
    streams: bool = False
    cold: bool = True  # a request can do without the cached prefixes of others
    texts: bool = True  # False: it reports an empty text of tokens that have one


class Player(Protocol):
    """Plays traces on one engine."""

    def probe(self) -> Takes:
        """TargetError if there is no such engine, or it can't be reached."""

    def play(self, trace: Trace) -> Played:
        """Never raises for what the engine does. TargetError if it is gone for good."""

    def close(self) -> None:
        """Releases what the player started. Any number of times."""
