"""Runs the sides in turn: round after round, so that whatever the machine does meanwhile touches all of them.

Only one side computes at a time. All of them stay loaded if the memory suffices; else each is loaded anew in each
round, which takes longer and changes no number but for the wider gap between the sides of a round.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lfm2np.commands.bench.sides.cells import PREFILL, Cell
from lfm2np.commands.bench.sides.peak_memory import available_bytes
from lfm2np.commands.bench.sides.side_process import SideProcess
from lfm2np.errors import RequestError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import key_value_numbers, parameter_count
from lfm2np.values import Progress

OURS = ("exact", "float32")
FLOORS = ("floor-float64", "floor-float32")
PEERS = ("transformers-float32", "transformers-float64", "transformers-bfloat16")
STEPS = {PREFILL: 1, "decode": 3}  # timed in one turn of a side; its time is their median
MOST_STEPS = 16  # with those that are not counted
WEIGHT_BYTES = {
    **dict.fromkeys(("exact", "profile-exact", "floor-float64", "transformers-float64"), 8),
    "transformers-bfloat16": 2,
}
SPARE_BYTES = 2 * 2**30


@dataclass
class CellTimes:
    """Of one cell, by side: seconds of each round, those of a step's parts, and the most memory."""

    cell: Cell
    seconds: dict[str, list[float]] = field(default_factory=dict)
    parts: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # of floors and profiles, by name
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, side: str, said: dict[str, Any]) -> None:
        steps = said["steps"]
        medians = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
        self.seconds.setdefault(side, []).append(medians.pop("seconds"))
        for name, seconds in medians.items():
            self.parts.setdefault(side, {}).setdefault(name, []).append(seconds)
        self.peak_bytes[side] = max(self.peak_bytes.get(side, 0), said["peak_bytes"])


@dataclass
class Measured:
    cells: list[CellTimes]
    load_seconds: dict[str, list[float]] = field(default_factory=dict)  # by side; once, or once a round
    load_peak_bytes: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # of libraries that only a side has


def has_peers() -> bool:
    """Whether the libraries of the extra `peers` are there; they are imported by their sides only."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def fits_together(config: ModelConfig, cells: Sequence[Cell], sides: Sequence[str]) -> bool:
    """Whether all sides can stay loaded beside the largest cache of one; yes where the system does not say."""
    available = available_bytes()
    weights = sum(WEIGHT_BYTES.get(side, 4) for side in sides) * parameter_count(config)
    caches = max(cell.requests * cell.longest for cell in cells) * 8 * key_value_numbers(config)
    return available is None or weights + 2 * caches + SPARE_BYTES <= available


def require_room(config: ModelConfig, cells: Sequence[Cell]) -> None:
    """RequestError for a cell beyond the model's longest context; a few steps come after those that are cached."""
    for cell in cells:
        if cell.longest + MOST_STEPS > config.max_position_embeddings:
            longest = f"max_position_embeddings={config.max_position_embeddings}"
            raise RequestError(f"cell {cell.name}: expected at most {longest}, less {MOST_STEPS} for steps")


def measure(
    directory: Path,
    cells: Sequence[Cell],
    sides: Sequence[str],
    rounds: int,
    threads: int,
    together: bool,
    show: Progress,
) -> Measured:
    """Times every cell on every side, `rounds` times. SideError if one dies, or can't."""
    measured = Measured([CellTimes(cell) for cell in cells])
    read_through(directory)
    turns = Turns(len(cells) * len(sides) * rounds, show)

    def start(stack: contextlib.ExitStack, side: str) -> SideProcess:
        process = stack.enter_context(SideProcess(side, directory, threads))
        said = process.ask("load")
        measured.load_seconds.setdefault(side, []).append(said["load_seconds"])
        measured.load_peak_bytes[side] = max(measured.load_peak_bytes.get(side, 0), said["peak_bytes"])
        measured.versions |= said["versions"]
        return process

    # Sides that are loaded together, and how often each then takes a turn at a cell.
    groups = [(list(sides), rounds)] if together else [([side], 1) for _ in range(rounds) for side in sides]
    for group, turns_each in groups:
        with contextlib.ExitStack() as stack:
            processes = [start(stack, side) for side in group]
            for times in measured.cells:
                for process in processes * turns_each:
                    times.add(process.name, process.ask("time", cell=times.cell.name, steps=STEPS[times.cell.kind]))
                    turns.next()
    return measured


def read_through(directory: Path) -> None:
    """The weights once, so that the first side to load them does not pay for the disk."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(2**24):
                pass


class Turns:
    def __init__(self, total: int, show: Progress) -> None:
        self._done, self._total, self._show = 0, total, show
        show(0, total)

    def next(self) -> None:
        self._done += 1
        self._show(self._done, self._total)
