"""LFM2's operators on numbers that are not quite known: what they should be, and how far an engine's may be off.

A `Measured` is an array with the `spread` of each of its numbers, by which rounding in the engine's format moves it.
One rounding moves a number y by at most unit * |y|; that is taken as one spread. Spreads go through an operator by its
first derivative. Those of different numbers are independent, so they add as the root of their squares; but across the
positions of attention as absolute values, as a repeated token repeats its error. Sums are kept in float32, as engines
do also for half formats: n terms in an unknown order move by sqrt(n) * 2**-24 * sum|terms| (Higham and Mary, "A new
approach to probabilistic rounding error analysis", 2019).

LIMIT spreads are the bound. Three lines of reasoning:
    a rounding error is uniform within one spread at the most, so its standard deviation is spread / sqrt(3) or less;
    a sum of many is nearly normal, and LIMIT = 4 spreads are then 6.9 standard deviations: one number in 10**11;
    every rounding that some engine makes is counted, so that an engine that makes fewer stays the further inside.

T tokens, D width of an operator's input, O of its output, H query heads, G key/value heads, E head_dim, L taps.
Values are float64; what they should be is computed by the arithmetic `float64`, whose own error is 2**-29 of float32's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.ieee import FLOAT64, round_to_bfloat16, unchanged
from lfm2np.arithmetic.matrix import AttentionScale, Matrix, Weights
from lfm2np.arithmetic.pieces import pieces
from lfm2np.arithmetic.routing import LEAST_SUM
from lfm2np.errors import RequestError
from lfm2np.oracle.judging.emulate import ROTARY_UNITS
from lfm2np.oracle.judging.formats import round_to_float16

Array = NDArray[Any]
Float32 = NDArray[np.float32]
LIMIT = 4.0
SUM_UNIT = 2.0**-24  # sums are kept in float32
EXP_UNITS = 2.0  # of float32, times 1 + |x|: relative error of a fast exp(x)
ANGLE_UNITS = float(ROTARY_UNITS)  # of float32: relative error of rotary angles, as judging/emulate.py draws it
PIECE = 2**22  # elements of a temporary
NO_SCALE = AttentionScale(np.zeros(0, np.int32), np.zeros((0, 0), np.int32))


@dataclass(frozen=True)
class Precision:
    """What an engine keeps activations and weights in."""

    name: str
    unit: float  # a rounding moves x by at most unit * |x|,
    least: float  # or by this much, where numbers become subnormal or zero
    keep: Callable[[Array], Array]
    rounds_inputs: bool = False  # before a product with quantised weights: see rounded_inputs.py


Q8 = "q8"
PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", 2.0**-24, 2.0**-126, unchanged),
        Precision("float16", 2.0**-11, 2.0**-24, round_to_float16),
        Precision("bfloat16", 2.0**-8, 2.0**-126, round_to_bfloat16),
        Precision(Q8, 2.0**-24, 2.0**-126, unchanged, rounds_inputs=True),
    )
}


FLOATS = tuple(name for name in PRECISIONS if name != Q8)


def precision_named(name: str) -> Precision:
    if name not in PRECISIONS:
        raise RequestError(f"format {name!r}: expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


@dataclass(frozen=True, eq=False)
class Measured:
    """values and spread, both float64 of one shape."""

    values: Array
    spread: Array

    def reshape(self, *shape: int) -> Measured:
        return Measured(self.values.reshape(shape), self.spread.reshape(shape))

    def __getitem__(self, index: Any) -> Measured:
        return Measured(self.values[index], self.spread[index])

    def bound(self) -> Array:
        return LIMIT * self.spread

    def behind_zeros(self, rows: int) -> Measured:
        """So many rows of zeros, which are known, before the first."""
        zeros = np.zeros((rows, *self.values.shape[1:]))
        return Measured(np.concatenate([zeros, self.values]), np.concatenate([zeros, self.spread]))

    def widened(self, start: int, width: int) -> Measured:
        """The last axis from `start` on among `width` places, of which the others are zeros that are known."""
        missing = [(0, 0)] * (self.values.ndim - 1) + [(start, width - start - self.values.shape[-1])]
        return Measured(np.pad(self.values, missing), np.pad(self.spread, missing))


def joined_rows(parts: Sequence[Measured]) -> Measured:
    return Measured(np.concatenate([part.values for part in parts]), np.concatenate([part.spread for part in parts]))


def together(*spreads: Array | float) -> Array:
    """Independent errors: the root of the sum of their squares."""
    squares: Any = 0.0
    for spread in spreads:
        squares = squares + np.square(spread)
    return np.asarray(np.sqrt(squares))


def rounded(values: Array, precision: Precision, *spreads: Array | float) -> Measured:
    """Values with these spreads, rounded to the format once more."""
    return Measured(values, together(precision.unit * values, precision.least, *spreads))


def embed(rows: Weights, precision: Precision) -> Measured:
    values = FLOAT64.embed(rows)
    return rounded(values, precision)


def add(x: Measured, y: Measured, precision: Precision) -> Measured:
    return rounded(FLOAT64.add(x.values, y.values), precision, x.spread, y.spread)


def multiply(x: Measured, y: Measured, precision: Precision) -> Measured:
    product = FLOAT64.multiply(x.values, y.values)
    return rounded(product, precision, y.values * x.spread, x.values * y.spread)


def linear(x: Measured, weight: Weights, bias: Float32 | None, precision: Precision) -> Measured:
    """x [T, D], weight [O, D] -> [T, O]; the weights count with what the format makes of them.

    Each output is moved by the spread of its inputs times the weights, the inputs times what the weights lose, the
    order of the sum, its rounding, and another if there is a bias.
    """
    parts = [_linear_rows(x, weight[rows], precision) for rows in pieces(len(weight), weight.shape[1], PIECE)]
    product = Measured(
        np.concatenate([part.values for part in parts], axis=-1),
        np.concatenate([part.spread for part in parts], axis=-1),
    )
    if bias is None:
        return product
    return rounded(product.values + bias.astype(np.float64), precision, product.spread, lost(bias, precision))


def _linear_rows(x: Measured, weight: Weights, precision: Precision) -> Measured:
    wide, missing = weight.astype(np.float64), lost(weight, precision)
    values = FLOAT64.linear(x.values, Matrix(wide))
    order = math.sqrt(weight.shape[1]) * SUM_UNIT * (np.abs(x.values) @ np.abs(wide).T)
    squares = np.square(x.spread) @ np.square(wide).T
    if missing.any():
        squares += np.square(x.values) @ np.square(missing).T
    return rounded(values, precision, np.sqrt(squares), order)


def lost(weight: Weights, precision: Precision) -> Array:
    """What weights lose when they are stored in the format: nothing, if the checkpoint holds them so.

    Quantised ones come as float64, and an engine makes float32 of them at the best.
    """
    return np.abs(weight.astype(np.float64) - precision.keep(weight.astype(np.float32, copy=False)))


def rms_norm(x: Measured, weight: Float32, eps: float, precision: Precision) -> Measured:
    """x [..., D]. With r = 1 / sqrt(mean(x**2) + eps): dy = weight * r * (dx - x * r**2 * mean(x * dx)).

    Rounded before the weight and behind it; mean, root and quotient are float32.
    """
    values = FLOAT64.rms_norm(x.values, weight, eps)
    size = x.values.shape[-1]
    scale = 1.0 / np.sqrt(np.mean(np.square(x.values), axis=-1, keepdims=True) + eps)
    common = np.sqrt(np.square(x.values * x.spread).sum(-1, keepdims=True)) / size  # of mean(x * dx)
    moved = np.abs(weight) * scale * together(x.spread, x.values * scale**2 * common)
    inside = (math.sqrt(size) + 3.0) * SUM_UNIT * values
    return rounded(
        values, precision, moved, inside, precision.unit * values, lost(weight, precision) * x.values * scale
    )


def silu(x: Measured, precision: Precision) -> Measured:
    """x / (1 + exp(-x)), whose derivative is s * (1 + x * (1 - s)) with s = 1 / (1 + exp(-x))."""
    share = 0.5 * (1.0 + np.tanh(0.5 * x.values))
    values = FLOAT64.swiglu(x.values, np.ones_like(x.values))
    slope = share * (1.0 + x.values * (1.0 - share))
    return rounded(values, precision, slope * x.spread, EXP_UNITS * SUM_UNIT * (1.0 + np.abs(x.values)) * values)


def gated(gate: Measured, up: Measured, precision: Precision) -> Measured:
    return multiply(silu(gate, precision), up, precision)


def convolve(
    u: Measured, taps: Float32, bias: Float32 | None, precision: Precision, history: Measured | None = None
) -> Measured:
    """u [t, D], taps [D, L] -> [t, D], after `history` [L-1, D] (zeros)."""
    window = u.behind_zeros(taps.shape[1] - 1) if history is None else joined_rows([history, u])
    before, after = slice(None, taps.shape[1] - 1), slice(taps.shape[1] - 1, None)

    def sums(x: Array, filters: Array, added: Float32 | None = None) -> Array:
        return FLOAT64.convolve(x[before], x[after], filters, added)

    values = sums(window.values, taps, bias)
    moved = sums(np.square(window.spread), np.square(taps.astype(np.float64)))
    moved += sums(np.square(window.values), np.square(lost(taps, precision)))
    size = sums(np.abs(window.values), np.abs(taps), None if bias is None else np.abs(bias))
    order = math.sqrt(taps.shape[1] + 1) * SUM_UNIT * size
    return rounded(values, precision, np.sqrt(moved), order, 0.0 if bias is None else lost(bias, precision))


def rotate(x: Measured, cos: Array, sin: Array, angles: Array, precision: Precision) -> Measured:
    """x [T, heads, E] by angles [T, E/2]: products and tables rounded, and angles a little off."""
    values = FLOAT64.rotate(x.values, cos, sin)
    first, second = np.split(values, 2, axis=-1)
    turned = np.concatenate([second, first], axis=-1)  # the derivative by the angle, but for a sign
    both = [np.concatenate([table, table], axis=-1)[:, None, :] for table in (cos, sin, angles)]
    swapped = [np.concatenate(np.split(array, 2, axis=-1)[::-1], axis=-1) for array in (x.values, x.spread)]
    products = together(both[0] * x.values, both[1] * swapped[0])
    moved = together(both[0] * x.spread, both[1] * swapped[1])
    off = ANGLE_UNITS * SUM_UNIT * both[2] * turned
    return rounded(values, precision, moved, precision.unit * products, precision.unit * products, off)


def attend(
    queries: Measured, keys: Measured, values: Measured, precision: Precision, window: int | None = None
) -> Measured:
    """Causal attention of queries [t, H, E], the last t of the C positions of keys and values [C, G, E] -> [t, H, E].

    With shares p, mix a = sum(p * v): da = sum(p * ds * (v - a)) + sum(p * dv). Errors may agree across positions, so
    |sum(p * ds * (v - a))| <= sqrt(sum(p * ds**2)) * sqrt(sum(p * (v - a)**2)), by Cauchy and Schwarz.
    """
    mixed = FLOAT64.attend(queries.values, keys.values, values.values, NO_SCALE._replace(window=window))
    tokens, heads, _ = mixed.shape
    context, group = len(keys.values), heads // keys.values.shape[1]
    spread = np.empty_like(mixed)
    for head in range(heads):
        key, value = keys[:, head // group], values[:, head // group]
        for rows in pieces(tokens, context, PIECE):
            first = context - tokens + rows.start
            scores = _scores(queries[rows, head], key, precision)
            share = _softmax(scores.values, first, window)
            variance = np.maximum(share @ np.square(value.values) - np.square(mixed[rows, head]), 0.0)
            moved = np.sqrt((share * np.square(scores.spread)).sum(-1, keepdims=True) * variance)
            spread[rows, head] = together(moved, _mixing_spread(share, value, precision))
    return rounded(mixed, precision, spread)


def scores(queries: Measured, keys: Measured, precision: Precision, window: int | None = None) -> Measured:
    """Queries [t, H, E], the last t of the C positions of keys [C, G, E] -> [t, H, C], scaled; 0 where hidden."""
    tokens, heads, _ = queries.values.shape
    group, first = heads // keys.values.shape[1], len(keys.values) - tokens
    products = _by_head([_scores(queries[:, head], keys[:, head // group], precision) for head in range(heads)])
    scaled = rounded(products.values, precision, products.spread)
    seen = ~_hidden(tokens, len(keys.values), first, window)[:, None]
    return Measured(np.where(seen, scaled.values, 0.0), np.where(seen, scaled.spread, precision.least))


def shares(scores: Measured, precision: Precision, window: int | None = None) -> Measured:
    """Softmax of scores [T, H, T] over the positions that each row sees: dp = p * (ds - sum(p * ds)).

    |dp| <= p * (|ds| + sqrt(sum(p * ds**2))), as errors may agree across positions.
    """
    share = np.stack([_softmax(scores.values[:, head], 0, window) for head in range(scores.values.shape[1])], axis=1)
    common = np.sqrt((share * np.square(scores.spread)).sum(-1, keepdims=True))
    inside = EXP_UNITS * SUM_UNIT * (1.0 + np.abs(scores.values)) + math.sqrt(scores.values.shape[-1]) * SUM_UNIT
    return rounded(share, precision, share * (scores.spread + common), share * inside)


def mix(weights: Measured, values: Measured, precision: Precision) -> Measured:
    """Weights [t, H, C] times values [C, G, E] -> [t, H, E]."""
    heads = weights.values.shape[1]
    group, parts = heads // values.values.shape[1], []
    for head in range(heads):
        weight, value = weights[:, head], values[:, head // group]
        moved = together(weight.spread @ np.abs(value.values), _mixing_spread(weight.values, value, precision))
        parts.append(Measured(weight.values @ value.values, moved))
    mixed = _by_head(parts)
    return rounded(mixed.values, precision, mixed.spread)


def _by_head(parts: Sequence[Measured]) -> Measured:
    """[t, n] of each head -> [t, H, n]"""
    return Measured(np.stack([part.values for part in parts], 1), np.stack([part.spread for part in parts], 1))


def _scores(queries: Measured, keys: Measured, precision: Precision) -> Measured:
    """Of one head: queries [t, E], keys [C, E] -> [t, C], scaled."""
    head_dim = keys.values.shape[1]
    scale = 1.0 / math.sqrt(head_dim)
    values = queries.values @ keys.values.T * scale
    squares = (
        np.square(queries.spread) @ np.square(keys.values).T + np.square(queries.values) @ np.square(keys.spread).T
    )
    order = math.sqrt(head_dim) * SUM_UNIT * (np.abs(queries.values) @ np.abs(keys.values).T)
    # Rounded as a product and as scaled, if not kept in float32; by no more is a fast exp(score) off.
    return Measured(values, together(scale * np.sqrt(squares), scale * order, 2.0 * precision.unit * values))


def _hidden(tokens: int, context: int, first: int, window: int | None) -> Array:
    """[t, C]: what queries from position `first` on do not see."""
    positions, query = np.arange(context), np.arange(first, first + tokens)[:, None]
    return (positions > query) | (positions <= query - (context if window is None else window))


def _softmax(scores: Array, first: int, window: int | None) -> Array:
    """Of queries from position `first` on: [t, C] -> [t, C], 0 where hidden."""
    below = np.where(_hidden(len(scores), scores.shape[1], first, window), -np.inf, scores)
    below -= below.max(-1, keepdims=True)
    share = np.exp(below)
    return np.asarray(share / share.sum(-1, keepdims=True))


def _mixing_spread(shares: Array, values: Measured, precision: Precision) -> Array:
    """Of one head: shares [t, C] times values [C, E]; what the values, their sum and the shares' own rounding move."""
    size = shares @ np.abs(values.values)
    # Where values are fixed-point, as exact's, a grid for each row of them.
    grid = SUM_UNIT * (shares @ np.abs(values.values).max(-1, keepdims=True))
    order = math.sqrt(len(values.values)) * SUM_UNIT * size
    return together(shares @ values.spread, precision.unit * size, order, grid)


MOST_LEFT_OUT = 1e-5  # relative: the most that a weight may differ without LEAST_SUM


def sigmoid(x: Measured, precision: Precision) -> Measured:
    """1 / (1 + exp(-x)) = s, whose derivative is s * (1 - s); sum and quotient are float32."""
    values = FLOAT64.sigmoid(x.values)
    slope = values * (1.0 - values)
    fast = EXP_UNITS * SUM_UNIT * (1.0 + np.abs(x.values)) * slope
    return rounded(values, precision, slope * x.spread, fast, 2.0 * SUM_UNIT * values)


def preferred(scores: Measured, bias: Float32 | None) -> Measured:
    """What experts are chosen by: scores plus the bias [N]; bias and sum are float32 in every format."""
    if bias is None:
        return scores
    values = scores.values + bias.astype(np.float64)
    return Measured(values, together(scores.spread, SUM_UNIT * values))


def routing_weights(scores: Measured, normalised: bool, factor: float, precision: Precision) -> Measured:
    """The chosen experts' scores [T, K] as weights of their outputs.

    With s / sum(s) = p: dp = (ds * (1 - p) - p * sum of the others' ds) / sum(s). The sum may be rounded at each of its
    terms, and the quotient. Some engines (vLLM) do not add LEAST_SUM to the sum: no finding.
    """
    values = FLOAT64.routing_weights(scores.values, normalised, factor)
    if not normalised:
        return rounded(values, precision, factor * scores.spread)
    total = scores.values.sum(-1, keepdims=True) + LEAST_SUM
    part = scores.values / total
    squares = np.square(scores.spread)
    others = np.sqrt(np.maximum(squares.sum(-1, keepdims=True) - squares, 0.0))
    moved = factor / total * together((1.0 - part) * scores.spread, part * others)
    rounding = precision.unit * math.sqrt(1.0 + scores.values.shape[-1]) * values
    left_out = 0.5 * np.minimum(LEAST_SUM / total, MOST_LEFT_OUT) * values
    return rounded(values, precision, moved, rounding, left_out)


def combine_experts(outputs: Measured, weights: Measured, precision: Precision) -> Measured:
    """The sum [T, D] of outputs [T, K, D] times weights [T, K]. Each product and partial sum may be rounded."""
    values = FLOAT64.combine_experts(outputs.values, weights.values)
    weight, off = weights.values[..., None], weights.spread[..., None]
    products = weight * outputs.values
    moved = np.square(weight * outputs.spread) + np.square(outputs.values * off) + np.square(precision.unit * products)
    sums = precision.unit * math.sqrt(products.shape[1] - 1) * np.abs(products).sum(axis=1)
    return rounded(values, precision, np.sqrt(moved.sum(axis=1)), sums)
