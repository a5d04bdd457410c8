"""One fault or variant in a process of its own, which prints one JSON object.

    python -m lfm2np.suite.fault_trial NAME PROFILE

A fault is first tried with few examples of every property, then with those of the profile, until one catches it; that
property has to hold without the fault, or its failure is no catch. A variant goes through the whole suite. In a
checkout the suite includes tests/engine/internal_properties.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from hypothesis.internal.conjecture import engine as hypothesis_engine

from lfm2np.suite.adapters import load_once, own
from lfm2np.suite.catalogue import ALL
from lfm2np.suite.faults import Fault, by_name, inject
from lfm2np.suite.properties.driver import of_drawn, of_given
from lfm2np.suite.properties.property import Machine, Property
from lfm2np.suite.properties.rounding import known_of
from lfm2np.suite.runner import Result, run_property
from lfm2np.suite.strategies.tiny_models import loaded

COMPUTED = (load_once, loaded, of_drawn, of_given, known_of)  # what the process keeps may be of a faulty reference
MOST_SECONDS_OF_SHRINKING = 20  # Hypothesis takes up to 300; a table of sizes need not show the very least


def suite() -> tuple[Property | Machine, ...]:
    """The properties of any engine; in a checkout also those of this package's own parts, which stand in tests/."""
    tests = Path(__file__).parents[2] / "tests" / "engine"
    if not (tests / "internal_properties").is_dir():
        return ALL
    sys.path.append(str(tests))
    everything: tuple[Property | Machine, ...] = importlib.import_module("internal_properties.catalogue").EVERYTHING
    return everything


def try_fault(fault: Fault, profile: str) -> dict[str, Any]:
    with inject(fault):
        failure = first_failure(profile)
    if failure is None:
        return {"caught": False}
    prop, result, name = failure
    for cached in COMPUTED:
        cached.cache_clear()
    if run_property(prop, own, name).status == "failed":
        return {"caught": False, "by": f"{prop.id}, which fails without it, too"}
    return caught_by(result, name)


def first_failure(profile: str) -> tuple[Property | Machine, Result, str] | None:
    """The first property to fail, and under which profile: quick, then this one."""
    properties = suite()
    for name in dict.fromkeys(("quick", profile)):
        for prop in properties:
            result = run_property(prop, own, name)
            if result.status == "failed":
                return prop, result, name
    return None


def try_variant(name: str, profile: str) -> dict[str, Any]:
    variant = by_name(name)
    assert not isinstance(variant, Fault)

    def factory(model: str, sizes: dict[str, Any]) -> Any:
        return own(model, {**sizes, **variant.sizes})

    examples, properties = 0, suite()
    with inject(variant):
        for prop in properties:
            result = run_property(prop, factory, profile)
            examples += result.examples
            if result.status == "failed":
                return caught_by(result, profile)
    return {"caught": False, "examples": examples}


def caught_by(result: Result, profile: str) -> dict[str, Any]:
    return {
        "caught": True,
        "by": result.id,
        "examples": result.examples,
        "size": result.size,
        "profile": profile,
        "message": result.message,
    }


def main(name: str, profile: str) -> None:
    hypothesis_engine.MAX_SHRINKING_SECONDS = MOST_SECONDS_OF_SHRINKING
    chosen = by_name(name)
    answer = try_fault(chosen, profile) if isinstance(chosen, Fault) else try_variant(name, profile)
    print(json.dumps({"name": name, **answer}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
