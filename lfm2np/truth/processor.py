"""Asks the processor whether it computes as integers.py assumes; products/exactness.py asks the BLAS."""

from __future__ import annotations

import numpy as np

from lfm2np.errors import NumericsError

LANES = 64  # elements: enough for vector code, not only for its scalar tail


def require_ieee() -> None:
    """NumericsError unless +, *, / round as IEEE 754 says in this thread; microseconds, so every forward pass may ask.

    A library compiled with -ffast-math switches subnormals off in the thread that loads it, and those it starts later;
    some 32-bit processors round twice, or divide by an approximation.
    """
    subnormal = np.full(LANES, 512, np.uint32).view(np.float32)  # by its bits: a conversion would flush it as well
    if not ((subnormal * np.float32(0.5)).view(np.uint32) == 256).all():
        raise NumericsError("this thread flushes subnormal numbers to zero (a library compiled with -ffast-math?)")
    ties = np.repeat([2.0**53, 2.0**53 + 2.0, 1.0], LANES) + np.repeat([1.0, 1.0, 2.0**-53 + 2.0**-78], LANES)
    if not (ties == np.repeat([2.0**53, 2.0**53 + 4.0, 1.0 + 2.0**-52], LANES)).all():
        raise NumericsError("this process does not round float64 once, to nearest, ties to even")
    numerators, denominators = (np.arange(start, start + LANES, dtype=np.float32) for start in (1, 7))
    wide = numerators.astype(np.float64) / denominators.astype(np.float64)
    if not (numerators / denominators == wide.astype(np.float32)).all():
        raise NumericsError("this process does not round float32 quotients correctly")
