"""The grids that the weights of a product are put on, proved from the weights themselves; see exact.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lfm2np.arithmetic.grids import Exponents, Float64, exponent_of, power_of_two
from lfm2np.arithmetic.matrix import PREPARED, Grid, Rows, Weights
from lfm2np.arithmetic.pieces import over_pieces
from lfm2np.errors import NumericsError
from lfm2np.truth.integers import LEAST_BITS, LOW_WEIGHT_BITS, MOST_BITS, MOST_SLICES, SUM_BITS, WEIGHT_BITS


def prove_grid(weight: Rows, what: str) -> Grid:
    """Chooses the grids of weights [outputs, inputs] and of their inputs so that every product is exact.

    Columns are first brought to a common size by powers of two, which the inputs take over: an input channel that is
    large where its weights are small must not coarsen the grid of the others. Weights get 20 bits, and those with
    more than 11 significant bits (so not from bfloat16 or float16) a second slice with 16 bits of what that leaves.
    Quantised weights, which come as float64, get the slices that hold every bit; should even 52 bits of a row's largest
    not do, `left_over` tells what is lost. Where the absolute weights of no row of a slice sum to more than 2**s units
    and inputs have b bits, sum|x w| <= 2**(b + s), so b = 53 - s. NumericsError where inputs would get fewer than 16
    bits.
    """
    columns, slices = columns_and_slices(weight)
    return proved(columns, slices, row_sum_bits(weight, columns, slices), what)


def prepared(weight: Rows, what: str) -> tuple[Float64, Grid]:
    """Weights on the grids that `prove_grid` chooses, [slices, outputs, inputs], and the proof."""
    columns, slices = columns_and_slices(weight)
    values = np.empty((slices, *weight.shape), np.float64)
    return values, proved(columns, slices, row_sum_bits(weight, columns, slices, values), what)


def columns_and_slices(weight: Rows) -> tuple[Exponents, int]:
    columns = column_exponents(weight)
    if weight.dtype == np.float64:
        return columns, slices_needed(weight, columns)
    return columns, 1 if has_short_significands(weight) else 2


def proved(columns: Exponents, slices: int, sum_bits: int, what: str) -> Grid:
    activation_bits = min(MOST_BITS, SUM_BITS - sum_bits)
    if activation_bits < LEAST_BITS:
        raise NumericsError(
            f"{what}: rows of {len(columns)} weights sum to 2**{sum_bits} units of {WEIGHT_BITS} bits, which "
            f"leaves {activation_bits} bits for their inputs; expected at least {LEAST_BITS}"
        )
    return Grid(columns, slices, sum_bits, activation_bits)


def prepared_rows(weight: Weights, grid: Grid) -> Float64:
    """Some rows of the weights on the grid, [slices, rows, inputs]."""
    values = np.empty((grid.slices, *weight.shape), np.float64)
    for index, units, shift in weight_slices(weight, grid.columns, grid.slices):
        np.multiply(units, power_of_two(-shift), out=values[index])
    return values


def weight_slices(weight: Weights, columns: Exponents, slices: int) -> Iterator[tuple[int, Float64, Exponents]]:
    """For each slice its index, its weights as integers [outputs, inputs], and the power of two to divide them by.

    What a slice leaves is exact: both are multiples of the weight's own last bit.
    """
    rest, shift = scaled_rows(weight, columns)
    units = np.rint(rest)
    yield 0, units, shift
    for index in range(1, slices):
        rest = (rest - units) * 2.0**LOW_WEIGHT_BITS
        units = np.rint(rest)
        shift = shift + LOW_WEIGHT_BITS
        yield index, units, shift


def scaled_rows(weight: Weights, columns: Exponents) -> tuple[Float64, Exponents]:
    """Rows [outputs, inputs] in units of their first slice, exactly, and the power of two to divide them by."""
    scaled: Float64 = weight * power_of_two(-columns)
    shift = WEIGHT_BITS - exponent_of(scaled)
    scaled *= power_of_two(shift)
    return scaled, shift


def left_over(weight: Weights, columns: Exponents, slices: int) -> Float64:
    """What the slices do not hold of each weight, as a share of the power of two of its row's largest."""
    scaled, _ = scaled_rows(weight, columns)
    finer = 2.0 ** (LOW_WEIGHT_BITS * (slices - 1))
    scaled *= finer  # the last slice rounds to its units what those before have left
    scaled -= np.rint(scaled)
    scaled *= 2.0**-WEIGHT_BITS / finer
    return scaled


def slices_needed(weight: Rows, columns: Exponents) -> int:
    """The least number of slices that hold every weight, MOST_SLICES at the most."""
    outputs, inputs = weight.shape
    needed = [1]

    def look(rows: slice) -> None:
        part, num_slices = weight[rows], max(needed)
        while num_slices < MOST_SLICES and np.any(left_over(part, columns, num_slices)):
            num_slices += 1
        needed.append(num_slices)

    over_pieces(look, outputs, inputs, PREPARED)
    return max(needed)


def column_exponents(weight: Rows) -> Exponents:
    """[inputs]: the power of two of each column's largest weight, relative to its row; -200 for a column of zeros.

    Relative to its row, since a single large row must not decide how all columns compare.
    """
    outputs, inputs = weight.shape
    largest = [np.zeros(inputs, np.float64)]

    def compare(rows: slice) -> None:
        part = weight[rows]
        relative = np.abs(part) * power_of_two(-exponent_of(part))
        largest.append(relative.max(axis=0))

    over_pieces(compare, outputs, inputs, PREPARED)
    return exponent_of(np.asarray(largest).max(axis=0)[:, None])[:, 0]


def has_short_significands(weight: Rows) -> bool:
    """True if every weight has at most 11 significant bits, as those stored in bfloat16 or float16 do."""
    outputs, inputs = weight.shape
    longer: list[slice] = []

    def look(rows: slice) -> None:
        if not longer and np.any(weight[rows].view(np.uint32) & 0x1FFF):
            longer.append(rows)

    over_pieces(look, outputs, inputs, PREPARED)
    return not longer


def row_sum_bits(weight: Rows, columns: Exponents, slices: int, values: Float64 | None = None) -> int:
    """The least s so that the absolute weights of no row of any slice sum to more than 2**s units.

    On the way `values` [slices, outputs, inputs] get the weights on the grid, if they are given.
    """
    outputs, inputs = weight.shape
    largest = [1]

    def add_up(rows: slice) -> None:
        for index, units, shift in weight_slices(weight[rows], columns, slices):
            largest.append(largest_row_sum(units))
            if values is not None:
                np.multiply(units, power_of_two(-shift), out=values[index, rows])

    over_pieces(add_up, outputs, inputs, PREPARED)
    return (max(largest) - 1).bit_length()


def largest_row_sum(units: Float64) -> int:
    """Of absolute integers [outputs, inputs] of at most 21 bits: exact."""
    return int(np.abs(units).sum(-1).max())
