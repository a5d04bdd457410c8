"""One dot product, summed in two orders: in float32, and on the grid of exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Orders:
    """The same products, added forwards and backwards."""

    left: tuple[float, ...]
    right: tuple[float, ...]
    forwards: tuple[np.float32, ...]  # partial sums in float32
    backwards: tuple[np.float32, ...]
    grid_left: tuple[int, ...]  # the factors as whole numbers of their grids' units
    grid_right: tuple[int, ...]
    exact_forwards: tuple[int, ...]
    exact_backwards: tuple[int, ...]
    unit: int  # a product of units is 2**unit


def partial_sums(products: Sequence[np.float32]) -> tuple[np.float32, ...]:
    total, sums = np.float32(0.0), []
    for product in products:
        total = np.float32(total + product)
        sums.append(total)
    return tuple(sums)


def whole_sums(products: Sequence[int]) -> tuple[int, ...]:
    total, sums = 0, []
    for product in products:
        total += product
        sums.append(total)
    return tuple(sums)


def both_orders(left: Float32, right: Float32, bits: int = 20) -> Orders:
    """Of two vectors [n]: float32 products and sums, and the same on grids of so many bits."""
    products = [np.float32(a * b) for a, b in zip(left, right, strict=True)]
    grids = []
    for vector in (left, right):
        exponent = int(np.frexp(np.max(np.abs(vector)))[1])
        grids.append(
            ([int(one) for one in np.rint(np.ldexp(vector.astype(np.float64), bits - exponent))], exponent - bits)
        )
    (grid_left, unit_left), (grid_right, unit_right) = grids
    whole = [a * b for a, b in zip(grid_left, grid_right, strict=True)]
    return Orders(
        left=tuple(map(float, left)),
        right=tuple(map(float, right)),
        forwards=partial_sums(products),
        backwards=partial_sums(products[::-1]),
        grid_left=tuple(grid_left),
        grid_right=tuple(grid_right),
        exact_forwards=whole_sums(whole),
        exact_backwards=whole_sums(whole[::-1]),
        unit=unit_left + unit_right,
    )
