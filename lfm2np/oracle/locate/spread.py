"""Numbers that are not quite known: what they should be, and how far an engine's may be off.

A `Measured` is an array with the `spread` of each of its numbers. One rounding moves a number y by at most unit * |y|,
which is taken as one spread. Three rules take spreads through an operation:
    a function of single numbers is evaluated again with one input after another moved by its spread (`moved`);
    a sum has the root of the sum of its terms' squared spreads, as their errors are independent (`product`, `dot`); but
    across the positions of attention absolute values add up, as a repeated token repeats its error;
    each rounding that some engine makes is added (`rounded`). Sums are kept in float32, as engines do also for half
    formats: n terms in an unknown order move by sqrt(n) * 2**-24 * sum|terms| (Higham and Mary, "A new approach to
    probabilistic rounding error analysis", 2019).
Sums are not perturbed at random instead: eight random evaluations cost four times as much as the sum of squares, which
is exact, and miss two thirds of the spread for one number in 1,000.

LIMIT spreads are the bound. Three lines of reasoning:
    a rounding error is uniform within one spread at the most, so its standard deviation is spread / sqrt(3) or less;
    a sum of many is nearly normal, and LIMIT = 4 spreads are then 6.9 standard deviations: one number in 10**11;
    every rounding that some engine makes is counted, so that an engine that makes fewer stays the further inside.

Values are float64, whose own error is 2**-29 of float32's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.ieee import round_to_bfloat16, unchanged
from lfm2np.arithmetic.matrix import Weights
from lfm2np.arithmetic.pieces import pieces
from lfm2np.errors import RequestError
from lfm2np.oracle.judging.formats import round_to_float16

Array = NDArray[Any]
LIMIT = 4.0
SUM_UNIT = 2.0**-24  # sums are kept in float32
EXP_UNITS = 2.0  # of float32, times 1 + |x|: relative error of a fast exp(x)
PIECE = 2**22  # elements of a temporary


@dataclass(frozen=True)
class Precision:
    """What an engine keeps activations and weights in."""

    name: str
    unit: float  # a rounding moves x by at most unit * |x|,
    least: float  # or by this much, where numbers become subnormal or zero
    keep: Callable[[Array], Array]
    rounds_inputs: bool = False  # before a product with quantised weights: see rounded_inputs.py


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", 2.0**-24, 2.0**-126, unchanged),
        Precision("float16", 2.0**-11, 2.0**-24, round_to_float16),
        Precision("bfloat16", 2.0**-8, 2.0**-126, round_to_bfloat16),
        Precision("q8", 2.0**-24, 2.0**-126, unchanged, rounds_inputs=True),
    )
}


def precision_named(name: str) -> Precision:
    if name not in PRECISIONS:
        raise RequestError(f"format {name!r}: expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


@dataclass(frozen=True, eq=False)
class Measured:
    """values and spread, both float64 of one shape."""

    values: Array
    spread: Array

    def __len__(self) -> int:
        return len(self.values)

    def reshape(self, *shape: int) -> Measured:
        return Measured(self.values.reshape(shape), self.spread.reshape(shape))

    def __getitem__(self, index: Any) -> Measured:
        return Measured(self.values[index], self.spread[index])

    def bound(self) -> Array:
        return LIMIT * self.spread

    def behind_zeros(self, rows: int) -> Measured:
        """So many rows of zeros, which are known, before the first."""
        return joined([known(np.zeros((rows, *self.values.shape[1:]))), self])


def known(values: Array) -> Measured:
    """Numbers without an error."""
    return Measured(values, np.zeros_like(values))


def joined(parts: Sequence[Measured], axis: int = 0) -> Measured:
    values, spread = ([getattr(part, name) for part in parts] for name in ("values", "spread"))
    return Measured(np.concatenate(values, axis), np.concatenate(spread, axis))


def together(*spreads: Array | float) -> Array:
    """Independent errors: the root of the sum of their squares."""
    squares: Any = 0.0
    for spread in spreads:
        squares = squares + np.square(spread)
    return np.asarray(np.sqrt(squares))


def rounded(values: Array, precision: Precision, *spreads: Array | float) -> Measured:
    """Values with these spreads, rounded to the format once more."""
    return Measured(values, together(precision.unit * values, precision.least, *spreads))


def moved(function: Callable[..., Array], *inputs: Measured) -> Measured:
    """A function of single numbers (arrays are broadcast), and how far it moves as each input does, up or down."""
    centre = [x.values for x in inputs]
    values = function(*centre)
    squares = np.zeros_like(values)
    for place, x in enumerate(inputs):
        ends = (function(*centre[:place], x.values + sign * x.spread, *centre[place + 1 :]) for sign in (-1.0, 1.0))
        squares += np.square(np.maximum(*(np.abs(end - values) for end in ends)))
    return Measured(values, np.sqrt(squares))


def add(x: Measured, y: Measured, precision: Precision) -> Measured:
    return rounded(x.values + y.values, precision, x.spread, y.spread)


def multiply(x: Measured, y: Measured, precision: Precision) -> Measured:
    output = moved(np.multiply, x, y)
    return rounded(output.values, precision, output.spread)


def dot(x: Measured, y: Measured) -> Measured:
    """The sum of x * y over the last axis."""
    terms = x.values * y.values
    squares = (np.square(x.spread * y.values) + np.square(x.values * y.spread)).sum(-1)
    order = math.sqrt(terms.shape[-1]) * SUM_UNIT * np.abs(terms).sum(-1)
    return Measured(terms.sum(-1), together(np.sqrt(squares), order))


def product(x: Measured, y: Measured) -> Measured:
    """`dot` of each row of x [T, D] with each of y [O, D]: [T, O]."""
    squares = np.square(x.spread) @ np.square(y.values).T
    if y.spread.any():
        squares += np.square(x.values) @ np.square(y.spread).T
    order = math.sqrt(x.values.shape[1]) * SUM_UNIT * (np.abs(x.values) @ np.abs(y.values).T)
    return Measured(x.values @ y.values.T, together(np.sqrt(squares), order))


def linear(x: Measured, weight: Weights, bias: Weights | None, precision: Precision) -> Measured:
    """x [T, D], weight [O, D] -> [T, O]; rounded, and again if there is a bias."""
    parts = []
    for rows in pieces(len(weight), weight.shape[1], PIECE):
        output = product(x, as_kept(weight[rows], precision))
        parts.append(rounded(output.values, precision, output.spread))
    output = joined(parts, axis=-1)
    return output if bias is None else add(output, as_kept(bias, precision), precision)


def as_kept(weight: Weights, precision: Precision) -> Measured:
    """Weights, and what they lose when they are stored in the format: nothing, if the checkpoint holds them so.

    Quantised ones come as float64, and an engine makes float32 of them at the best.
    """
    wide = weight.astype(np.float64)
    return Measured(wide, np.abs(wide - precision.keep(weight.astype(np.float32, copy=False))))
