"""Which drafts are accepted: drawn from a measured acceptance, for each request the same whatever the schedule is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lfm2np.errors import RequestError
from lfm2np.values import show

MASK = 2**64 - 1


@dataclass(frozen=True)
class Acceptance:
    """`shares[i]`: of drafts i (counted from 0) whose predecessors were accepted, how many are; the last one holds for
    all that follow. RequestError unless each lies from 0 to 1."""

    shares: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        for share in self.shares:
            if not 0.0 <= share <= 1.0:
                raise RequestError(f"acceptance {share!r}: expected a share from 0 to 1")
        if not self.shares:
            raise RequestError("acceptance: no shares, expected at least one")

    def draw(self, number: int, position: int, drafts: int) -> int:
        """How many of the drafts for the output tokens from `position` on (of request `number`) are accepted.

        Whether the draft at a position is right depends on it and on how many drafts came before it, nothing else.
        """
        for index in range(drafts):
            share = self.shares[min(index, len(self.shares) - 1)]
            if uniform(self.seed, number, position + index) >= share:
                return index
        return drafts


def uniform(*words: int) -> float:
    """From 0 to 1, the same on every machine: splitmix64 over the words (Steele, Lea, Flood, OOPSLA 2014)."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return (state >> 11) / 2**53


def read_acceptance(text: str, seed: int = 0) -> Acceptance:
    """ "0.7", or one share for each draft: "0.8,0.7,0.5". RequestError for anything else."""
    try:
        return Acceptance(tuple(float(part) for part in text.split(",")), seed)
    except ValueError:
        raise RequestError(f"acceptance {show(text)}: expected a share from 0 to 1, or several with commas") from None


def acceptance_of(proposed: Sequence[int], accepted: Sequence[int], seed: int = 0) -> Acceptance:
    """From how many first, second, ... drafts were proposed and accepted, as `lfm2np generate --json` reports them."""
    rates = [part / whole for part, whole in zip(accepted, proposed, strict=True) if whole]
    before = [1.0, *rates]
    return Acceptance(
        tuple(min(1.0, rate / last) if last else 0.0 for rate, last in zip(rates, before, strict=False)), seed
    )
