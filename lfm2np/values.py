"""Whole numbers that a caller gives: counts, sizes, seeds."""

from __future__ import annotations

import operator

import numpy as np

from lfm2np.checkpoint.config import show
from lfm2np.errors import RequestError


def require_count(name: str, value: object, least: int, most: int | None) -> int:
    """The integer, also NumPy's; RequestError unless it lies from `least` to `most`. True is not 1, 2.5 not 2."""
    try:
        count = None if isinstance(value, bool | np.bool_) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None or count < least or (most is not None and count > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise RequestError(f"{name} {show(value)}: expected a whole number, {bounds}")
    return count
