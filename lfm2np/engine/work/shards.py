"""A function mapped over shards of work on any `concurrent.futures.Executor`; a worker that dies does not end the run.

What the function itself raises comes home as a value (`attempt`). So whatever a future raises is its executor's: the
worker died, or work or result could not be sent. Such a shard is tried again, and how depends on the executor:

BrokenExecutor   a process pool whose worker died takes no more work and loses every shard in flight, also those of
                 others. A new pool is made, if a function for that was given; without one the run ends.
any other error  Dask's KilledWorker, a cancelled future: of this shard alone; the same executor gets it again.
"""

from __future__ import annotations

import pickle
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass
from typing import Any

from lfm2np.errors import Lfm2npError, WorkerError

AnyExecutor = Executor | Callable[[], Executor] | None  # a function makes another when one breaks
AT_ONCE = 64  # shards in flight: more than the workers, or some of them wait
ATTEMPTS = 3  # deaths of a shard's worker until the shard is to blame


@dataclass(frozen=True)
class Raised:
    """What the function raised, as a value."""

    error: Exception


def attempt(function: Callable[[Any], Any], shard: Any) -> Any:
    """In the worker: the function's result, or a Raised."""
    try:
        return function(shard)
    except Exception as error:
        return Raised(portable(error))


def portable(error: Exception) -> Exception:
    """The error with its traceback as a note, which would stay behind; its text alone if it can't be pickled."""
    if not isinstance(error, Lfm2npError):
        error.add_note("in a worker:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def map_shards(
    function: Callable[[Any], Any],
    shards: Sequence[Any],
    executor: AnyExecutor = None,
    keep: Callable[[int, Any], None] | None = None,
    names: Sequence[str] | None = None,
    at_once: int = AT_ONCE,
) -> list[Any]:
    """`function(shard)` of all shards, in their order.

    function  top-level or a functools.partial of one, of data that can be pickled; any shard may be computed twice
    executor  None: here, one after another; an Executor, which stays open; or a function that makes one
    keep      called in this thread with a shard's index and result as soon as it is there: what came before an
              error is not lost
    names     of the shards, for messages
    errors    what the function raised, as it is; WorkerError for a shard whose worker died ATTEMPTS times, or an
              executor that takes no more work and can't be made anew
    """
    names = [f"shard {index}" for index in range(len(shards))] if names is None else names
    if executor is None:
        results = []
        for index, shard in enumerate(shards):
            results.append(function(shard))
            if keep:
                keep(index, results[-1])
        return results
    if not shards:
        return []
    run = _Run(function, shards, executor, keep, names, at_once)
    try:
        while not run.is_finished:
            run.submit()
            run.collect()
    finally:
        run.close()
    return [run.results[index] for index in range(len(shards))]


class _Run:
    """The shards that wait, those in flight, and what came of the others.

    A broken pool does not say which shard broke it. Half as many as it lost go together next time, and so on down to
    one, whose death is then its own; the others come through meanwhile.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        shards: Sequence[Any],
        executor: Executor | Callable[[], Executor],
        keep: Callable[[int, Any], None] | None,
        names: Sequence[str],
        at_once: int,
    ) -> None:
        self.results: dict[int, Any] = {}
        self._function, self._shards, self._keep, self._names = function, shards, keep, names
        self._make = None if isinstance(executor, Executor) else executor
        self._executor = executor if isinstance(executor, Executor) else executor()
        self._at_once = self._window = max(1, at_once)
        self._waiting = deque(range(len(shards)))
        self._flying: dict[Future[Any], int] = {}
        self._deaths: Counter[int] = Counter()
        self._suspects: set[int] = set()  # were in flight when a pool broke, and have not come through since
        self._lost: list[int] = []  # of the pool that is broken now
        self._broken: BaseException | None = None
        self._is_new = True  # nothing came of this executor yet

    @property
    def is_finished(self) -> bool:
        return len(self.results) == len(self._shards)

    def submit(self) -> None:
        """As many as may be in flight together. A broken executor is replaced once nothing of it is in flight."""
        if self._broken and not self._flying:
            self._replace(self._broken)
        while self._waiting and not self._broken and len(self._flying) < self._window:
            index = self._waiting[0]
            try:
                future = self._executor.submit(attempt, self._function, self._shards[index])
            except Exception as error:  # broken meanwhile, or shut down by its owner
                if self._is_new and not self._flying:
                    raise WorkerError(f"the executor takes no work: {described(error)}") from error
                self._broken = error
            else:
                self._flying[future] = self._waiting.popleft()

    def collect(self) -> None:
        """Waits until at least one shard in flight is done or lost."""
        finished = wait(self._flying, return_when=FIRST_COMPLETED).done
        for future in sorted(finished, key=self._flying.__getitem__):
            index = self._flying.pop(future)
            try:
                result = future.result()
            except BrokenExecutor as error:
                self._broken = error
                self._lost.append(index)
            except Exception as error:
                self._blame(index, error)
                self._waiting.appendleft(index)
            else:
                self._take(index, result)

    def close(self) -> None:
        """Takes back what has not begun; an executor that was made here is shut down."""
        for future in self._flying:
            future.cancel()
        if self._make:
            self._executor.shutdown(cancel_futures=True)

    def _take(self, index: int, result: Any) -> None:
        if isinstance(result, Raised):
            raise result.error
        self._is_new = False
        self._suspects.discard(index)
        if not self._suspects:
            self._window = self._at_once
        self.results[index] = result
        if self._keep:
            self._keep(index, result)

    def _blame(self, index: int, error: BaseException) -> None:
        self._deaths[index] += 1
        if self._deaths[index] == ATTEMPTS:
            lost = f"lost {ATTEMPTS} times, as its worker died or could not be reached"
            raise WorkerError(f"{self._names[index]}: {lost}: {described(error)}") from error

    def _replace(self, error: BaseException) -> None:
        if len(self._lost) == 1:
            self._blame(self._lost[0], error)
        if self._make is None:
            lost = ", ".join(self._names[index] for index in sorted(self._lost)) or "nothing"
            raise WorkerError(
                f"the executor broke after {len(self.results)} of {len(self._shards)} shards ({described(error)}); in "
                f"flight were {lost}; a function that makes executors, in its place, goes on with another"
            ) from error
        self._waiting.extendleft(sorted(self._lost, reverse=True))
        self._suspects.update(self._lost)
        self._window = max(1, len(self._lost) // 2)
        self._executor.shutdown(cancel_futures=True)
        self._executor, self._is_new = self._make(), True
        self._lost, self._broken = [], None


def described(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
