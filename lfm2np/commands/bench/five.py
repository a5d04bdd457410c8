"""Five prompts in four ways: what the cache, the batch and the absence of padding each gain.

without-cache   one after another, the whole sequence computed anew for each token
one-by-one      one after another, with the cache
padded          together, as a rectangle: from the longest prompt to the longest answer
continuous      together, each as long as it is

Without a cache, 1,024 new tokens take most of an hour. So passes of a few evenly spaced lengths are timed, and the
others taken from the straight lines between them; `whole` times every pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lfm2np.commands.bench.measure import Turns
from lfm2np.commands.bench.sides.filled_engines import (
    CONTINUOUS,
    ONE_BY_ONE,
    PADDED,
    WAYS,
    WITHOUT_CACHE,
    answer_lengths,
    recomputed_lengths,
)
from lfm2np.commands.bench.sides.side_process import SideProcess
from lfm2np.commands.bench.table import columns
from lfm2np.values import Progress

SAMPLED_LENGTHS = 8
CAUSES = {"cache": (WITHOUT_CACHE, ONE_BY_ONE), "batch": (ONE_BY_ONE, PADDED), "no padding": (PADDED, CONTINUOUS)}
TARGETS = {256: 16.0, 1024: 40.0}  # gain of the last way over the first, by the longest answer


@dataclass
class Five:
    """Of one arithmetic and one longest answer: the seconds of each round, by way."""

    numerics: str
    longest: int
    sampled: list[int]  # lengths of the passes without a cache; empty: all were timed
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(answer_lengths(self.longest))

    def median(self, way: str) -> float:
        return statistics.median(self.seconds[way])

    def gain(self, before: str, after: str) -> list[float]:
        """Of each round, how many times faster a way is than another."""
        return [first / then for first, then in zip(self.seconds[before], self.seconds[after], strict=True)]


def measure_five(
    directory: Path, numerics: str, longest: int, rounds: int, threads: int, whole: bool, show: Progress
) -> Five:
    lengths = recomputed_lengths(longest)
    sampled = [] if whole else sampled_lengths(lengths)
    measured = Five(numerics, longest, sampled)
    turns = Turns(rounds * (len(WAYS) - 1 + max(1, len(sampled))), show)
    with SideProcess(numerics, directory, threads) as side:
        side.ask("load")
        for _ in range(rounds):
            for way in WAYS:
                if way == WITHOUT_CACHE and sampled:
                    times = []
                    for length in sampled:
                        times.append(side.ask("time", cell=f"prefill-{length}", steps=1)["steps"][0]["seconds"])
                        turns.next()
                    seconds = integral(lengths, sampled, times)
                else:
                    seconds = side.ask("answer", way=way, longest=longest)["seconds"]
                    turns.next()
                measured.seconds.setdefault(way, []).append(seconds)
    return measured


def sampled_lengths(lengths: Sequence[int]) -> list[int]:
    """Evenly spaced, with both ends; all of them where they are few."""
    spaced = np.linspace(min(lengths), max(lengths), min(SAMPLED_LENGTHS, len(set(lengths))))
    return sorted({round(float(length)) for length in spaced})


def integral(lengths: Sequence[int], sampled: Sequence[int], times: Sequence[float]) -> float:
    """Seconds of passes of all `lengths`, on the straight lines between those of the sampled ones."""
    return float(np.interp(lengths, sampled, times).sum())


def as_json(measured: Five) -> dict[str, Any]:
    total = measured.gain(WITHOUT_CACHE, CONTINUOUS)
    return {
        "numerics": measured.numerics,
        "longest_answer": measured.longest,
        "tokens": measured.tokens,
        "integrated_from_lengths": measured.sampled or None,
        "seconds": measured.seconds,
        "tokens_per_second": {way: measured.tokens / measured.median(way) for way in WAYS},
        "gain": statistics.median(total),
        "gain_of_rounds": total,
        "target": TARGETS.get(measured.longest),
        "causes": {cause: statistics.median(measured.gain(*ways)) for cause, ways in CAUSES.items()},
    }


def as_text(measured: Five) -> str:
    rows = [[measured.numerics, "seconds", "tokens/s", "gain"]]
    for way in WAYS:
        seconds, gain = measured.median(way), statistics.median(measured.gain(WITHOUT_CACHE, way))
        rows.append([way, f"{seconds:.1f}", f"{measured.tokens / seconds:.1f}", f"{gain:.1f}"])
    total = measured.gain(WITHOUT_CACHE, CONTINUOUS)
    causes = " x ".join(f"{cause} {statistics.median(measured.gain(*ways)):.2f}" for cause, ways in CAUSES.items())
    line = f"gain {statistics.median(total):.1f} = {causes}"
    if len(total) > 1:
        line += f"; {min(total):.1f} to {max(total):.1f} in {len(total)} rounds"
    if measured.longest in TARGETS:
        line += f"; target {TARGETS[measured.longest]:g}"
    lines = [f"five prompts, {measured.tokens} new tokens, at most {measured.longest} each", columns(rows), line]
    if measured.sampled:
        shown = ", ".join(map(str, measured.sampled))
        lines.append(f"without-cache is integrated from passes of {shown} tokens, not run as a whole")
    return "\n".join(lines)
