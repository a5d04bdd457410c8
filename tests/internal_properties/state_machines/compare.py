"""How the books compare what they found with what they expected."""

from __future__ import annotations

from collections.abc import Sequence


def require(found: object, expected: object, what: str, who: object) -> None:
    if found != expected:
        raise AssertionError(f"{who}: {what} {found}, expected {expected}")


def require_at_most(found: int, most: int, what: str, who: object) -> None:
    if found > most:
        raise AssertionError(f"{who}: {what} {found}, expected at most {most}")


def require_cells(found: Sequence[object], expected: Sequence[object], what: str, who: object) -> None:
    """Names the first position that differs."""
    if found != expected:
        for place, (one, other) in enumerate(zip(found, expected, strict=False)):
            require(one, other, f"{what}, cell {place}:", who)
        require(len(found), len(expected), f"{what}: number of cells", who)
