"""Which of several ways to compute the same is the fastest on this machine: found while they are used.

Only for what has the same bits in every way, as exact products have, since the choice hangs on the clock.
LFM2NP_FASTEST=0 turns it off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

TRIES = 3  # of each way, whose best time counts
ENOUGH, HOPELESS = 2, 2.0  # a way whose best of so many took so many times the least is left; one try may be disturbed


def is_wanted(environment: Mapping[str, str]) -> bool:
    return environment.get("LFM2NP_FASTEST") != "0"


Seconds = dict[str, list[float]]  # of each way, one number per try
Key = tuple[int, ...]
MEASURED = is_wanted(os.environ)
found: dict[Key, Seconds] = {}  # of this process, whose machine it is; threads that overlap may each try once more


def fastest(key: Key, ways: Mapping[str, Callable[[], None]], likely: str) -> None:
    """Calls one of the ways: each a few times in turn at first, then the one that took the least time.

    key     what their times depend on
    likely  the one that is tried first, and the one where nothing is measured
    """
    if not MEASURED:
        ways[likely]()
        return
    seconds = found.setdefault(key, {likely: [], **{name: [] for name in ways}})
    name = next_way(seconds)
    began = time.perf_counter()
    ways[name]()
    if len(seconds[name]) < TRIES:
        seconds[name].append(time.perf_counter() - began)


def next_way(seconds: Seconds) -> str:
    """The one of fewest tries while some are to be tried, the first of several; then the one of the least time."""
    least = min((min(times) for times in seconds.values() if times), default=0.0)
    to_try = [
        name
        for name, times in seconds.items()
        if len(times) < ENOUGH or (len(times) < TRIES and min(times) <= HOPELESS * least)
    ]
    if to_try:
        return min(to_try, key=lambda name: len(seconds[name]))
    return min(seconds, key=lambda name: min(seconds[name]))


def about(count: int) -> int:
    """Counts that share a key: up to 8 each by itself, then all up to the next power of two."""
    return count if count <= 8 else 1 << (count - 1).bit_length()
