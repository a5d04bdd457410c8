"""The process of one side: `python -m lfm2np.commands.bench.sides.side NAME MODEL THREADS`; a JSON object a line.

{"ask": "load"}                                        {"load_seconds": 7.1, "peak_bytes": ..., "versions": {...}}
{"ask": "time", "cell": "decode-5x128", "steps": 3}    {"steps": [{"seconds": 0.07}, ...], "peak_bytes": ...}
{"ask": "answer", "way": "padded", "longest": 256}     {"seconds": 9.3}   (of our engine only, as the next)
{"ask": "prefill_memory", "length": 8192}              {"bytes": ..., "cache_bytes": ...}
{"ask": "check", "engine": "m:f", "first": true}       {"verdict": "BUG", "judging": 7.1, ...}   (of check-... only)
{"ask": "direct", "prompts": [[[1, 2]]], "new_tokens": 9}    {"seconds": 0.2}   (of serve-..., as the next two)
{"ask": "open", "policy": "fcfs", "slots": 8}          {"port": 40000}
{"ask": "shut"}                                        {}

An error is {"error": "..."}. The process ends with its input.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from lfm2np.commands.bench.sides.cells import cell_named
from lfm2np.commands.bench.sides.check_side import CheckSide
from lfm2np.commands.bench.sides.engine_side import EngineSide
from lfm2np.commands.bench.sides.floor_side import FloorSide
from lfm2np.commands.bench.sides.peak_memory import forget_peak, peak_bytes
from lfm2np.commands.bench.sides.profile_side import ProfileSide
from lfm2np.commands.bench.sides.serve_side import ServeSide
from lfm2np.commands.bench.sides.transformers_side import TransformersSide
from lfm2np.errors import Lfm2npError
from lfm2np.system import keep_freed_memory

# By the first word of a name, as in "floor-float64". All but the last two have steps to time.
SIDES: dict[str, Callable[[str], Any]] = {
    "": EngineSide,  # "exact"
    "streamed": partial(EngineSide, weights="streamed"),
    "profile": ProfileSide,
    "floor": FloorSide,
    "transformers": TransformersSide,
    "check": CheckSide,
    "serve": ServeSide,
}


def make_side(name: str) -> Any:
    kind, _, dtype = name.rpartition("-")
    return SIDES[kind](dtype)


def answer(side: Any, directory: Path, threads: int, ask: dict[str, Any]) -> dict[str, Any]:
    """What a method of the side called `ask` returns for the other fields; memory with what every side has."""
    gc.collect()
    forget_peak()
    match ask:
        case {"ask": "load"}:
            began = time.perf_counter()
            versions = side.load(directory, threads)
            return {"load_seconds": time.perf_counter() - began, "peak_bytes": peak_bytes(), "versions": versions}
        case {"ask": "time", "cell": cell, "steps": steps}:
            return {"steps": side.time(cell_named(cell), steps), "peak_bytes": peak_bytes()}
        case {"ask": what, **fields}:
            return dict(getattr(side, what)(**fields))
    raise AssertionError(ask)


def serve(lines: TextIO, answers: TextIO, side: Any, directory: Path, threads: int) -> None:
    for line in lines:
        try:
            said = answer(side, directory, threads, json.loads(line))
        except (Lfm2npError, MemoryError) as problem:
            said = {"error": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(said), file=answers, flush=True)


def main() -> None:
    name, directory, threads = sys.argv[1:]
    if not name.startswith("transformers"):  # which is measured as others start it
        keep_freed_memory()  # as our commands do
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand among the answers
    serve(sys.stdin, answers, make_side(name), Path(directory), int(threads))


if __name__ == "__main__":
    main()
