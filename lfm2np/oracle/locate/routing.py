"""A router's operators, and the weighted sum of experts' outputs, on measured numbers: see spread.py.

T tokens, N experts, K experts of a token, D hidden.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.numerics.ieee import FLOAT64
from lfm2np.numerics.routing import LEAST_SUM
from lfm2np.oracle.locate.spread import EXP_UNITS, SUM_UNIT, Measured, Precision, rounded, together

Array = NDArray[Any]
Float32 = NDArray[np.float32]
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
