"""Rows of a quantised matrix that several arrays of a file hold together, and what number each weight is.

A weight is  scale * (code - zero) + bias,  where the scale, the zero and the bias are those of its group of columns.
In float64 it is that number exactly:

    A code less its zero is an integer of at most 8 bits, or without a zero a float8 or float4 of at most 4. A scale has
    at most 24 bits (float32), so their product has at most 32: float64 holds it, being above 2**-149 * 2**-9.
    Where there is a bias the sum of both is a multiple of the lower of two last bits, the scale's and the bias's, and
    smaller than |scale| * 2**bits + |bias|. Float16: multiples of 2**-24 below 2**16 * 256 + 2**16 < 2**25, 49 bits.
    bfloat16 and float32 have wider exponents, so a scale can be so much smaller than its bias that no float64 holds
    their sum. Quantisers make no such groups, as the bias is a weight and the scale a share of one; `problem` refuses
    every group in which some code might lead to one, so that nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.stored import Array, QuantisedRows

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT64_BITS = 53
NUMBERS = 2**18  # looked at together: keeps temporaries small


@dataclass(frozen=True, eq=False)
class PackedRows(QuantisedRows):
    """Indexed by rows, or by an expert, where they are stacked.

    coding    what codes_of takes
    columns   numbers in a row
    codes     [..., rows, words] as the file holds them
    scales    [..., rows, groups], of `dtype`
    dtype     of scales and biases: what numbers takes
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
    SHARED: ClassVar[tuple[str, ...]] = ("group_of",)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.columns)

    def widened(self) -> Float64:
        """[..., rows, columns]. Nothing rounds: see above."""
        weights = codes_of(self.codes, self.coding)[..., : self.columns]
        if not isinstance(self.zeros, int) or self.zeros:
            weights -= self.by_column(np.asarray(self.zeros, np.float64))
        weights *= self.by_column(numbers(self.scales, self.dtype))
        if self.biases is not None:
            weights += self.by_column(numbers(self.biases, self.dtype))
        return weights

    def by_column(self, of_groups: Float64) -> Float64:
        """[..., groups] -> [..., columns]."""
        if of_groups.ndim == 0:
            return of_groups
        if self.group_of is not None:
            return np.asarray(of_groups[..., self.group_of])
        return np.repeat(of_groups, self.columns // of_groups.shape[-1], axis=-1)

    def problem(self) -> str | None:
        """Of rows [rows, columns]: the first group whose weights may be no numbers that float64, and float32, holds."""
        largest = float(2 ** BITS[self.coding]) if self.coding in BITS else LARGEST[self.coding]
        step = max(1, NUMBERS // self.columns)
        for start in range(0, len(self), step):
            part = self[start : start + step]
            scales = numbers(part.scales, part.dtype)
            biases = np.zeros_like(scales) if part.biases is None else numbers(part.biases, part.dtype)
            bound = np.abs(scales) * largest + np.abs(biases)
            span = np.frexp(bound)[1] - np.minimum(last_bit(scales), last_bit(biases))
            for bad, what, values in (
                (~np.isfinite(scales), "the scale", scales),
                (~np.isfinite(biases), "the bias", biases),
                (bound > FLOAT32_MAX, "weights up to", bound),
                ((span > FLOAT64_BITS) & (biases != 0.0), "a scale too small beside the bias", biases),
            ):
                for row, group in np.argwhere(bad)[:1].tolist():
                    return f"{what} {values[row, group]} in group {group} of row {start + row}"
            if part.coding == "float8":
                for row, column in np.argwhere(bytes_of(part.codes) & 127 == 127)[:1].tolist():
                    return f"the code nan in column {column} of row {start + row}"
        return None


def last_bit(values: Float64) -> NDArray[np.int64]:
    """The exponent of the lowest bit that is set, of values of at most 24 bits; large of zero."""
    fraction, exponent = np.frexp(values)
    units = np.abs(np.ldexp(np.where(np.isfinite(fraction), fraction, 0.0), 24)).astype(np.int64)
    lowest = np.frexp((units & -units).astype(np.float64))[1] - 1
    return np.where(units == 0, 10_000, exponent.astype(np.int64) - 24 + lowest)


Float64 = NDArray[np.float64]

# --- codes of 1 to 8 bits, float8, float4, and scales of any of their types
#
# All of it is exact: an integer of at most 8 bits, or a float of at most 24 bits with an exponent far from float64's
# ends. Sources: mlx's quantized.h (`pack_factor`, `fp4.h`, `fp8.h`), compressed-tensors' `pack_to_int32`, the OCP
# specifications of 8-bit floating point and of microscaling formats.

BITS = {f"{width} bits": width for width in range(1, 9)}
LARGEST = {"int8": 256.0, "float8": 448.0, "float4": 6.0}  # of a code less its zero; of n bits 2**n


def float8_values() -> Float64:
    """[256] of E4M3: sign, 4 bits of exponent with bias 7, 3 of fraction; 0x7F and 0xFF are NaN, infinity has none."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = np.where(exponent > 0, np.ldexp(8.0 + fraction, exponent - 10), np.ldexp(1.0 * fraction, -9))
    return np.copysign(np.where(byte & 127 == 127, np.nan, size), np.where(byte > 127, -1.0, 1.0))


FLOAT8 = float8_values()
_FLOAT4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # E2M1 of each sign; code 8 is -0.0
FLOAT4 = np.concatenate([_FLOAT4, -_FLOAT4])
E8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)  # powers of two


def bytes_of(words: Array) -> NDArray[np.uint8]:
    """The bytes of the last axis in the file's order, which is little-endian."""
    return np.ascontiguousarray(words).view(np.uint8)


def unpacked(words: Array, width: int) -> NDArray[np.uint8]:
    """Codes of `width` bits from the lowest bit of the first word on, over the borders of words: [..., codes].

    Eight codes are `width` bytes, whatever the width is.
    """
    packed = bytes_of(words)
    if width == 8:
        return packed
    if 8 % width == 0:  # the same, faster: no code lies in two bytes
        codes = packed[..., None] >> np.arange(0, 8, width, dtype=np.uint8) & np.uint8(2**width - 1)
        return codes.reshape(*packed.shape[:-1], -1)
    eights = packed.reshape(*packed.shape[:-1], -1, width).astype(np.uint64)
    joined = np.zeros(eights.shape[:-1], np.uint64)
    for place in range(width):
        joined |= eights[..., place] << np.uint64(8 * place)
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(width)
    codes = (joined[..., None] >> shifts & np.uint64(2**width - 1)).astype(np.uint8)
    return codes.reshape(*packed.shape[:-1], -1)


def codes_of(words: Array, coding: str) -> Float64:
    """[..., codes] of "n bits", "int8", "float8" or "float4"."""
    if coding in BITS:
        return unpacked(words, BITS[coding]).astype(np.float64)
    if coding == "int8":
        return words.astype(np.float64)
    if coding == "float8":
        return FLOAT8[bytes_of(words)]
    return FLOAT4[unpacked(words, 4)]


def numbers(values: Array, dtype: str) -> Float64:
    """Of scales and biases in one of BF16, F16, F32, F8_E4M3, F8_E8M0."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if dtype == "F8_E4M3":
        return FLOAT8[values.astype(np.uint8)]
    if dtype == "F8_E8M0":
        return E8M0[values.astype(np.uint8)]
    return values.astype(np.float64)
