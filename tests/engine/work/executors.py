"""Executors that lose workers, and work that kills its worker: for the tests of lfm2np/engine/work."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from pathlib import Path
from typing import Any

FOREVER = 10**9


class Died(Exception):
    """Of one task's worker, as Dask's KilledWorker: the executor goes on."""


class Fragile(Executor):
    """One thread that works in order, and dies on chosen shards, each as often as `deaths` says.

    `breaks`: with it die all tasks in flight, and no more are taken, as with a ProcessPoolExecutor.
    """

    def __init__(self, deaths: Counter[Any], breaks: bool) -> None:
        self._deaths, self._breaks = deaths, breaks
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._lock, self._broken, self._closed = threading.Lock(), False, False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **names: Any) -> Future[Any]:
        with self._lock:
            if self._broken:
                raise BrokenExecutor("a worker died")
            if self._closed:
                raise RuntimeError("shut down")
            future: Future[Any] = Future()
            self._tasks.put((future, function, arguments))
            return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._closed = True
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, arguments = task
            if not future.set_running_or_notify_cancel():
                continue
            shard = arguments[-1]
            if self._broken or self._deaths[shard] > 0:
                self._die(future, shard)
            else:
                future.set_result(function(*arguments))

    def _die(self, future: Future[Any], shard: Any) -> None:
        if not self._broken:
            self._deaths[shard] -= 1
        if not self._breaks:
            future.set_exception(Died(f"on {shard}"))
            return
        with self._lock:
            self._broken = True
        future.set_exception(BrokenExecutor("a worker died"))


def squared(shard: int) -> int:
    return shard * shard


def refused(shard: int) -> int:
    if shard == 3:
        raise ValueError("three is none")
    return shard


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def unpicklable(shard: int) -> int:
    raise Unpicklable(shard, 2)


def killed_once(folder: str, shard: int) -> int:
    """Kills its process the first time that it sees a shard of which `folder` has a file."""
    mark = Path(folder) / str(shard)
    if mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return shard * shard


def always_killed(deadly: int, shard: int) -> int:
    if shard == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    return shard * shard
