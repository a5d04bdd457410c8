"""One fault or variant in a process of its own, which prints one JSON object.

    python -m lfm2np.conformance.fault_trial NAME PROFILE

A fault is first tried with few examples of every property, then with those of the profile, until one catches it. A
variant goes through the whole suite.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hypothesis.internal.conjecture import engine as hypothesis_engine

from lfm2np.conformance.adapters import own
from lfm2np.conformance.catalogue import ALL
from lfm2np.conformance.runner import Result, run_property
from lfm2np.faults import Fault, by_name, inject

MOST_SECONDS_OF_SHRINKING = 20  # Hypothesis takes up to 300; a table of sizes need not show the very least


def try_fault(fault: Fault, profile: str) -> dict[str, Any]:
    """Which property catches it first."""
    with inject(fault):
        for name in dict.fromkeys(("quick", profile)):
            for prop in ALL:
                result = run_property(prop, own, name)
                if result.status == "failed":
                    return found(result, name)
    return {"caught": False}


def try_variant(name: str, profile: str) -> dict[str, Any]:
    """Whether anything flags it."""
    variant = by_name(name)
    assert not isinstance(variant, Fault)

    def factory(model: str, sizes: dict[str, Any]) -> Any:
        return own(model, {**sizes, **variant.sizes})

    examples = 0
    with inject(variant):
        for prop in ALL:
            result = run_property(prop, factory, profile)
            examples += result.examples
            if result.status == "failed":
                return found(result, profile)
    return {"caught": False, "examples": examples}


def found(result: Result, profile: str) -> dict[str, Any]:
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
