"""Grids of powers of two, and sums on them that are exact: what the proof of exact.py stands on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lfm2np.errors import NumericsError
from lfm2np.truth.integers import EXACT_TERMS, TERM_BITS
from lfm2np.truth.integers import SUM_BITS as SUM_BITS
from lfm2np.truth.integers import TERMS as TERMS

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Exponents = NDArray[np.int32]


def exponent_of(x: Float32 | Float64, signed: bool = True) -> Exponents:
    """The least e of each row [..., 1] with |x| < 2**e over the last axis; -200 for a row of zeros.

    Where it is known that none is negative (not `signed`), the largest is found in one pass.
    """
    largest = x.max(-1, keepdims=True).astype(np.float64)
    if signed:
        np.maximum(largest, -x.min(-1, keepdims=True), out=largest)
    return np.where(largest == 0.0, np.int32(-200), np.frexp(largest)[1])


def power_of_two(exponents: Exponents) -> Float64:
    """2**exponents. To multiply by it is to ldexp: both round just once, and only to a subnormal result."""
    return np.asarray(np.ldexp(1.0, exponents))


def to_units(x: Float32 | Float64, shift: Exponents) -> Float64:
    """The integers nearest to x * 2**shift, ties to even."""
    units: Float64 = x * power_of_two(shift)
    return np.rint(units, out=units)


def round_to_grid(x: Float32 | Float64, bits: int) -> Float64:
    """Each row (last axis) in steps of 2**-bits of its own power of two; ties to even."""
    shift = bits - exponent_of(x)
    units = to_units(x, shift)
    units *= power_of_two(-shift)
    return units


def exact_sum(x: Float64, signed: bool = True) -> Float64:
    """Sum over the last axis of at most 2**18 terms in any order; off by less than 2**-51 of sum|x|.

    Each term is split into high + low, multiples of 2**-36 and of 2**-72 of the row's power of two: at most 2**36 and
    2**35 units. The low ones sum to at most 2**53, exactly; `sum_units` rounds the sum of the high ones once, if at
    all, and adding the two rounds. Up to 2**17 terms the latter is the only rounding, less than 2**-52 of sum|x|.
    """
    if x.shape[-1] > TERMS:
        raise NumericsError(f"a sum of {x.shape[-1]} terms: at most {TERMS} can be added exactly")
    shift = TERM_BITS - exponent_of(x, signed)
    low: Float64 = x * power_of_two(shift)
    high = np.rint(low)
    low -= high
    low *= 2.0**TERM_BITS
    np.rint(low, out=low)
    total = sum_units(high) + np.ldexp(low.sum(-1, keepdims=True), -TERM_BITS)
    return np.asarray(np.ldexp(total, -shift)[..., 0])


def sum_units(units: Float64) -> Float64:
    """Sums [..., 1] over the last axis of at most 2**18 integers of at most 2**36 in size, each sum rounded once.

    Up to 2**17 of them sum to at most 2**53, in any order. More are split into multiples of 2**18 and what is left:
    at most 2**18 and 2**17 in size, so both sums are exact in any order, and only adding the two rounds.
    """
    if units.shape[-1] <= EXACT_TERMS:
        return np.asarray(units.sum(-1, keepdims=True))
    high = np.rint(units * 2.0**-18)
    low = units - high * 2.0**18
    return np.asarray(high.sum(-1, keepdims=True) * 2.0**18 + low.sum(-1, keepdims=True))


def sum_exponent(x: Float64) -> Exponents:
    """An e [..., 1] for each row of non-negative terms, not all zero: its sum, on exact_sum's grid, is below 2**e."""
    shift = TERM_BITS - exponent_of(x, signed=False)
    return np.asarray(np.frexp(sum_units(to_units(x, shift)))[1] - shift)
