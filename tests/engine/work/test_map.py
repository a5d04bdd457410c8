"""A map over shards on executors of every kind: each result once, or one error that names what was lost."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lfm2np.engine.work.place import DEATHS, Workers, map_shards
from lfm2np.errors import WorkerError

pytestmark = pytest.mark.slow

SQUARES = {index: index * index for index in range(12)}
FOREVER = 10**9


def results_of(function: Callable[[int], Any], shards: Sequence[int], executor: Executor | None) -> dict[int, Any]:
    """By the shards' indices; each result is kept once."""
    kept: list[tuple[int, Any]] = []
    map_shards(function, shards, executor, lambda *result: kept.append(result), [f"shard {each}" for each in shards])
    assert len(kept) == len(dict(kept))
    return dict(kept)


class Fragile(Executor):
    """One thread, which dies on chosen shards, each as often as `deaths` says, and is started anew.

    `breaks`: with it die all shards in flight, as with Workers; else it alone, as on Dask.
    """

    def __init__(self, deaths: Counter[int], breaks: bool, at_once: int) -> None:
        self.at_once, self._deaths, self._breaks = at_once, deaths, breaks
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Any, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._tasks.put((future, function, arguments[0]))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, shard = task
            if not future.set_running_or_notify_cancel():
                continue
            if self._deaths[shard] <= 0:
                future.set_result(function(shard))
                continue
            self._deaths[shard] -= 1
            future.set_exception(BrokenExecutor("a worker died"))
            with self._lock:
                while self._breaks and not self._tasks.empty():
                    if (beside := self._tasks.get()) is not None and beside[0].set_running_or_notify_cancel():
                        beside[0].set_exception(BrokenExecutor("a worker died"))


def squared(shard: int) -> int:
    return shard * shard


@pytest.mark.parametrize("make", [lambda: None, lambda: ThreadPoolExecutor(3)], ids=["here", "threads"])
def test_an_executor_is_used_again_and_again(make: Callable[[], Executor | None]) -> None:
    executor = make()
    try:
        assert results_of(squared, range(12), executor) == SQUARES
        assert results_of(squared, [], executor) == {}
        with pytest.raises(ValueError, match="three is none"):
            results_of(refused, range(6), executor)
        assert results_of(squared, range(3, 5), executor) == {0: 9, 1: 16}
    finally:
        if executor is not None:
            executor.shutdown()


def refused(shard: int) -> int:
    if shard == 3:
        raise ValueError("three is none")
    return shard


@given(
    st.integers(1, 12),
    st.dictionaries(st.integers(0, 11), st.integers(1, DEATHS - 1)),
    st.integers(1, 14),
    st.booleans(),
)
@example(3, {0: 1, 1: DEATHS - 1}, 3, True)  # shard 1 is also lost beside shard 0
def test_workers_that_die_now_and_then_change_nothing(
    count: int, deaths: dict[int, int], at_once: int, breaks: bool
) -> None:
    left = Counter(deaths)
    with Fragile(left, breaks, at_once) as executor:
        assert results_of(squared, range(count), executor) == {index: SQUARES[index] for index in range(count)}
    assert all(left[shard] == 0 for shard in deaths if shard < count), "the control: the workers did die"


@given(st.integers(1, 12), st.data(), st.integers(1, 14), st.booleans())
def test_a_shard_that_kills_every_worker_is_named(count: int, data: st.DataObject, at_once: int, breaks: bool) -> None:
    """The others that were in flight with it are not blamed."""
    deadly = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    left = Counter(dict.fromkeys(deadly, FOREVER))
    with (
        Fragile(left, breaks, at_once) as executor,
        pytest.raises(WorkerError, match=f"lost {DEATHS} times.*BrokenExecutor: a worker died") as caught,
    ):
        results_of(squared, range(count), executor)
    assert str(caught.value).split(":")[0] in {f"shard {index}" for index in deadly}
    assert sum(FOREVER - left[shard] for shard in deadly) <= 2 * DEATHS * len(deadly), "given up soon"


def test_a_shard_that_kills_its_process_leaves_workers_that_go_on() -> None:
    """test_work.py has a process that is killed once."""
    with Workers(1) as workers:
        with pytest.raises(WorkerError, match=rf"shard 3: lost {DEATHS} times.*BrokenProcessPool"):
            results_of(killed, [3], workers)
        assert results_of(squared, range(3, 5), workers) == {0: 9, 1: 16}


def killed(shard: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ORPHANING = """
import time
from lfm2np.engine.work.place import Workers
if __name__ == "__main__":
    with Workers(1) as workers:
        print(workers.submit(__import__("os").getpid).result(), flush=True)
        time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are not listed in /proc")
def test_a_worker_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "orphaning.py"
    script.write_text(ORPHANING)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = Path("/proc", parent.stdout.readline().strip(), "stat")
        assert worker.exists()
        parent.kill()
        until = time.monotonic() + 60
        while is_there := worker.exists() and worker.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            if time.monotonic() > until:
                os.kill(int(worker.parent.name), signal.SIGKILL)
                break
            time.sleep(0.01)
    assert not is_there


def test_a_pool_that_breaks_while_it_starts_a_process_is_replaced() -> None:
    """Seen once in CI: the pool's thread closed the queue of a broken pool that `submit` was handing to a process."""
    with Workers(1) as workers:
        workers._pool = ClosedPool()
        assert results_of(squared, range(3), workers) == {index: SQUARES[index] for index in range(3)}


class ClosedPool(Executor):
    def submit(self, *arguments: object, **named: object) -> Future[Any]:
        raise OSError("handle is closed")


def test_worker_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with Workers(os.cpu_count() or 1) as workers:
        assert workers.submit(os.getenv, "OPENBLAS_NUM_THREADS").result() == "1"
    assert "OPENBLAS_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with Workers(2) as workers:
        assert workers.submit(os.getenv, "OPENBLAS_NUM_THREADS").result() is None


class Interrupting(Executor):
    """Its first result is an interrupt; it notes what became of the others."""

    def __init__(self) -> None:
        self.futures: list[Future[object]] = []

    def submit(self, function, /, *arguments, **names):  # type: ignore[no-untyped-def]
        self.futures.append(Future())
        if len(self.futures) == 1:
            self.futures[0].set_exception(KeyboardInterrupt())
        return self.futures[-1]


def test_an_interrupt_takes_back_what_has_not_begun() -> None:
    executor = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        results_of(squared, range(4), executor)
    assert [future.cancelled() for future in executor.futures] == [False, True, True, True]
