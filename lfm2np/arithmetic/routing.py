"""Which experts a token goes to and how their outputs are mixed, in exact arithmetic.

Every operation is row by row: a token's experts, their weights and its output depend on nothing but its own row, so
they are the same bits in any batch. Products of an expert are `linear`, whose rows depend on themselves alone, too;
hence computing an expert once over whichever tokens of a step chose it changes no bit.
Source: transformers models/lfm2_moe, Lfm2MoeTopKRouter; integrations/moe.py, grouped_mm_experts_forward.
Letters: T tokens, N experts, K experts of a token, D width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.grids import Float32, Float64, exact_sum
from lfm2np.arithmetic.pieces import over_pieces
from lfm2np.truth import elementary

LEAST_SUM = 1e-6  # added to a sum of weights before it divides them


def top_k(preferred: NDArray[Any], count: int) -> NDArray[np.int64]:
    """The experts [T, count] with the largest of preferred [T, N], best first; of equal ones the lowest ids."""
    return np.argsort(-preferred, axis=-1, kind="stable")[:, :count]


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x)), computed in float64, then rounded to float32."""
    divisor = elementary.exp(-x.astype(np.float64))
    divisor += 1.0
    return np.asarray(1.0 / divisor).astype(np.float32)


def add_expert_bias(scores: Float32, bias: Float32) -> Float32:
    """Scores [T, N] and the bias [N], added and rounded once to float32: by them experts are chosen."""
    return scores + bias


def routing_weights(scores: Float32, normalised: bool, factor: float) -> Float32:
    """The chosen experts' scores [T, K] as weights of their outputs, rounded once to float32.

    `normalised` divides them by their sum (exact_sum: in any order) plus 1e-6; then they are multiplied by `factor`.
    """
    wide: Float64 = scores.astype(np.float64)
    if normalised:
        wide /= exact_sum(wide)[..., None] + LEAST_SUM
    return (wide * factor).astype(np.float32)


def combine_experts(outputs: Float32, weights: Float32) -> Float32:
    """Outputs [T, K, D] of each token's experts, times their weights [T, K]: [T, D].

    Products of two float32 are exact in float64; they are added best expert first, then rounded once to float32.
    """
    mixed = np.empty((len(outputs), outputs.shape[2]), np.float32)

    def compute(rows: slice) -> None:
        total = np.zeros(mixed[rows].shape, np.float64)
        for place in range(outputs.shape[1]):
            total += outputs[rows, place].astype(np.float64) * weights[rows, place, None]
        mixed[rows] = total

    over_pieces(compute, len(outputs), outputs.shape[2])
    return mixed
