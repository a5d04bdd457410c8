"""How a property of this package's own parts is written: a decorator of its check, which takes an example only.

And how a check compares what it found with what it expected.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hypothesis.strategies import SearchStrategy

from lfm2np.suite.properties.property import Property
from lfm2np.suite.strategies.lengths import at_lengths

Check = Callable[[Any], None]


def internal(
    property_id: str,
    sentence: str,
    law: int,
    strategy: Callable[..., SearchStrategy[Any]],
    weight: float = 1.0,
    at_length: bool = False,
    bugs: tuple[str, ...] = (),
) -> Callable[[Check], Check]:
    """The arguments are Property's fields; the check stays a function, and raises for an example that is wrong.

    `strategy` takes lengths only with `at_length`.
    """

    def noted(check: Check) -> Check:
        run = lambda factory, example: check(example)  # noqa: E731
        drawn = at_lengths(strategy) if at_length else lambda lengths: strategy()
        check.prop = Property(property_id, sentence, law, (), bugs, drawn, run, weight)
        return check

    return noted


def properties_of(module: ModuleType) -> list[Property]:
    """Those that a module defines, in their order."""
    checks = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    return [check.prop for check in checks if hasattr(check, "prop")]


def require(actual: object, expected: object, what: str, who: object) -> None:
    if actual != expected:
        raise AssertionError(f"{who}: {what} {actual}, expected {expected}")


def require_at_most(actual: int, most: int, what: str, who: object) -> None:
    if actual > most:
        raise AssertionError(f"{who}: {what} {actual}, expected at most {most}")
