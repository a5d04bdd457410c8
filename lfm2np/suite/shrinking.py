"""How long a failing example is shrunk: what fails everything is to be reported in bounded time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hypothesis.internal.conjecture import engine as conjecture
from hypothesis.reporting import with_reporter

MOST_SECONDS = {"quick": 60, "ci": 120, "deep": 300}  # of a property; 300 is Hypothesis's own bound: it has no setting
SECONDS_OF_ALL = {"quick": 120, "ci": 600, "deep": 10**6}  # of the suite, until each of the rest gets LEAST_SECONDS
LEAST_SECONDS = 5


def seconds_left(profile: str, spent: float) -> int:
    """For a property, after others that failed took so many seconds."""
    return max(LEAST_SECONDS, min(MOST_SECONDS[profile], int(SECONDS_OF_ALL[profile] - spent)))


@contextlib.contextmanager
def bounded_shrinking(seconds: int) -> Iterator[list[str]]:
    """Within it, Hypothesis shrinks for so many seconds. Yields a list that gets a line each time it stopped early."""
    before, stopped = conjecture.MAX_SHRINKING_SECONDS, list[str]()

    def report(text: object) -> None:
        if "five minutes" in str(text):  # its own words for that bound
            stopped.append(f"shrunk for {seconds} s: there may be smaller examples")
        else:
            print(text)

    conjecture.MAX_SHRINKING_SECONDS = min(before, seconds)
    try:
        with with_reporter(report):
            yield stopped
    finally:
        conjecture.MAX_SHRINKING_SECONDS = before
