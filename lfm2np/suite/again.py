"""For the scripts that a failure prints: `check` and the names in an example."""

from __future__ import annotations

from typing import Any

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.engines.protocol import load_factory
from lfm2np.oracle.engines.records import Request
from lfm2np.suite.catalogue import by_id
from lfm2np.suite.properties.rounding import Rounding
from lfm2np.suite.strategies.scenarios import Scenario
from lfm2np.suite.strategies.tiny_models import Checkpoint, TinyModel

__all__ = ["Checkpoint", "Request", "SamplingParams", "Scenario", "TinyModel", "check"]


def check(property_id: str, engine: str, example: Any, number_format: str | None = None) -> None:
    """Tries one example of a property on an engine: Violation if it fails."""
    factory = load_factory(engine)
    by_id(property_id).check(factory if number_format is None else Rounding(factory, number_format), example)
