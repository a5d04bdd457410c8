"""A check, in microseconds, that this process computes as the proofs in exact.py assume."""

from __future__ import annotations

import numpy as np

from lfm2np.errors import NumericsError


def require_ieee() -> None:
    """NumericsError if float64 does not round to nearest even, flushes subnormals, or matmul is not exact.

    Some libraries, loaded into the same process, switch subnormals off; a matrix product in reduced precision or
    by a fast algorithm would break the bound of 2**53.
    """
    tiny = np.array([np.finfo(np.float32).smallest_subnormal])
    if not (tiny * np.float32(1.0) > 0.0).all():
        raise NumericsError("this process flushes subnormal numbers to zero (a library compiled with -ffast-math?)")
    halves = np.array([2.0**53, 2.0**53 + 2.0]) + 1.0
    if halves.tolist() != [2.0**53, 2.0**53 + 4.0]:
        raise NumericsError("this process does not round float64 to nearest, ties to even")
    size = 64
    x = (np.arange(size * size, dtype=np.int64).reshape(size, size) * 48271 % 2**22) - 2**21
    w = (x * 69621 % 2**24) - 2**23
    if not np.array_equal(x.astype(np.float64) @ w.astype(np.float64).T, (x @ w.T).astype(np.float64)):
        raise NumericsError("this NumPy's float64 matrix product is not exact on integers below 2**53")
