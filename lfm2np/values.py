"""Values from outside, shown in a message and checked (counts, sizes, seeds); and callbacks that report progress."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

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


def plain_number(value: Any) -> Any:
    """NumPy's scalar as Python's, for code that knows no NumPy; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


class _JsonRepr(reprlib.Repr):
    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"


_REPR, _JSON_REPR = reprlib.Repr(), _JsonRepr()
for _each in (_REPR, _JSON_REPR):
    _each.maxstring = _each.maxother = 80


def show(value: object, spelling: reprlib.Repr = _REPR) -> str:
    """repr, shortened, for a message; an integer too long for Python to print is named as such."""
    try:
        return spelling.repr(value)
    except ValueError:
        return "an integer of thousands of digits"


def show_json(value: object) -> str:
    """As show, of a value from JSON: with its true, false and null."""
    return show(value, _JSON_REPR)


def plain(name: str) -> str:
    """A name from a file as it stands, unless it is too long or odd for one line of a message."""
    return name if name.isprintable() and len(name) <= 120 else show(name)


def same(left: object, right: object) -> bool:
    """Equality in which true is not 1."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right and not is_nan(left)


def is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


# --- progress


Progress = Callable[[int, int], None]  # units done, units in all
ProgressOf = Callable[[str, int, int], None]  # what is being done, then the same
