"""What a property is, and what it raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lfm2np.oracle.engines.protocol import Factory

if TYPE_CHECKING:  # commands that draw nothing start without Hypothesis
    from hypothesis.strategies import SearchStrategy

    from lfm2np.suite.strategies.lengths import Lengths


class Violation(AssertionError):
    """An engine broke a property: what, where, first."""


@dataclass(frozen=True)
class Property:
    """A statement about an engine, tried with many examples. `check` raises for an example that breaks it.

    law    of the design: 1 order cannot matter; 2 one truth, reference.py; 3 a batch is one flat array; 4 the plan is
           plain data; 5 publish after write, write only what one owns; 7 fail early, and harm no one else
    needs  levels of the protocol
    bugs   real ones that it would have caught
    weight the number of examples, relative to the profile's
    strategy gives examples, for an engine with blocks, chunks and contexts of these lengths
    """

    id: str
    sentence: str
    law: int
    needs: tuple[str, ...]
    bugs: tuple[str, ...]
    strategy: Callable[[Lengths], SearchStrategy[Any]]
    check: Callable[[Factory, Any], None]
    weight: float = 1.0
