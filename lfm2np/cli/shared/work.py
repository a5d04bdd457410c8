"""What score, check and vectors share: worker processes and files of results."""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from lfm2np.loading import Model
from lfm2np.oracle.judging.truth import TRUTH
from lfm2np.oracle.vectors.golden import VECTOR
from lfm2np.scoring.many import SCORE
from lfm2np.values import require_count
from lfm2np.work.place import Place
from lfm2np.work.results_file import ResultsFile

WORKS = {work.kind: work for work in (SCORE, TRUTH, VECTOR)}


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
