"""Steps to the end; here and not in driver.py because an engine behind the protocol needs no Hypothesis for it."""

from __future__ import annotations

from typing import Any

from lfm2np.oracle.engines.records import Answer


class Violation(AssertionError):
    """An engine broke a property: what, where, first."""


def drain(engine: Any, most: int = 5000) -> dict[str, list[Answer]]:
    """Steps to the end, what came last of each request; Violation after that many: far more than any scenario takes."""
    completions: dict[str, list[Answer]] = {}
    for _ in range(most):
        if not engine.has_unfinished:
            return completions
        completions.update(engine.step())
    raise Violation(f"no progress: not finished after {most} steps")
