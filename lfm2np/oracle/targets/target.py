"""What an adapter offers: ask an engine several things at once, and say what the engine can reveal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from lfm2np.errors import Lfm2npError
from lfm2np.oracle.targets.records import Answer, Ask

AT_ONCE = 16  # requests in flight together, unless the engine takes fewer
MOST_AT_ONCE = 64  # of an engine that reports how many it computes together
LEAST_AT_ONCE = 8  # likewise: where it has fewer slots, some requests wait


class TargetError(Lfm2npError):
    """The engine can't be run or reached at all; one request that goes wrong is an Answer with `error`."""

    exit_code = 3


def in_flight(at_once: int | None, slots: int | None) -> int:
    """The most requests in flight together: as many as are wanted, else as the engine's slots."""
    return at_once or (AT_ONCE if slots is None else max(LEAST_AT_ONCE, min(slots, MOST_AT_ONCE)))


@dataclass(frozen=True)
class Abilities:
    """What an engine can be asked and can tell, found out before the check begins."""

    engine: str  # its name and version, as it says itself
    takes_token_ids: bool = True  # otherwise only asks with a prompt_text can be put
    tells_token_ids: bool = True
    tells_logprobs: bool = False
    num_top_logprobs: int = 0
    tells_prompt_logprobs: bool = False
    at_once: int = 1  # most asks in flight together; 1: it has no neighbours
    can_abort: bool = False
    takes_stops: bool = False
    takes_seeds: bool = False
    slots: int | None = None  # requests that it computes together, if it reports that: others wait
    refused: tuple[str, ...] = ()  # probes that would have shown more, and why each failed


class Target(Protocol):
    """One engine behind an adapter."""

    def probe(self) -> Abilities:
        """TargetError if the engine can't be reached, or is none."""

    def answer(self, asks: Sequence[Ask], aborted: Collection[str] = ()) -> list[Answer]:
        """Puts all asks at once, and cancels those named in `aborted` midway; one Answer an ask, in their order.

        Never raises for what the engine says: that is an Answer with `error`. TargetError if it is gone.
        """

    def close(self) -> None:
        """Ends what the adapter began. Any number of times."""
