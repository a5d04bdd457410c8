"""x [T, inputs] times weights [outputs, inputs] transposed, in tiles that BLAS computes on one thread each.

A general product copies both factors into an order of its own first, and with few rows that takes longer than to
multiply. OpenBLAS has kernels for AVX-512 that multiply small factors where they lie, up to 10**6 multiplications; and
with whatever kernels it computes up to 2**18 on the caller's thread. So a product is cut into tiles below these: a call
of NumPy's computes many of them, the threads of `pieces` share the calls, and what follows (the sum over blocks of
inputs, over slices, a bias, rounding) is done while their sums are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import pieces
from lfm2np.arithmetic.pieces import over_pieces
from lfm2np.arithmetic.products.blas import blas_kernel

Array = NDArray[Any]

IN_PLACE = ("SkylakeX", "Cooperlake", "SapphireRapids")  # OpenBLAS's kernels for AVX-512
OUTPUTS, ROWS = 48, 16  # of a tile
INPUTS, INPUTS_IN_PLACE = 256, 1152  # below 2**18 multiplications, and 10**6; a fourth of LFM2-350M's 4,608
GROUPS = 16  # of ROWS in one call
TILES = 8  # of weights that a thread takes at a time
CALL = 32  # products in one call: with few tiles and groups, of several blocks of inputs


def by_tiles(x: Array, weights: Array, result: Array, slices: int = 1, bias: Array | None = None) -> None:
    """Puts the product with weights [slices * outputs, inputs] into result [T, outputs].

    The products of the slices are added in their order, then a bias [outputs], all in the format of x, and rounded once
    to that of the result. No sum is -0.
    """
    outputs, inputs = len(weights) // slices, x.shape[1]
    step = OUTPUTS * max(1, min(TILES, outputs // (4 * OUTPUTS * pieces.THREADS)))
    parts = list(parts_of(outputs, OUTPUTS, step))
    layered = weights.reshape(slices, outputs, inputs)
    packed = [(rows, in_groups(x[rows])) for rows in parts_of(len(x), ROWS, ROWS * GROUPS)]

    def compute(numbers: slice) -> None:
        for part in parts[numbers]:
            tiles = layered[:, part].reshape(slices, -1, min(OUTPUTS, part.stop - part.start), inputs)
            for rows, groups in packed:
                total = product_of_tiles(tiles[0], groups)
                total += 0.0  # -0 + 0 is +0
                for index in range(1, slices):
                    total += product_of_tiles(tiles[index], groups)
                if bias is not None:
                    total += bias[part].reshape(len(total), 1, -1, 1)
                count, several, height, group = total.shape
                result[rows, part].reshape(several, group, count, height)[...] = total.transpose(1, 3, 0, 2)

    over_pieces(compute, len(parts), step * inputs, 1)


def parts_of(count: int, unit: int, step: int) -> Iterator[slice]:
    """Slices of range(count): of whole units, `step` at the most; then what is less than a unit."""
    whole = count - count % unit
    yield from (slice(first, min(whole, first + step)) for first in range(0, whole, step))
    if whole < count:
        yield slice(whole, count)


def in_groups(x: Array) -> Array:
    """Rows [q * g, inputs], g of them ROWS or all, by blocks of inputs [b, q, k, g].

    The last block is filled up with zeros, which nothing is multiplied with.
    """
    most = INPUTS_IN_PLACE if multiplies_in_place() else INPUTS
    blocks = -(-x.shape[1] // most)
    size = -(-x.shape[1] // blocks)
    if blocks * size > x.shape[1]:
        x = np.pad(x, ((0, 0), (0, blocks * size - x.shape[1])))
    return np.ascontiguousarray(x.reshape(-1, min(ROWS, len(x)), blocks, size).transpose(2, 0, 3, 1))


def product_of_tiles(tiles: Array, groups: Array) -> Array:
    """Weights [n, p, inputs] times groups of rows [b, q, k, g]: [n, q, p, g], the blocks of inputs added in order."""
    blocks = products_of_blocks(tiles, groups)
    total = next(blocks)
    for block in blocks:
        total += block
    return total


def products_of_blocks(tiles: Array, groups: Array) -> Iterator[Array]:
    """That of each block [n, q, p, g], several blocks in a call if tiles and groups are few."""
    count, height, inputs = tiles.shape
    _, several, size, _ = groups.shape
    full = inputs // size
    at_once = max(1, CALL // (count * several))
    for first in range(0, full, at_once):
        last = min(full, first + at_once)
        weights = tiles[..., first * size : last * size].reshape(count, height, -1, size).transpose(2, 0, 1, 3)
        yield from weights[:, :, None] @ groups[first:last, None]
    if full < len(groups):
        yield tiles[:, None, :, full * size :] @ groups[full, :, : inputs - full * size]


@cache
def multiplies_in_place() -> bool:
    return blas_kernel() in IN_PLACE
