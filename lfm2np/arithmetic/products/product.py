"""x [T, inputs] times weights [outputs, inputs] transposed, by the calls of BLAS that are fastest for so many rows.

In exact arithmetic all of these give the same bits. Measured with OpenBLAS: with a few rows a general product runs far
below the memory's bandwidth, matrix-vector products over a piece of the weights that stays in the cache run near it,
and a piece must be large enough that OpenBLAS divides it among its threads. With more rows float32 is faster with the
weights on the left, if the result is turned round while it is in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FEW, MANY = 4, 96  # rows
WEIGHTS_AT_ONCE = 2**19  # of a piece of outputs, with few rows
OUTPUTS_AT_ONCE = 2**11  # that are turned round together


def product(x: Array, weights: Array) -> Array:
    """[T, inputs], [outputs, inputs] -> [T, outputs]. Which way depends on the shapes and the dtype only."""
    if len(x) <= FEW:
        return by_vectors(x, weights)
    if len(x) <= MANY and weights.dtype == np.float32:
        return turned_round(x, weights)
    return x @ weights.T


def by_vectors(x: Array, weights: Array) -> Array:
    """A matrix-vector product for each row; several rows share a piece of the weights while it is in the cache."""
    if len(x) == 1:
        return np.asarray(weights @ x[0])[None]
    outputs, inputs = weights.shape
    products = np.empty((len(x), outputs), np.result_type(x, weights))
    step = max(1, -(-WEIGHTS_AT_ONCE // inputs))
    for start in range(0, outputs, step):
        piece = weights[start : start + step]
        for row, result in zip(x, products, strict=True):
            np.matmul(piece, row, out=result[start : start + step])
    return products


def turned_round(x: Array, weights: Array) -> Array:
    """The weights on the left: [outputs, T], transposed."""
    products = np.empty((len(x), len(weights)), np.result_type(x, weights))
    for start in range(0, len(weights), OUTPUTS_AT_ONCE):
        piece = slice(start, start + OUTPUTS_AT_ONCE)
        products[:, piece] = (weights[piece] @ x.T).T
    return products
