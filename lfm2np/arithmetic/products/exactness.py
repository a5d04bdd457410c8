"""Asks every way of multiplying that `exact` uses whether it is exact up to 2**53, as its proofs assume.

Another BLAS might add in fewer bits, or multiply by a fast algorithm (Strassen's adds before it multiplies). What is
asked has one right answer in integers. In each row of the left factor one number is large, at another place in each
row, and the others are small; every sum of products is just below 2**53. So wherever a partial sum holds the large
product its last bit counts, and half of these sums are odd: an accumulator of at most 52 bits rounds them, in whatever
order or blocks it adds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.attention import join_scores, weighted_values
from lfm2np.arithmetic.products.product import product
from lfm2np.errors import NumericsError

Float64 = NDArray[np.float64]
Product = Callable[[Float64, Float64], Float64]  # x [T, inputs], weights [outputs, inputs] -> [T, outputs]

SMALL = 64  # numbers below it
WIDE = 2**13  # right factors are this, less a number below SMALL


def operands(rows: int, inputs: int, outputs: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """x [rows, inputs] and weights [outputs, inputs]: all sums of products are from 2**53 - 2**47 to 2**53."""
    count = np.arange(rows * inputs, dtype=np.int64).reshape(rows, inputs)
    x = count * 48271 % 65537 % SMALL
    weights = WIDE - np.arange(outputs * inputs, dtype=np.int64).reshape(outputs, inputs) * 69621 % 65537 % SMALL
    each = np.arange(rows)
    place = (each * max(1, inputs // rows) + each % 8) % inputs  # in each row elsewhere: every block of inputs has it
    x[each, place] = 0
    rest = int(x.sum(1).max()) * WIDE  # of what is left below 2**53
    x[each, place] = (2**53 - rest) // WIDE
    return x, weights


def is_exact(way: Product, rows: int, inputs: int, outputs: int) -> bool:
    """Whether the product of `operands` is that of integers, bit for bit."""
    x, weights = operands(rows, inputs, outputs)
    computed = way(x.astype(np.float64), weights.astype(np.float64))
    return np.array_equal(computed, (x @ weights.T).astype(np.float64))


def scores(x: Float64, weights: Float64) -> Float64:
    """As attention's queries and keys of two groups, whose keys lie side by side."""
    joined = np.empty((2, 1, len(x), len(weights)), np.float64)
    join_scores(np.stack([x, x])[:, None], [np.stack([weights, weights], axis=1)], joined)
    return agreed(joined)


def values(x: Float64, weights: Float64) -> Float64:
    """As attention's weights and values of two groups; its positions are the inputs here."""
    columns = np.ascontiguousarray(weights.T)
    return agreed(weighted_values(np.stack([x, x])[:, None], [np.stack([columns, columns], axis=1)]))


def agreed(groups: Float64) -> Float64:
    """[2, 1, T, outputs] of two equal groups: the first, or NaN where they differ."""
    return np.where(groups[0, 0] == groups[1, 0], groups[0, 0], np.nan)


# What is multiplied how, and rows, inputs and outputs for which BLAS takes another kernel: one row, few, many; products
# that it leaves to one thread, and that it divides.
WAYS: tuple[tuple[str, Product, tuple[tuple[int, int, int], ...]], ...] = (
    ("matrix by vector", product, ((1, 512, 96), (1, 1100, 700), (5, 512, 96))),
    ("matrix by matrix", product, ((8, 64, 16), (64, 512, 64), (130, 600, 70))),
    ("matrix by matrix, large and few rows", product, ((8, 1024, 512),)),
    ("scores of attention", scores, ((1, 64, 40), (12, 64, 200))),
    ("values of attention", values, ((1, 300, 64), (12, 500, 64))),
)


@cache
def require_exact_products() -> None:
    """NumericsError if a way of multiplying is not exact up to 2**53; tens of milliseconds, once a process."""
    for name, way, shapes in WAYS:
        require_exact(name, way, shapes)


def require_exact(name: str, way: Product, shapes: tuple[tuple[int, int, int], ...]) -> None:
    for rows, inputs, outputs in shapes:
        if not is_exact(way, rows, inputs, outputs):
            raise NumericsError(
                f"{name}, [{rows}, {inputs}] by [{inputs}, {outputs}]: this NumPy's float64 product is not exact on "
                "integers below 2**53 (a BLAS of fewer bits, or a fast algorithm?)"
            )
