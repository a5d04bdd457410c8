"""A model larger than the memory that its weights would take: streamed from the file, piece by piece.

LFM2-2.6B in exact arithmetic would take 20.6 GB of resident weights. Streamed, the process holds activations, cache and
pieces; the pages of the file that the system keeps mapped are its own to give back.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.files import read_config
from lfm2np.commands.bench.measure import Turns
from lfm2np.commands.bench.sides.cells import Cell, cells_named
from lfm2np.commands.bench.sides.side_process import SideProcess
from lfm2np.commands.bench.table import columns
from lfm2np.truth.layers import parameter_count
from lfm2np.values import Progress

CELLS = cells_named("prefill-128,decode-1x128,decode-16x128")
SPARE = 7 * 2**30  # bytes that may be held beside the weights as stored, which the system may give back


@dataclass(frozen=True)
class Large:
    """Of one process: seconds to load, of each cell seconds a step; the most memory of all, mapped pages included."""

    numerics: str
    load_seconds: float
    cells: dict[str, list[float]]  # by name
    peak_bytes: int
    most_peak_bytes: int  # that are wanted


def measure_large(
    directory: Path, numerics: str, rounds: int, threads: int, show: Progress, cells: Sequence[Cell] = CELLS
) -> Large:
    turns = Turns(1 + rounds * len(cells), show)
    seconds: dict[str, list[float]] = {}
    with SideProcess(f"streamed-{numerics}", directory, threads) as side:
        loaded = side.ask("load")
        peak = loaded["peak_bytes"]
        turns.next()
        for _ in range(rounds):
            for cell in cells:
                said = side.ask("time", cell=cell.name, steps=1)
                seconds.setdefault(cell.name, []).extend(step["seconds"] for step in said["steps"])
                peak = max(peak, said["peak_bytes"])
                turns.next()
    most = 2 * parameter_count(read_config(directory)) + SPARE
    return Large(numerics, loaded["load_seconds"], seconds, peak, most)


def as_json(measured: Large) -> dict[str, Any]:
    return asdict(measured)


def as_text(measured: Large) -> str:
    medians = [f"{statistics.median(times):.2f}" for times in measured.cells.values()]
    rows = [["", "load", *measured.cells], ["seconds", f"{measured.load_seconds:.1f}", *medians]]
    held = f"at most {measured.peak_bytes / 2**30:.1f} GiB in memory, mapped pages included"
    wanted = f"at most {measured.most_peak_bytes / 2**30:.0f} wanted"
    return f"{measured.numerics}, weights streamed: {held}; {wanted}\n{columns(rows)}"
