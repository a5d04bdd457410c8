"""A model larger than the memory that its weights would take: streamed from the file, piece by piece.

LFM2-2.6B in exact arithmetic would take 20.6 GB of resident weights. Streamed, the process holds activations, cache and
pieces; the pages of the file that the system keeps mapped are its own to give back.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lfm2np.bench.measure import Turns
from lfm2np.bench.sides.cells import Cell, cells_named
from lfm2np.bench.sides.side_process import SideProcess
from lfm2np.bench.table import columns
from lfm2np.checkpoint.files import read_config
from lfm2np.model.layers import parameter_count
from lfm2np.progress import Progress

CELLS = cells_named("prefill-128,decode-1x128,decode-16x128")
SPARE = 7 * 2**30  # bytes that may be held beside the weights as stored, which the system may give back


@dataclass(frozen=True)
class Large:
    """Of one process: seconds to load, of each cell seconds a step; the most memory of all, mapped pages included."""

    numerics: str
    load_seconds: float
    cells: list[tuple[Cell, list[float]]]
    peak_bytes: int
    most_bytes: int  # that are wanted


def measure_large(
    directory: Path, numerics: str, rounds: int, threads: int, show: Progress, cells: Sequence[Cell] = CELLS
) -> Large:
    turns = Turns(1 + rounds * len(cells), show)
    seconds: dict[Cell, list[float]] = {}
    with SideProcess(f"streamed-{numerics}", directory, threads) as side:
        loaded = side.ask("load")
        peak = loaded["peak_bytes"]
        turns.next()
        for _ in range(rounds):
            for cell in cells:
                said = side.ask("time", cell=cell.name, steps=1)
                seconds.setdefault(cell, []).extend(step["seconds"] for step in said["steps"])
                peak = max(peak, said["peak_bytes"])
                turns.next()
    most = 2 * parameter_count(read_config(directory)) + SPARE
    return Large(numerics, loaded["load_seconds"], list(seconds.items()), peak, most)


def as_json(found: Large) -> dict[str, Any]:
    return {
        "numerics": found.numerics,
        "load_seconds": found.load_seconds,
        "cells": {cell.name: times for cell, times in found.cells},
        "peak_bytes": found.peak_bytes,
        "most_peak_bytes": found.most_bytes,
    }


def as_text(found: Large) -> str:
    rows = [["", "load", *(cell.name for cell, _ in found.cells)]]
    rows.append(
        ["seconds", f"{found.load_seconds:.1f}", *(f"{statistics.median(times):.2f}" for _, times in found.cells)]
    )
    held = f"at most {found.peak_bytes / 2**30:.1f} GiB in memory, mapped pages included"
    return f"{found.numerics}, weights streamed: {held}; at most {found.most_bytes / 2**30:.0f} wanted\n{columns(rows)}"
