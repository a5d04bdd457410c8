"""Shape notes that are checked: one letter a dimension, the same letter the same size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.errors import NumericsError


def check(arrays: dict[str, tuple[NDArray[Any], str]], **sizes: int) -> dict[str, int]:
    """The size of every letter in `{"keys": (keys, "CGE"), ...}`; `sizes` are known beforehand.

    NumericsError names the array, its shape and the letter that has another size elsewhere.
    """
    for name, (array, letters) in arrays.items():
        expected = f"{name}: shape {array.shape}, expected [{', '.join(letters)}]"
        if array.ndim != len(letters):
            raise NumericsError(expected)
        for letter, size in zip(letters, array.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise NumericsError(f"{expected} with {letter} = {sizes[letter]}")
    return sizes


def check_attention(queries: NDArray[Any], keys: NDArray[Any], values: NDArray[Any]) -> dict[str, int]:
    """The sizes T, H, E, C, G; NumericsError unless T <= C, G divides H, and every operand is finite.

    An infinity must stop here: times the zero weight of a hidden position it would be NaN in rows before its own.
    """
    sizes = check({"queries": (queries, "THE"), "keys": (keys, "CGE"), "values": (values, "CGE")})
    if sizes["T"] > sizes["C"] or sizes["H"] % sizes["G"]:
        raise NumericsError(f"attention of sizes {sizes}: expected T <= C and H a multiple of G")
    require_finite_rows(queries=queries, keys=keys, values=values)
    return sizes


def require_context(positions: int, most: int) -> None:
    if positions > most:
        raise NumericsError(f"attention: {positions} positions, expected at most {most} in this arithmetic")


def require_finite_rows(**operands: NDArray[Any]) -> None:
    """NumericsError unless every operand [rows, heads, channels] of attention is finite."""
    for name, operand in operands.items():
        if not np.isfinite(operand).all():
            row, head, channel = np.argwhere(~np.isfinite(operand))[0]
            value = operand[row, head, channel]
            raise NumericsError(f"attention: {name}[{row}, {head}, {channel}] is {value}, expected finite numbers")
