"""`lfm2np bench`: how fast, beside the bare matrix products and transformers, on this machine."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from lfm2np.bench import measure, table
from lfm2np.bench.cells import CELLS, QUICK, cells_named
from lfm2np.bench.machine import describe_machine
from lfm2np.bench.random_checkpoint import random_checkpoint
from lfm2np.config import load_config
from lfm2np.generation import require_count
from lfm2np.loading import checkpoint_directory
from lfm2np.terminal import progress_bar

EXAMPLE = """lfm2np bench
  lfm2np bench --quick --without-peers
  lfm2np bench --cells prefill-512,decode-16x1024 --rounds 9 --json"""
ROUNDS, QUICK_ROUNDS = 5, 3
NO_PEERS = 'transformers is not installed and was not measured: pip install "lfm2np[peers]"'


def add_options(parser: argparse.ArgumentParser) -> None:
    model_help = "checkpoint directory (default: random weights with the shapes of LFM2-350M, made once and kept)"
    parser.add_argument("--model", metavar="DIR", help=model_help)
    parser.add_argument("--cells", metavar="NAMES", help="such as prefill-512,decode-16x1024 (default: ten)")
    parser.add_argument("--rounds", metavar="N", type=int, help=f"how often each side has its turn ({ROUNDS})")
    parser.add_argument("--threads", metavar="N", type=int, help="of each side (as many as there are cores)")
    parser.add_argument("--quick", action="store_true", help=f"three small cells, {QUICK_ROUNDS} rounds")
    parser.add_argument("--without-peers", action="store_true", help="do not measure transformers")


def run(arguments: argparse.Namespace) -> None:
    default_rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    rounds = require_count("--rounds", default_rounds if arguments.rounds is None else arguments.rounds, 1, 10_000)
    threads = chosen_threads(arguments)
    cells = cells_named(arguments.cells) if arguments.cells is not None else QUICK if arguments.quick else CELLS
    peers = not arguments.without_peers and measure.has_peers()
    sides = [*measure.OURS, *measure.FLOORS, *(measure.PEERS if peers else ())]
    directory = chosen_checkpoint(arguments.model)
    together = measure.fits_together(load_config(directory), cells, sides)
    with progress_bar("turns") as show:
        measured = measure.measure(directory, cells, sides, rounds, threads, together, show)
    machine = describe_machine()
    notes = [] if peers or arguments.without_peers else [NO_PEERS]
    notes += [] if together else ["not all sides fit into memory together: each was loaded anew in each round"]
    if arguments.json:
        print_json(directory, machine, threads, measured.versions, notes, table.as_json(measured))
        return
    print(f"{directory.name} on {table.machine_line(machine, measured.versions, threads)}\n")
    print("\n".join([table.as_text(measured), *notes]))


def print_json(
    directory: Path,
    machine: dict[str, Any],
    threads: int,
    versions: dict[str, str],
    notes: list[str],
    found: dict[str, Any],
) -> None:
    head = {"model": str(directory), "machine": {**machine, **versions}, "threads": threads, "notes": notes}
    print(json.dumps({**head, **found}))


def chosen_threads(arguments: argparse.Namespace) -> int:
    count = (os.cpu_count() or 1) if arguments.threads is None else arguments.threads
    return require_count("--threads", count, 1, 1024)


def chosen_checkpoint(model: str | None) -> Path:
    """The directory of --model, or the random checkpoint with the shapes of LFM2-350M."""
    if model is not None:
        return checkpoint_directory(model)
    with progress_bar("making random weights with the shapes of LFM2-350M") as show:
        return random_checkpoint(progress=show)
