"""How a property of this package's own parts is written: as those of lfm2np.conformance, but without an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis.strategies import SearchStrategy

from lfm2np.conformance.properties.property import Property


def internal(
    property_id: str,
    sentence: str,
    law: int,
    strategy: Callable[..., SearchStrategy[Any]],
    check: Callable[[Any], None],
    weight: float = 1.0,
    at_length: bool = False,
    bugs: tuple[str, ...] = (),
) -> Property:
    """`check` raises for an example that breaks the property; the other fields are Property's."""
    return Property(
        property_id, sentence, law, (), bugs, strategy, lambda factory, example: check(example), weight, at_length
    )
