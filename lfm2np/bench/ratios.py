"""What the times are compared with: how much faster a side is than another, and how fast it ought to be.

A ratio is taken within each round, whose sides ran one right after another, so that a slow minute of the machine
touches both; then come the median and the extremes over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lfm2np.bench.sides.cells import DECODE, PREFILL, Cell

BATCHED = 16  # requests: from here on, and in prefill, little but the products may cost


@dataclass(frozen=True)
class Ratio:
    """Time of `other` divided by the time of `side`; `targets` by kind of cell."""

    side: str
    other: str
    targets: Mapping[str, float]

    def target(self, cell: Cell) -> float | None:
        """The least that it should be; None without a target."""
        if self.other.startswith("floor") and cell.kind == DECODE and cell.requests < BATCHED:
            return None
        return self.targets[cell.kind]


RATIOS = (
    Ratio("exact", "transformers-float64", {DECODE: 1.3, PREFILL: 0.9}),
    Ratio("exact", "transformers-float32", {DECODE: 0.9, PREFILL: 0.6}),
    Ratio("exact", "floor-float64", {DECODE: 0.8, PREFILL: 0.8}),
    Ratio("float32", "transformers-float32", {DECODE: 1.5, PREFILL: 1.2}),
    Ratio("float32", "floor-float32", {DECODE: 0.85, PREFILL: 0.85}),
)


@dataclass(frozen=True)
class Spread:
    """The median and the extremes over the rounds."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def ratio_of(ratio: Ratio, seconds: Mapping[str, Sequence[float]]) -> Spread | None:
    """The ratio of one cell, from the seconds of each round by side; None where a side is missing."""
    if ratio.side not in seconds or ratio.other not in seconds:
        return None
    return spread([other / side for side, other in zip(seconds[ratio.side], seconds[ratio.other], strict=True)])
