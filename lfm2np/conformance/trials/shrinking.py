"""How long a failing example is made smaller, so that an engine that fails everything is told so in bounded time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hypothesis.internal.conjecture import engine
from hypothesis.reporting import with_reporter

SECONDS = {"quick": 5, "ci": 30, "deep": 300}  # by profile; 300 is Hypothesis's own bound, for which it has no setting


@contextlib.contextmanager
def bounded_shrinking(profile: str) -> Iterator[list[str]]:
    """Within it, Hypothesis shrinks for so many seconds. Yields a list that gets a line each time it stopped early."""
    before, stopped = engine.MAX_SHRINKING_SECONDS, list[str]()

    def report(text: object) -> None:
        if "five minutes" in str(text):  # its own words for that bound
            stopped.append(f"shrunk for {SECONDS[profile]} s: there may be smaller examples")
        else:
            print(text)

    engine.MAX_SHRINKING_SECONDS = SECONDS[profile]
    try:
        with with_reporter(report):
            yield stopped
    finally:
        engine.MAX_SHRINKING_SECONDS = before
