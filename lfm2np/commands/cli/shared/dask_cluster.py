"""--dask ADDRESS: the workers of a Dask cluster. Needs the extra `dask`, which nothing else imports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pkgutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, InvalidStateError
from pathlib import Path
from typing import Any

import lfm2np
from lfm2np.engine.loading import Model
from lfm2np.engine.work.place import Source, model_of, source_of
from lfm2np.engine.work.shards import AT_ONCE, described
from lfm2np.errors import RequestError, WorkerError

CONNECTING = 10.0  # seconds until an address is given up
WITHOUT_WORKERS = 60.0  # seconds without a worker until a cluster is given up: a nanny restarts one in two seconds


@contextlib.contextmanager
def connected(address: str, model: Model | None) -> Iterator[ClusterExecutor]:
    """The cluster's executor. Its workers have this version of lfm2np and the model, if any, also those that join later
    (model_of). RequestError where no scheduler answers; WorkerError names a worker that can't compute.
    """
    with client_of(address) as client:
        try:
            client.wait_for_workers(1, timeout=WITHOUT_WORKERS)
        except TimeoutError:
            raise WorkerError(f"--dask {address}: no worker within {WITHOUT_WORKERS:g} seconds") from None
        versions = client.run(pkgutil.resolve_name, "lfm2np:__version__", on_error="return")
        refuse({worker: version for worker, version in versions.items() if version != lfm2np.__version__})
        if model is not None:
            loaded = client.run(load, source_of(model), on_error="return")
            refuse({worker: problem for worker, problem in loaded.items() if problem is not None})
        ended, executor = threading.Event(), ClusterExecutor(client)
        threading.Thread(target=executor.watch, args=(ended,), daemon=True).start()
        try:
            yield executor
        finally:
            ended.set()


class ClusterExecutor(Executor):
    """Dask's executor, which breaks where Dask would wait for ever: workers or scheduler are gone."""

    def __init__(self, client: Any) -> None:
        self._client, self._inner = client, client.get_executor(pure=False)
        self._in_flight: set[Future[Any]] = set()
        self._is_lost = False
        self.at_once = max(AT_ONCE, 2 * sum(client.nthreads().values()))

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = self.lend()._inner.submit(function, *arguments, **named)
        self._in_flight.add(future)
        future.add_done_callback(self._in_flight.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Left to `connected`."""

    def lend(self) -> ClusterExecutor:
        """Itself; WorkerError if it is broken."""
        if self._is_lost:
            lost = f"the scheduler is gone, or had no worker for {WITHOUT_WORKERS:g} seconds"
            raise WorkerError(f"--dask: {lost}; with --save FILE, the same command resumes")
        return self

    def watch(self, ended: threading.Event) -> None:
        seen = time.monotonic()
        while not ended.wait(1):
            with contextlib.suppress(Exception):  # of a scheduler that is gone
                seen = time.monotonic() if self._client.nthreads() else seen
            self._is_lost |= time.monotonic() - seen > WITHOUT_WORKERS or self._client.status == "closed"
            for future in list(self._in_flight) if self._is_lost else ():
                with contextlib.suppress(InvalidStateError):  # done meanwhile
                    future.set_exception(BrokenExecutor("its workers are gone"))


def client_of(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError as problem:
        raise RequestError(f"--dask: {problem}; it needs the extra `dask`: pip install 'lfm2np[dask]'") from None
    for name in ("distributed", "distributed.client", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they log ends in an error of one line
    try:
        is_file = address.endswith(".json") or Path(address).is_file()
        scheduler = str(json.loads(Path(address).read_bytes())["address"]) if is_file else address
        asyncio.run(asyncio.wait_for(reach(scheduler), CONNECTING))
        return Client(scheduler, timeout=CONNECTING, set_as_default=False)
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise RequestError(
            f"--dask {address}: no Dask scheduler answers there: {described(problem).rstrip(': ')}"
        ) from None


async def reach(address: str) -> None:
    """Returns if a scheduler answers; Client itself waits for ever for a server of another kind (distributed 8071)."""
    from distributed import Security
    from distributed.comm import connect

    comm = await connect(address, timeout=CONNECTING / 2, **Security().get_connection_args("client"))
    await comm.close()


async def load(source: Source) -> None:
    """In a worker, beside its event loop, which the scheduler listens to."""
    await asyncio.to_thread(model_of, source)


def refuse(problems: dict[str, Any]) -> None:
    for worker, problem in problems.items():
        if isinstance(problem, Exception):
            raise WorkerError(f"worker {worker}: {described(problem)}")
        raise WorkerError(f"worker {worker}: lfm2np {problem}, expected {lfm2np.__version__}, as here")
