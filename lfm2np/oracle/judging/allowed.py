"""How far off a right engine may be at a position: the one bound by which every verdict is given.

With u a unit (what rounding the logits themselves may do) and s the scale of an error, the standard deviation that
rounding gives it, a difference x is explained if |x| <= u + LIMIT * s. The scale comes from the truth and emulated
rounding (noise.py), or is measured on an engine alone (suite/itself).

With errors d[v] of the logits, independent and of one size tau, the error of token y's log-probability is
d[y] - sum p[v] d[v], of variance tau^2 ((1 - p[y])^2 + sum over v != y of p[v]^2): almost nothing for a token that is
nearly certain. See `shape`.

All log-probabilities of a position may also share an error: added one after another in float32, exponentials below
2**-25 of their sum are lost, at most as many as the vocabulary has tokens. llama.cpp and mlx-lm are off by as much.
Of all shifts up to that size the one is forgiven that leaves the smallest errors; with several reported, one shift
can't hide the others. A scale that was measured on the engine itself has no shift: both answers have the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.judging.verdict import LIMIT, tie_chance

Float64 = NDArray[np.float64]
FLOAT32_UNITS = 4  # mlx-lm, right in all else, is off by up to 3 where a token is all but certain
FARTHEST = 80.0  # of a rival, in units of the noise: tie_chance is 0 beyond


@dataclass(frozen=True, eq=False)
class Allowed:
    """One position; nats, ratios in units of the scale. J tokens are known, of them perhaps not all of the vocabulary.

    tokens     [J] ascending ids, with logprobs [J] and their scales [J]
    leads      [J] ratios by which the best token leads each, beyond a unit; 0 of that itself
    runner_up  its lead over the second best; infinite without one
    """

    best: int
    tokens: NDArray[np.int64]
    logprobs: Float64
    scales: Float64
    leads: Float64
    runner_up: float
    unit: float
    shift: float = 0.0

    def at(self, token_id: int) -> int:
        """The column of a token. KeyError if it is not known."""
        column = int(self.tokens.searchsorted(token_id))
        if column == len(self.tokens) or self.tokens[column] != token_id:
            raise KeyError(token_id)
        return column

    def bound(self, column: int) -> float:
        """The most by which this token's log-probability may be off."""
        return self.unit + self.shift + LIMIT * float(self.scales[column])

    @property
    def flip_chance(self) -> float:
        """The probability that any rival overtakes the best token: at most the sum of their chances.

        The runner-up's alone would be at most a half; an undecided model has hundreds of rivals within the noise of
        bfloat16.
        """
        best = self.at(self.best)
        rivals = np.flatnonzero(self.leads < FARTHEST)
        return min(1.0, math.fsum(tie_chance(float(self.leads[rival])) for rival in rivals if rival != best))

    def errors(self, reported: Sequence[tuple[int, float]]) -> Errors:
        """Of the log-probabilities that are reported, by token."""
        columns = [self.at(token_id) for token_id, _ in reported]
        raw = [value - float(self.logprobs[at]) for at, (_, value) in zip(columns, reported, strict=True)]
        return errors_within(raw, [float(self.scales[column]) for column in columns], self.unit, self.shift)


@dataclass(frozen=True)
class Errors:
    """ratio  the largest, with its sign, beyond a unit; None: nothing was reported
    size      the largest in units of scale and unit together, for averages
    """

    ratio: float | None
    size: float | None


def errors_within(raw: Sequence[float], scales: Sequence[float], unit: float, shift: float) -> Errors:
    """Errors at one position, judged with the shift that leaves the smallest. For averages an error counts whole up to
    1, beyond that what the shift leaves: what is forgiven at each position is forgiven at all of them together, and
    right engines' errors keep the size of their format.
    """
    if not raw:
        return Errors(None, None)

    def ratios(moved: float) -> list[float]:
        return [beyond(error - moved, unit) / scale for error, scale in zip(raw, scales, strict=True)]

    moved = min(
        (0.0, *(min(shift, max(-shift, error)) for error in raw)), key=lambda moved: max(map(abs, ratios(moved)))
    )
    sizes = []
    for error, scale in zip(raw, scales, strict=True):
        whole = math.hypot(scale, unit / 2.0)
        sizes.append(min(abs(error), max(whole, abs(error - moved))) / whole)
    return Errors(max(ratios(moved), key=abs), max(sizes))


def beyond(error: float, unit: float) -> float:
    """The part of an error, with its sign, that exceeds one unit of the logits."""
    return math.copysign(max(0.0, abs(error) - unit), error)


def shape(p: Any, others: Any) -> Any:
    """The variance of a log-probability's error where each logit's is 1; see the module.

    p       probability of the token
    others  sum of the squares of all other tokens' probabilities
    """
    return (1.0 - p) ** 2 + others


def most_shift(vocab_size: int) -> float:
    return math.ldexp(vocab_size, -25)


def resolution(largest: Float64, bits: int) -> Float64:
    """What rounding the logits themselves may do, by the largest of each row: one unit in its last place in the format,
    and a few of float32, in which log-probabilities are computed as a logit minus a sum of exponentials.
    """
    exponent = np.frexp(largest)[1]
    return np.asarray(np.ldexp(1.0, exponent - bits) + FLOAT32_UNITS * np.ldexp(1.0, exponent - 24))
