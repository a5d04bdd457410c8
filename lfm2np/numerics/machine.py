"""Checks that this process computes as the proofs in exact.py assume."""

from __future__ import annotations

import numpy as np

from lfm2np.errors import NumericsError

LANES = 64  # elements: enough for vector code, not only for its scalar tail


def require_ieee() -> None:
    """NumericsError unless +, *, / round as IEEE 754 says; microseconds, so every forward pass may ask.

    A library compiled with -ffast-math switches subnormals off in every process that loads it; some 32-bit processors
    round twice, or divide by an approximation.
    """
    subnormal = np.full(LANES, 512, np.uint32).view(np.float32)  # by its bits: a conversion would flush it as well
    if not ((subnormal * np.float32(0.5)).view(np.uint32) == 256).all():
        raise NumericsError("this process flushes subnormal numbers to zero (a library compiled with -ffast-math?)")
    ties = np.repeat([2.0**53, 2.0**53 + 2.0, 1.0], LANES) + np.repeat([1.0, 1.0, 2.0**-53 + 2.0**-78], LANES)
    if not (ties == np.repeat([2.0**53, 2.0**53 + 4.0, 1.0 + 2.0**-52], LANES)).all():
        raise NumericsError("this process does not round float64 once, to nearest, ties to even")
    numerators, denominators = (np.arange(start, start + LANES, dtype=np.float32) for start in (1, 7))
    wide = numerators.astype(np.float64) / denominators.astype(np.float64)
    if not (numerators / denominators == wide.astype(np.float32)).all():
        raise NumericsError("this process does not round float32 quotients correctly")


def require_exact_product() -> None:
    """NumericsError if float64 matmul is not exact up to 2**53 (reduced precision, a fast algorithm); milliseconds.

    The second factor has rank one, so that integers give the same product by one column of sums.
    """
    size = 512
    x = (np.arange(size * size, dtype=np.int64).reshape(size, size) * 48271) % 2**22 - 2**21
    column = (np.arange(size, dtype=np.int64) * 69621) % 2**22 - 2**21
    row = np.arange(size, dtype=np.int64) % 4 + 1
    product = x.astype(np.float64) @ np.outer(column, row).astype(np.float64)
    if not np.array_equal(product, np.outer((x * column).sum(axis=1), row).astype(np.float64)):
        raise NumericsError("this NumPy's float64 matrix product is not exact on integers below 2**53")
