"""One fault or variant in a process of its own, which prints one JSON object: python -m faults.trial NAME [PROFILE]

A fault meets few examples of the likeliest properties, then those of the profile, then so all others, until one catches
it; that property has to hold without the fault, or its failure is no catch. A variant goes through all properties that
other engines have, too: those of our own parts may ask for more than the right answers. Run it in tests/.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from internal_properties.catalogue import EVERYTHING

from faults import Fault, Variant, by_name, inject
from lfm2np.suite.adapters import load_once, own
from lfm2np.suite.catalogue import ALL
from lfm2np.suite.properties.driver import of_drawn, of_trained
from lfm2np.suite.properties.property import Property
from lfm2np.suite.properties.rounding import known_of
from lfm2np.suite.runner import Result, run_property
from lfm2np.suite.strategies.tiny_models import loaded

FIRST = {  # by section: what sees its faults soonest
    "A": ("equals-reference", "every-schedule"),
    "B": ("scheduler-machine", "every-schedule", "prefix-hits", "drafts-are-counted"),
    "C": ("scheduler-machine", "every-schedule", "refusals"),
    "D": (
        "one-bos",
        "rejection-is-exact",
        "text-is-what-the-tokens-say",
        "speculative-is-plain",
        "sampling-is-its-definition",
        "any-noise",
        "equals-reference",
    ),
    "E": ("is-lfm2", "equals-reference", "attention-in-pieces"),
}
COMPUTED = (load_once, loaded, of_drawn, of_trained, known_of)  # what the process keeps may be of a faulty reference


def try_fault(fault: Fault, properties: Sequence[Property], profile: str = "quick") -> dict[str, Any]:
    """Whether one of the properties catches the fault, and which is the first that does. Examples are not shrunk."""
    forget()
    try:
        with inject(fault):
            failure = first_failure(properties, profile, FIRST[fault.section])
    finally:
        forget()
    if failure is None:
        return {"name": fault.name, "caught": False, "by": ""}
    prop, result, name = failure
    if run_property(prop, own, name, shrink=False).status == "failed":
        return {"name": fault.name, "caught": False, "by": f"{prop.id}, which fails without it, too"}
    return {"name": fault.name, "caught": True, "profile": name, **caught_by(result)}


def first_failure(
    properties: Sequence[Property], profile: str, likeliest: Sequence[str] = ()
) -> tuple[Property, Result, str] | None:
    """The first property to fail, and under which profile: quick, then this one; all others after the likeliest."""
    by_id = {prop.id: prop for prop in properties}
    first = [by_id.pop(name) for name in likeliest if name in by_id]
    for group in (first, by_id.values()):
        for name in dict.fromkeys(("quick", profile)):
            for prop in group:
                result = run_property(prop, own, name, shrink=False)
                if result.status == "failed":
                    return prop, result, name
    return None


def try_variant(variant: Variant, properties: Sequence[Property], profile: str) -> dict[str, Any]:
    def factory(model: str, sizes: dict[str, Any]) -> Any:
        return own(model, {**sizes, **variant.sizes})

    with inject(variant):
        for prop in properties:
            result = run_property(prop, factory, profile, shrink=False)
            if result.status == "failed":
                return {"name": variant.name, "caught": True, **caught_by(result)}
    return {"name": variant.name, "caught": False, "by": ""}


def caught_by(result: Result) -> dict[str, Any]:
    return {"by": result.id, "examples": result.examples, "message": result.message}


def forget() -> None:
    for cached in COMPUTED:
        cached.cache_clear()


def main(name: str, profile: str = "ci") -> None:
    chosen = by_name(name)
    if isinstance(chosen, Variant):
        attempt = try_variant(chosen, ALL, profile)
    else:
        attempt = try_fault(chosen, EVERYTHING, profile)
    print(json.dumps(attempt))


if __name__ == "__main__":
    main(*sys.argv[1:])
