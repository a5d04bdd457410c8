"""What commands that map over sequences share: worker processes, a Dask cluster, and files of results."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import lfm2np
from lfm2np.commands.cli.shared.parser import add, to_extend
from lfm2np.engine.loading import Model
from lfm2np.engine.teacher_forcing import SCORE
from lfm2np.engine.work.place import AT_ONCE, Place, Source, Workers, described, model_of, source_of
from lfm2np.engine.work.results_file import LineFile, ResultsFile
from lfm2np.errors import RequestError, WorkerError
from lfm2np.oracle.judging.truth import TRUTH
from lfm2np.oracle.judging.views import VIEWS
from lfm2np.oracle.vectors.golden import VECTOR

CONNECTING = 10.0  # seconds until a scheduler's address is given up
WITHOUT_WORKERS = 60.0  # seconds without a worker until a cluster is given up
ADDRESS = "tcp://HOST:PORT of a Dask scheduler, or its file"
SAVE_HELP = "save results as they arrive, and resume from FILE (score --merge joins files)"
WORKS = {work.kind: work for work in (SCORE, TRUTH, VECTOR, VIEWS)}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workers(parser)
    add(parser, "--save FILE", SAVE_HELP, type=to_extend)


def add_workers(parser: argparse.ArgumentParser) -> None:
    text = f"compute in N worker processes (0: in this one), or on a cluster: {ADDRESS}"
    add(parser, "--workers N|ADDRESS", text, type=workers, default=0)


def workers(text: str) -> int | str:
    """The `type` of --workers: a number, or where a scheduler is."""
    if re.fullmatch("[0-9]{1,4}", text):
        return int(text)
    if re.fullmatch(r"[a-z]+://\S+:[0-9]+", text) or text.endswith(".json") or Path(text).is_file():
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: expected a number of processes, {ADDRESS}")


@contextlib.contextmanager
def place_of(arguments: argparse.Namespace, model: Model | None, saved: LineFile | None = None) -> Iterator[Place]:
    """Where --workers says, with the file of --save, which may be open already. Without a model: work that needs none,
    and keeps its results itself."""
    with contextlib.ExitStack() as stack:
        place = Place()
        if model is not None and arguments.save is not None:
            place.record = stack.enter_context(ResultsFile(saved or arguments.save, model))
        if isinstance(arguments.workers, str):
            place.executor = stack.enter_context(cluster_of(arguments.workers, model))
        elif arguments.workers:
            place.executor = stack.enter_context(Workers(arguments.workers))
        yield place


def throughput(place: Place) -> dict[str, Any]:
    """For --json: the tokens that were computed, not those known from a file of results."""
    rate = place.tokens_per_second
    rounded = None if rate is None else round(rate, 1)
    return {"tokens": place.num_tokens, "seconds": round(place.seconds, 3), "tokens_per_second": rounded}


# --- --workers ADDRESS: needs the extra `dask`, which is slow to import


@contextlib.contextmanager
def cluster_of(address: str, model: Model | None) -> Iterator[Cluster]:
    """The workers of a Dask cluster, which have this version of lfm2np and the model, if any, also those that join
    later (place.model_of). RequestError where no scheduler answers; WorkerError names a worker that can't compute.
    """
    with connected(address) as client:
        try:
            client.wait_for_workers(1, timeout=WITHOUT_WORKERS)
        except TimeoutError:
            raise WorkerError(f"--workers {address}: no worker within {WITHOUT_WORKERS:g} seconds") from None
        source = None if model is None else source_of(model)
        problems = client.run(prepare_worker, lfm2np.__version__, source, on_error="return")
        for worker, problem in problems.items():
            if problem is not None:
                raise WorkerError(f"worker {worker}: {described(problem)}")
        yield Cluster(client)


class Cluster(Executor):
    """Dask's executor; `map_shards` asks it every second without a result whether one can still come."""

    def __init__(self, client: Any) -> None:
        self._client, self._inner = client, client.get_executor(pure=False)
        self._seen = time.monotonic()
        self.at_once = max(AT_ONCE, 2 * sum(client.nthreads().values()))

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        self._seen = time.monotonic()
        future: Future[Any] = self._inner.submit(function, *arguments, **named)
        return future

    def require_workers(self) -> None:
        """WorkerError if there is none for a while: a nanny restarts one in two seconds."""
        with contextlib.suppress(Exception):  # of a scheduler that is gone
            self._seen = time.monotonic() if self._client.nthreads() else self._seen
        if time.monotonic() - self._seen > WITHOUT_WORKERS or self._client.status == "closed":
            lost = f"the scheduler is gone, or had no worker for {WITHOUT_WORKERS:g} seconds"
            raise WorkerError(f"--workers: {lost}; with --save FILE, the same command resumes")


def connected(address: str) -> Any:
    """A distributed.Client of the scheduler at an address, or in a scheduler file."""
    try:
        from distributed import Client, Security
        from distributed.comm import connect
    except ImportError as problem:
        raise RequestError(f"--workers: {problem}; it needs the extra `dask`: pip install 'lfm2np[dask]'") from None

    async def reach(scheduler: str) -> None:
        """Client itself waits for ever for a server of another kind (distributed 8071)."""
        comm = await connect(scheduler, timeout=CONNECTING / 2, **Security().get_connection_args("client"))
        await comm.close()

    for name in ("distributed", "distributed.client", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they log ends in an error of one line
    try:
        is_file = address.endswith(".json") or Path(address).is_file()
        scheduler = str(json.loads(Path(address).read_bytes())["address"]) if is_file else address
        asyncio.run(asyncio.wait_for(reach(scheduler), CONNECTING))
        return Client(scheduler, timeout=CONNECTING, set_as_default=False)
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise RequestError(
            f"--workers {address}: no Dask scheduler answers there: {described(problem).rstrip(': ')}"
        ) from None


async def prepare_worker(version: str, source: Source | None) -> None:
    """In a worker, beside its event loop, which the scheduler listens to."""
    if lfm2np.__version__ != version:
        raise WorkerError(f"lfm2np {lfm2np.__version__}, expected {version}, as where the command runs")
    if source is not None:
        await asyncio.to_thread(model_of, source)
