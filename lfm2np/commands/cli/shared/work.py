"""What commands that map over sequences share: worker processes, a Dask cluster, and files of results."""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from typing import Any

from lfm2np.arithmetic.pieces import THREAD_VARIABLES, threads_of
from lfm2np.commands.cli.shared.parser import add
from lfm2np.engine.loading import Model
from lfm2np.engine.teacher_forcing import SCORE
from lfm2np.engine.work.place import Place
from lfm2np.engine.work.results_file import LineFile, ResultsFile
from lfm2np.oracle.judging.truth import TRUTH
from lfm2np.oracle.judging.views import VIEWS
from lfm2np.oracle.vectors.golden import VECTOR
from lfm2np.system import keep_freed_memory
from lfm2np.values import require_count

SAVE_HELP = "save what comes as it comes, and go on with what FILE has; see lfm2np merge"
WORKS = {work.kind: work for work in (SCORE, TRUTH, VECTOR, VIEWS)}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_executor_options(parser)
    add(parser, "--save FILE", SAVE_HELP)


def add_executor_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    add(group, "--workers N", "compute in N worker processes (0: in this one)", default=0)
    cluster_help = "compute on the workers of a Dask cluster: tcp://HOST:PORT of its scheduler, or a scheduler file"
    add(group, "--dask ADDRESS", cluster_help)


@contextlib.contextmanager
def place_of(arguments: argparse.Namespace, model: Model | None, saved: LineFile | None = None) -> Iterator[Place]:
    """Where --workers and --dask say, with the file of --save, which may be open already. Without a model: work that
    needs none, and keeps its results itself."""
    workers = require_count("--workers", arguments.workers, 0, None)
    with contextlib.ExitStack() as stack:
        record = None
        if model is not None and arguments.save is not None:
            record = stack.enter_context(ResultsFile(saved or arguments.save, model))
        if arguments.dask is not None:
            from lfm2np.commands.cli.shared.dask_cluster import connected  # slow to import

            cluster = stack.enter_context(connected(arguments.dask, model))
            yield Place(cluster.lend, record, cluster.at_once)
            return
        if not workers:
            yield Place(record=record)
            return
        stack.enter_context(shared_cores(workers))
        executor = stack.enter_context(lasting(functools.partial(process_pool, workers)))
        yield Place(executor, record, at_once=2 * workers)


@contextlib.contextmanager
def lasting(make: Callable[[], Executor]) -> Iterator[Callable[[], Executor]]:
    """Lends the same executor again and again, and a new one only if it broke: workers load the model once."""
    executors: list[Executor] = []

    def borrow() -> Executor:
        try:
            executors[-1].submit(int)  # raises if it is broken
        except (IndexError, BrokenExecutor):
            executors.append(make())
        return Borrowed(executors[-1])

    try:
        yield borrow
    finally:
        for executor in executors:
            executor.shutdown(cancel_futures=True)


class Borrowed(Executor):
    """An executor that `shutdown` leaves open."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        return self._inner.submit(function, *arguments, **named)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Left to its owner."""


def process_pool(workers: int) -> ProcessPoolExecutor:
    """Spawned, not forked: a fork would lose the threads of BLAS."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=spawn, initializer=begin_worker)


def begin_worker() -> None:
    """Ctrl-C reaches workers too: they end without a traceback, and the parent reports it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_freed_memory()


@contextlib.contextmanager
def shared_cores(workers: int) -> Iterator[None]:
    """Processes that are started meanwhile share the cores: as many BLAS threads each, unless that is set already."""
    is_set = any(os.environ.get(name) for name in THREAD_VARIABLES)
    added = {} if is_set else {"OPENBLAS_NUM_THREADS": str(max(1, threads_of(os.environ) // workers))}
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
