"""x [T, inputs] times weights [outputs, inputs] transposed, by the calls of BLAS that are fastest for so many rows.

In exact arithmetic all of these give the same bits. Measured with OpenBLAS: with a few rows a general product runs far
below the memory's bandwidth, matrix-vector products over a piece of the weights that stays in the cache run near it,
and a piece must be large enough that OpenBLAS divides it among its threads. OpenBLAS has kernels for AVX-512 that
multiply small factors where they lie: there, 3 to 16 rows are fastest in tiles of the weights, by the threads of
`pieces`. Elsewhere, and with more rows, float32 is faster with the weights on the left, if the result is turned round
while it is in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.pieces import over_pieces
from lfm2np.arithmetic.products.blas import blas_kernel

Array = NDArray[Any]

FEW, MANY = 5, 96  # rows
WEIGHTS_AT_ONCE = 2**19  # of a piece of outputs, with few rows
OUTPUTS_AT_ONCE = 2**11  # that are turned round together
IN_PLACE = ("SkylakeX", "Cooperlake", "SapphireRapids")  # kernels that multiply small factors where they lie
TILED_ROWS, TILED_WEIGHTS = range(3, 17), 2**19  # of products in tiles; at least so many weights
TILE, TILE_PRODUCTS = 32, 1_000_000  # outputs of a tile; multiplications that OpenBLAS does where factors lie


def product(x: Array, weights: Array) -> Array:
    """[T, inputs], [outputs, inputs] -> [T, outputs]. Which way depends on shapes, dtype and BLAS's kernels only."""
    if tiles_pay(x, weights):
        return by_tiles(x, weights)
    if len(x) <= FEW:
        return by_vectors(x, weights)
    if len(x) <= MANY and weights.dtype == np.float32:
        return turned_round(x, weights)
    return x @ weights.T


def tiles_pay(x: Array, weights: Array) -> bool:
    large = weights.size >= TILED_WEIGHTS and len(weights) % TILE == 0
    return large and len(x) in TILED_ROWS and blas_kernel() in IN_PLACE


def by_tiles(x: Array, weights: Array) -> Array:
    """Tiles of outputs by blocks of inputs, as large as is small for BLAS; sums of blocks are added in their order."""
    inputs = weights.shape[1]
    size = -(-inputs // -(-inputs * TILE * len(x) // TILE_PRODUCTS))
    turned, tiles = np.ascontiguousarray(x.T), weights.reshape(-1, TILE, inputs)
    products = np.empty((len(x), len(tiles), TILE), np.result_type(x, weights))

    def compute(part: slice) -> None:
        total = tiles[part, :, :size] @ turned[:size]
        for start in range(size, inputs, size):
            total += tiles[part, :, start : start + size] @ turned[start : start + size]
        products[:, part] = total.transpose(2, 0, 1)

    over_pieces(compute, len(tiles), TILE * inputs, WEIGHTS_AT_ONCE)
    return products.reshape(len(x), len(weights))


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
