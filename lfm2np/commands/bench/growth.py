"""What grows with the context: the time of a decode step, and the memory of reading a long prompt."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lfm2np.commands.bench.measure import Turns
from lfm2np.commands.bench.sides.cells import DECODE, Cell
from lfm2np.commands.bench.sides.engine_side import STEP_TOKENS
from lfm2np.commands.bench.sides.side_process import SideProcess
from lfm2np.commands.bench.table import columns
from lfm2np.values import Progress

CONTEXTS = (128, 384, 768, 1024, 1536, 2048, 3072, 4096)
REQUESTS = (1, 16)
STEPS = 3
PROMPTS = (2048, 4096, 8192)  # tokens
MOST_OVER_FIT = 1.2
MOST_PREFILL_BYTES = 2**30  # beyond weights and cache, whatever the prompt's length


@dataclass(frozen=True)
class Line:
    """Steps of so many requests: seconds by context of a request, and the straight line through their medians."""

    requests: int
    contexts: list[int]
    seconds: list[list[float]]  # of each context, of every step
    base_seconds: float
    seconds_per_token: float  # of the total context

    def fit(self, context: int) -> float:
        return self.base_seconds + self.seconds_per_token * self.requests * context

    def over_fit(self) -> list[float]:
        """Of each context, the median of its steps divided by the line."""
        return [
            statistics.median(times) / self.fit(context)
            for context, times in zip(self.contexts, self.seconds, strict=True)
        ]


@dataclass(frozen=True)
class PrefillMemory:
    length: int
    bytes: int  # beyond what was held before
    cache_bytes: int  # of them, keys, values and states of the prompt

    @property
    def beyond_cache(self) -> int:
        return max(0, self.bytes - self.cache_bytes)


@dataclass(frozen=True)
class Growth:
    numerics: str
    lines: list[Line]
    prefills: list[PrefillMemory]


def fit_line(requests: int, contexts: Sequence[int], seconds: Sequence[Sequence[float]]) -> Line:
    totals = [requests * context for context in contexts]
    medians = [statistics.median(times) for times in seconds]
    slope, base = np.polyfit(totals, medians, 1)
    return Line(requests, list(contexts), [list(times) for times in seconds], float(base), float(slope))


def measure_growth(
    directory: Path,
    numerics: str,
    rounds: int,
    threads: int,
    show: Progress,
    contexts: Sequence[int] = CONTEXTS,
    prompts: Sequence[int] = PROMPTS,
) -> Growth:
    turns = Turns(rounds * len(REQUESTS) * len(contexts) + len(prompts), show)
    with SideProcess(numerics, directory, threads) as side:
        side.ask("load")
        seconds: dict[tuple[int, int], list[float]] = {}
        for _ in range(rounds):
            for requests in REQUESTS:
                for context in contexts:
                    steps = side.ask("time", cell=Cell(DECODE, requests, context).name, steps=STEPS)["steps"]
                    seconds.setdefault((requests, context), []).extend(step["seconds"] for step in steps)
                    turns.next()
    prefills = []
    for length in prompts:
        # In a process of its own: what an earlier prompt left free there would be taken again unseen.
        with SideProcess(numerics, directory, threads) as side:
            side.ask("load")
            said = side.ask("prefill_memory", length=length)
        prefills.append(PrefillMemory(length, said["bytes"], said["cache_bytes"]))
        turns.next()
    lines = [fit_line(count, contexts, [seconds[count, context] for context in contexts]) for count in REQUESTS]
    return Growth(numerics, lines, prefills)


def as_json(measured: Growth) -> dict[str, Any]:
    return {
        "numerics": measured.numerics,
        "decode": [
            {**asdict(line), "over_fit": line.over_fit(), "most_over_fit": MOST_OVER_FIT} for line in measured.lines
        ],
        "prefill": [
            {
                **asdict(prefill),
                "bytes_beyond_cache": prefill.beyond_cache,
                "most_bytes_beyond_cache": MOST_PREFILL_BYTES,
            }
            for prefill in measured.prefills
        ],
    }


def as_text(measured: Growth) -> str:
    parts = []
    for line in measured.lines:
        rows = [["context of each", *map(str, line.contexts)]]
        rows.append(["ms a step", *(f"{1000 * statistics.median(times):.1f}" for times in line.seconds)])
        rows.append(["over the line", *(f"{share:.2f}" for share in line.over_fit())])
        straight = f"{1000 * line.base_seconds:.1f} ms and {1e6 * line.seconds_per_token:.2f} us a token of context"
        worst = f"at worst {max(line.over_fit()):.2f} times the line, at most {MOST_OVER_FIT} wanted"
        parts += [f"{measured.numerics}: decode of {line.requests}: {straight}; {worst}", columns(rows)]
    rows = [["prompt, tokens", *(str(prefill.length) for prefill in measured.prefills)]]
    rows.append(["cache, MB", *(f"{prefill.cache_bytes / 1e6:.0f}" for prefill in measured.prefills)])
    rows.append(["beyond it, MB", *(f"{prefill.beyond_cache / 1e6:.0f}" for prefill in measured.prefills)])
    wanted = f"at most {MOST_PREFILL_BYTES / 1e6:.0f} MB wanted"
    parts += [f"{measured.numerics}: memory of prefill, {STEP_TOKENS} tokens a step; {wanted}", columns(rows)]
    return "\n".join(parts)
