"""What score, check and vectors share: worker processes, files of results, and `lfm2np merge`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from lfm2np.cli.shared.terminal import progress_bar
from lfm2np.errors import RequestError
from lfm2np.loading import Model, load
from lfm2np.oracle.noise import TRUTH
from lfm2np.oracle.vectors.golden import VECTOR
from lfm2np.scoring.many import SCORE
from lfm2np.values import require_count
from lfm2np.work.place import Place
from lfm2np.work.results_file import ResultsFile, line_of, merged, spot_check
from lfm2np.work.whole_file import write_whole

WORKS = {work.kind: work for work in (SCORE, TRUTH, VECTOR)}
MERGE_EXAMPLE = """lfm2np score --requests part-1.jsonl --results results-1.jsonl    # on one machine
  lfm2np score --requests part-2.jsonl --results results-2.jsonl    # on another
  lfm2np merge results-1.jsonl results-2.jsonl -o results.jsonl --spot-check 5
  lfm2np score --requests all.jsonl --results results.jsonl         # nothing is computed any more"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", metavar="N", type=int, default=0, help="compute in N processes beside this one (0)"
    )
    results_help = "keep results as they come, and compute none that FILE has; see lfm2np merge"
    parser.add_argument("--results", metavar="FILE", help=results_help)


@contextlib.contextmanager
def place_of(arguments: argparse.Namespace, model: Model) -> Iterator[Place]:
    """Where the options say that work is done."""
    workers = require_count("--workers", arguments.workers, 0, None)
    with contextlib.ExitStack() as stack:
        record = None if arguments.results is None else stack.enter_context(ResultsFile(arguments.results, model))
        if not workers:
            yield Place(record=record)
            return
        stack.enter_context(shared_cores(workers))
        yield Place(functools.partial(process_pool, workers), record, at_once=2 * workers)


def process_pool(workers: int) -> ProcessPoolExecutor:
    """Started anew, not forked: BLAS has threads, which a fork would lose."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=spawn, initializer=end_when_interrupted)


def end_when_interrupted() -> None:
    """Ctrl-C reaches workers too: they end without a traceback, and what is to be said the parent says."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def shared_cores(workers: int) -> Iterator[None]:
    """Processes that are started meanwhile share the cores: as many BLAS threads each, unless that is set already."""
    threads = {"OPENBLAS_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}
    added = {name: value for name, value in threads.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def throughput(place: Place) -> dict[str, Any]:
    """For --json: the tokens that were computed, not those known from a file of results."""
    rate = place.tokens_per_second
    rounded = None if rate is None else round(rate, 1)
    return {"tokens": place.num_tokens, "seconds": round(place.seconds, 3), "tokens_per_second": rounded}


# --- merge


def add_merge_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", help="files of --results, of one checkpoint")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="file to write or replace, as a whole")
    check_help = "compute K of the items again, and refuse if a bit differs (0)"
    parser.add_argument("--spot-check", metavar="K", type=int, default=0, help=check_help)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the items that are drawn (0)")


def run_merge(arguments: argparse.Namespace) -> None:
    """ProofError (1) for results that differ: between files, from their own SHA-256, or from what is computed here."""
    with progress_bar("loading") as show:
        model = load(arguments.model, "exact", show)
    entries = merged(arguments.files, model)
    if not entries:
        raise RequestError(f"{', '.join(arguments.files)}: no results, expected at least one")
    checked = spot_check(model, list(entries.values()), WORKS, arguments.spot_check, arguments.seed)
    write_whole(arguments.output, "".join(line_of(entry, model.sha256) for entry in entries.values()))
    if arguments.json:
        print(json.dumps({"output": arguments.output, "items": len(entries), "checked": [str(one) for one in checked]}))
        return
    for one in checked:
        print(f"computed again, bit for bit: {one}")
    print(f"{len(entries)} items from {len(arguments.files)} files; {len(checked)} computed again")
