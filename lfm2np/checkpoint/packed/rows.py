"""Rows of a quantised matrix that several arrays of a file hold together, and what number each weight is.

A weight is  scale * (code - zero) + bias,  where the scale, the zero and the bias are those of its group of columns.
In float64 it is that number exactly:

    A code less its zero is an integer of at most 8 bits, or without a zero a float8 or float4 of at most 4. A scale has
    at most 24 bits (float32), so their product has at most 32: float64 holds it, being above 2**-149 * 2**-9.
    Where there is a bias the sum of both is a multiple of the lower of two last bits, the scale's and the bias's, and
    smaller than |scale| * 2**bits + |bias|. Float16: multiples of 2**-24 below 2**16 * 256 + 2**16 < 2**25, 49 bits.
    bfloat16 and float32 have wider exponents, so a scale can be so much smaller than its bias that no float64 holds
    their sum. Quantisers make no such groups, as the bias is a weight and the scale a share of one; `bad_group` refuses
    them, so that nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.packed.codes import BITS, LARGEST, Array, Float64, bytes_of, codes_of, numbers

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT64_BITS = 53
NUMBERS = 2**18  # looked at together: keeps temporaries small


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Indexed by rows (or by an expert, where they are stacked) as an array is: an index takes them of each array.

    coding    what codes.codes_of takes
    columns   numbers in a row
    codes     [..., rows, words] as the file holds them
    scales    [..., rows, groups], of `dtype`
    dtype     of scales and biases: what codes.numbers takes
    zeros     [..., rows, groups] integers, or one for all
    biases    as scales, or None
    group_of  [columns]: the group of each; None where they follow each other, all of one size
    """

    coding: str
    columns: int
    codes: Array
    scales: Array
    dtype: str
    zeros: NDArray[np.integer] | int = 0
    biases: Array | None = None
    group_of: NDArray[np.int64] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.columns)

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        arrays = (self.codes, self.scales, self.biases, self.zeros, self.group_of)
        return sum(one.nbytes for one in arrays if isinstance(one, np.ndarray))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: Any) -> PackedRows:
        """Of the first axis: a number of experts, a slice or an array of rows."""
        return replace(
            self,
            codes=self.codes[index],
            scales=self.scales[index],
            zeros=self.zeros if isinstance(self.zeros, int) else self.zeros[index],
            biases=None if self.biases is None else self.biases[index],
        )

    def widened(self) -> Float64:
        """[..., rows, columns]. Nothing rounds: see above."""
        products, biases = self.parts()
        if biases is not None:
            products += biases
        return products

    def parts(self) -> tuple[Float64, Float64 | None]:
        """scale * (code - zero), [..., rows, columns], and the bias of each."""
        codes = codes_of(self.codes, self.coding)[..., : self.columns]
        if not isinstance(self.zeros, int) or self.zeros:
            codes -= self.by_column(np.asarray(self.zeros, np.float64))
        codes *= self.by_column(numbers(self.scales, self.dtype))
        return codes, None if self.biases is None else self.by_column(numbers(self.biases, self.dtype))

    def by_column(self, of_groups: Float64) -> Float64:
        """[..., groups] -> [..., columns]."""
        if of_groups.ndim == 0:
            return of_groups
        if self.group_of is not None:
            return np.asarray(of_groups[..., self.group_of])
        return np.repeat(of_groups, self.columns // of_groups.shape[-1], axis=-1)

    @property
    def form(self) -> tuple[object, ...]:
        """What bytes alone do not tell."""
        return self.coding, self.columns, self.dtype, self.biases is None, self.group_of is None

    def bytes(self) -> Iterator[NDArray[np.uint8]]:
        """Of all arrays; two of the same form are equal if these are."""
        yield from map(bytes_of, self.arrays())

    def arrays(self) -> Iterator[Array]:
        for one in (self.codes, self.scales, self.biases, self.zeros, self.group_of):
            if one is not None:
                yield np.atleast_1d(np.asarray(one))


def bad_group(rows: PackedRows) -> str | None:
    """Of rows [rows, columns]: the first group whose weights are no numbers that float64, and nearly float32, holds.

    In words, such as "the scale nan in group 0 of row 3".
    """
    largest = float(2 ** BITS[rows.coding]) if rows.coding in BITS else LARGEST[rows.coding]
    step = max(1, NUMBERS // rows.columns)
    for piece in (slice(start, start + step) for start in range(0, len(rows), step)):
        part = rows[piece]
        scales = numbers(part.scales, part.dtype)
        biases = np.zeros_like(scales) if part.biases is None else numbers(part.biases, part.dtype)
        for what, found in (("scale", scales), ("bias", biases)):
            if bad := first(~np.isfinite(found)):
                return f"the {what} {found[bad]} in group {bad[1]} of row {piece.start + bad[0]}"
        if part.coding == "float8" and (bad := first((bytes_of(part.codes) & 127) == 127)):
            return f"the code nan in column {bad[1]} of row {piece.start + bad[0]}"
        bound = np.abs(scales) * largest + np.abs(biases)
        lowest = np.minimum(last_bit(scales), last_bit(biases))
        suspect = bound > FLOAT32_MAX
        if part.biases is not None:
            suspect |= np.frexp(bound)[1] - lowest > FLOAT64_BITS
        for row in np.flatnonzero(suspect.any(axis=-1)):
            if told := bad_value(part[row : row + 1]):
                return f"{told} of row {piece.start + row}"
    return None


def first(bad: NDArray[np.bool_]) -> tuple[int, int] | None:
    found = np.argwhere(bad)
    return (int(found[0][0]), int(found[0][1])) if len(found) else None


def last_bit(values: Float64) -> NDArray[np.int64]:
    """The exponent of the lowest bit that is set, of values of at most 24 bits; large of zero."""
    fraction, exponent = np.frexp(values)
    units = np.abs(np.ldexp(fraction, 24)).astype(np.int64)
    lowest = np.frexp((units & -units).astype(np.float64))[1] - 1
    return np.where(units == 0, 10_000, exponent.astype(np.int64) - 24 + lowest)


def bad_value(row: PackedRows) -> str | None:
    """Of one row, weight by weight, with the rounding error of the sum (Knuth's two-sum)."""
    products, biases = row.parts()
    added = np.zeros_like(products) if biases is None else biases
    total = products + added
    back = total - products
    error = (products - (total - back)) + (added - back)
    if bad := first(np.abs(total) > FLOAT32_MAX):
        return f"the weight {total[bad]} in column {bad[1]}"
    if bad := first(error != 0.0):
        return f"the scale times code {products[bad]} and the bias {added[bad]}, too far apart, in column {bad[1]}"
    return None
