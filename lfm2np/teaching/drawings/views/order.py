"""Why order matters, and then does not: one dot product of the run, in float32 and on the fixed-point grid."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.report.markup import Markup, details, element, number, table
from lfm2np.teaching.drawings.page.view import View, view_without_steps

Float32 = NDArray[np.float32]
GRID_BITS = 20


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


def partial_sums(products: list[np.float32]) -> tuple[np.float32, ...]:
    return tuple(accumulate(products, lambda total, product: np.float32(total + product), initial=np.float32(0.0)))[1:]


def both_orders(left: Float32, right: Float32) -> Orders:
    """Of two vectors [n]: float32 products and sums, and the same on grids of GRID_BITS."""
    products = [np.float32(a * b) for a, b in zip(left, right, strict=True)]
    grids = []
    for vector in (left, right):
        exponent = int(np.frexp(np.max(np.abs(vector)))[1])
        units = np.rint(np.ldexp(vector.astype(np.float64), GRID_BITS - exponent))
        grids.append(([int(unit) for unit in units], exponent - GRID_BITS))
    (grid_left, unit_left), (grid_right, unit_right) = grids
    whole = [a * b for a, b in zip(grid_left, grid_right, strict=True)]
    return Orders(
        left=tuple(map(float, left)),
        right=tuple(map(float, right)),
        forwards=partial_sums(products),
        backwards=partial_sums(products[::-1]),
        grid_left=tuple(grid_left),
        grid_right=tuple(grid_right),
        exact_forwards=tuple(accumulate(whole)),
        exact_backwards=tuple(accumulate(whole[::-1])),
        unit=unit_left + unit_right,
    )


def order(chosen: Orders, where: str) -> View:
    first, second = chosen.forwards[-1], chosen.backwards[-1]
    exact = chosen.exact_forwards[-1]
    value, unit = number(exact * 2.0**chosen.unit, 9), f"2^{chosen.unit}"
    rows = [
        ["float32, first to last", number(float(first), 9), bits(first)],
        ["float32, last to first", number(float(second), 9), bits(second)],
        ["on the grid, first to last", f"{exact:,} × {unit}", value],
        ["on the grid, last to first", f"{chosen.exact_backwards[-1]:,} × {unit}", value],
    ]
    return view_without_steps(
        "order",
        "Why order matters, and then does not",
        "A float32 sum depends on the order of its terms, and batching changes the order. On a grid of whole "
        "numbers every sum is exact, so no order, batch or thread count can change a bit.",
        table("One dot product, four ways", ["", "the sum", "its bits, or its value"], rows),
        element("p", f"{len(chosen.left)} products: {where}."),
        element(
            "p",
            element("strong", "different bits" if first != second else "the same bits, this time", class_="changed"),
            " in float32; ",
            element("strong", "the same number", class_="good"),
            " on the grid. Each factor is rounded once, to a whole number of its vector's unit; products and "
            "all partial sums stay below 2^53, where float64 holds every whole number.",
        ),
        details("All partial sums", steps(chosen)),
    )


def bits(value: np.float32) -> str:
    return f"0x{int(np.float32(value).view(np.uint32)):08x}"


def steps(chosen: Orders) -> Markup:
    rows = []
    backwards = chosen.backwards[::-1]
    exact_backwards = chosen.exact_backwards[::-1]
    whole = (chosen.grid_left, chosen.grid_right, chosen.exact_forwards, exact_backwards)
    for index, (left, right) in enumerate(zip(chosen.left, chosen.right, strict=True)):
        sums = (number(float(partial[index]), 9) for partial in (chosen.forwards, backwards))
        rows.append([index, number(left, 7), number(right, 7), *sums, *(f"{values[index]:,}" for values in whole)])
    head = ["", "a", "b", "float32 sum so far", "from the end"]
    head += ["a, in units", "b, in units", "exact sum so far", "from the end"]
    return table("Products and partial sums", head, rows)
