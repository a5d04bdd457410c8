"""The measured numbers as text and as plain objects; how much faster a side is than another, and ought to be.

A ratio is taken within each round, whose sides ran one right after another, so that a slow minute of the machine
touches both; then come the median and the extremes over the rounds.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.commands.bench.measure import CellTimes, Measured
from lfm2np.commands.bench.sides.cells import DECODE, PREFILL, Cell

BATCHED = 16  # requests: from here on, and in prefill, little but the products may cost


@dataclass(frozen=True)
class Ratio:
    """Time of `other` divided by the time of `side`; `targets` by kind of cell."""

    side: str
    other: str
    targets: Mapping[str, float]

    def target(self, cell: Cell) -> float | None:
        """The least that it should be; None without a target."""
        if self.other.startswith("floor") and cell.kind == DECODE and cell.requests < BATCHED:
            return None
        return self.targets[cell.kind]


RATIOS = (
    Ratio("exact", "transformers-float64", {DECODE: 1.3, PREFILL: 0.9}),
    Ratio("exact", "transformers-float32", {DECODE: 0.9, PREFILL: 0.6}),
    Ratio("exact", "floor-float64", {DECODE: 0.8, PREFILL: 0.8}),
    Ratio("float32", "transformers-float32", {DECODE: 1.5, PREFILL: 1.2}),
    Ratio("float32", "floor-float32", {DECODE: 0.85, PREFILL: 0.85}),
)


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float


def ratio_of(ratio: Ratio, seconds: Mapping[str, Sequence[float]]) -> Spread | None:
    """The ratio of one cell, from the seconds of each round by side; None where a side is missing."""
    if ratio.side not in seconds or ratio.other not in seconds:
        return None
    ratios = [other / side for side, other in zip(seconds[ratio.side], seconds[ratio.other], strict=True)]
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


SHORT = "!"  # stands at a ratio below its target


def as_json(measured: Measured) -> dict[str, Any]:
    sides = {
        side: {"load_seconds": seconds, "load_peak_bytes": measured.load_peak_bytes[side]}
        for side, seconds in measured.load_seconds.items()
    }
    return {"sides": sides, "cells": [cell_as_json(times) for times in measured.cells]}


def cell_as_json(times: CellTimes) -> dict[str, Any]:
    ratios = []
    for ratio in RATIOS:
        spread = ratio_of(ratio, times.seconds)
        if spread:
            target = ratio.target(times.cell)
            ratios.append({"side": ratio.side, "other": ratio.other, "target": target, **dataclasses.asdict(spread)})
    return {
        "cell": times.cell.name,
        **dataclasses.asdict(times.cell),
        "seconds": times.seconds,
        "parts": times.parts,
        "peak_bytes": times.peak_bytes,
        "ratios": ratios,
    }


def as_text(measured: Measured) -> str:
    sides = list(measured.load_seconds)
    rounds = len(next(iter(measured.cells[0].seconds.values())))
    parts = [
        f"milliseconds a step, median of {rounds} rounds (of a floor, in brackets: its linear products alone)",
        columns([["", *sides], *(time_row(times, sides) for times in measured.cells)]),
        "",
        *expert_lines(measured.cells),
        *ratio_lines(measured.cells),
        "",
        "seconds to load, and gigabytes of memory at its peak: while loading, and in each cell (mapped files included)",
        columns(memory_rows(measured, sides)),
    ]
    return "\n".join(parts)


def expert_lines(cells: Sequence[CellTimes]) -> list[str]:
    """Of a mixture: of how many experts a step of ours reads the weights."""
    rows = []
    for times in cells:
        counts = [count for parts in times.parts.values() for count in parts.get("experts", ())]
        if counts:
            rows.append([times.cell.name, f"{statistics.median(counts):.1f}"])
    return ["experts that a step touches, of each sparse layer on the average", columns(rows), ""] if rows else []


def time_row(times: CellTimes, sides: Sequence[str]) -> list[str]:
    row = [times.cell.name]
    for side in sides:
        shown = f"{1000 * statistics.median(times.seconds[side]):.1f}"
        if "linear" in times.parts.get(side, {}):
            shown += f" ({1000 * statistics.median(times.parts[side]['linear']):.1f})"
        row.append(shown)
    return row


def ratio_lines(cells: Sequence[CellTimes]) -> list[str]:
    """One row a cell, one column a ratio of which both sides were measured."""
    chosen = [ratio for ratio in RATIOS if ratio_of(ratio, cells[0].seconds)]
    if not chosen:
        return []
    heads = [[""], [""]]
    for ratio in chosen:
        heads[0].append(ratio.other)
        heads[1].append(f"/ {ratio.side}")
    rows = [
        [times.cell.name, *(ratio_text(ratio, times.cell, ratio_of(ratio, times.seconds)) for ratio in chosen)]
        for times in cells
    ]
    title = f"ratios of times: median, lowest and highest of the rounds, target ({SHORT}: below it)"
    return [title, columns([*heads, *rows])]


def ratio_text(ratio: Ratio, cell: Cell, spread: Spread | None) -> str:
    """ "1.42 (1.38-1.45) 1.3", the last being the target."""
    if spread is None:
        return "-"
    target = ratio.target(cell)
    goal = "" if target is None else f" {target:g}{SHORT if spread.median < target else ''}"
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f}){goal}"


def memory_rows(measured: Measured, sides: Sequence[str]) -> list[list[str]]:
    return [
        ["", *sides],
        ["load, s", *(f"{statistics.median(measured.load_seconds[side]):.1f}" for side in sides)],
        ["load", *(gigabytes(measured.load_peak_bytes[side]) for side in sides)],
        *([times.cell.name, *(gigabytes(times.peak_bytes[side]) for side in sides)] for times in measured.cells),
    ]


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Aligned: the first column to the left, the others to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def machine_line(machine: Mapping[str, Any], threads: int) -> str:
    kernel = f" with {machine['blas_kernel']} kernels" if machine["blas_kernel"] else ""
    peers = [f"{name} {machine[name]}" for name in ("torch", "transformers") if name in machine]
    return "; ".join(
        [
            f"{machine['processor']}, {machine['cores']} cores, {threads} threads, {machine['system']}",
            f"Python {machine['python']}, NumPy {machine['numpy']}, {machine['blas']}{kernel}",
            *peers,
        ]
    )
