"""How the books compare what they found with what they expected."""

from __future__ import annotations

from collections.abc import Sequence


def require(actual: object, expected: object, what: str, who: object) -> None:
    if actual != expected:
        raise AssertionError(f"{who}: {what} {actual}, expected {expected}")


def require_at_most(actual: int, most: int, what: str, who: object) -> None:
    if actual > most:
        raise AssertionError(f"{who}: {what} {actual}, expected at most {most}")


def require_cells(cells: Sequence[object], expected: Sequence[object], what: str, who: object) -> None:
    """Names the first position that differs."""
    if cells != expected:
        for place, (actual, other) in enumerate(zip(cells, expected, strict=False)):
            require(actual, other, f"{what}, cell {place}:", who)
        require(len(cells), len(expected), f"{what}: number of cells", who)
