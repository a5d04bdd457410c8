"""Work that any process with the checkpoint can do: which function, on which items, and where.

An item and its result are plain data: None, bool, int, float, str, lists, dicts with strings as keys, NumPy arrays. So
they can be pickled for a worker and written to a file (results_file.py), and a worker needs nothing of its parent
but the checkpoint's path. Where a kind of work is exact, its results are the same bits wherever they are computed.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lfm2np.arithmetic.pieces import THREAD_VARIABLES, threads_of
from lfm2np.checkpoint.loaded import LoadedModel, read_model
from lfm2np.errors import WorkerError
from lfm2np.system import keep_freed_memory
from lfm2np.values import Progress

MAX_NUM_BATCHED_TOKENS = 512  # of one shard: bounds a ragged pass; twice as large ones are hardly faster
AT_ONCE = 64  # shards in flight: more than the workers, or some of them wait
DEATHS = 3  # of a shard's worker until the shard is to blame
_loading = threading.Lock()


Function = Callable[[LoadedModel, Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class Work:
    """A kind of work: a top-level function, `function(model, items)`, one result an item; and the tokens of an item."""

    kind: str
    function: Function
    num_tokens: Callable[[Any], int]
    is_exact: bool = True  # the same bits on every machine; else results are not recorded
    # Tokens of an item that are computed once with the item before it, if `function` gets both.
    num_shared: Callable[[LoadedModel, Any, Any], int] = lambda *_: 0


class Record(Protocol):
    """Earlier results, and where new ones are kept: results_file.ResultsFile."""

    def known(self, kind: str, item: Any) -> Any | None: ...

    def extend(self, kind: str, items: Sequence[Any], results: Sequence[Any]) -> None: ...


@dataclass(frozen=True)
class Source:
    """Where a worker finds the model, and its hash."""

    path: str
    numerics: str
    sha256: str  # LoadedModel.sha256
    weights: str = "resident"
    rope: str = "trained"  # LoadedModel.rope


@dataclass(eq=False)
class Place:
    """Where work is done, and the tokens and seconds it took.

    executor  None: in this thread; else the checkpoint stands under the same path on all its machines
    record    has earlier results, and keeps new ones as they come
    """

    executor: Executor | None = None
    record: Record | None = None
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    num_tokens: int = field(default=0, init=False)  # that were computed, not known from the record
    seconds: float = field(default=0.0, init=False)

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_tokens / self.seconds if self.num_tokens else None


AnyPlace = Executor | Place | None


def place_of(executor: AnyPlace) -> Place:
    return executor if isinstance(executor, Place) else Place(executor)


def compute(
    work: Work, model: LoadedModel, items: Sequence[Any], place: AnyPlace = None, progress: Progress | None = None
) -> list[Any]:
    """The results of all items, in their order. Those that the record knows are not computed.

    `progress(done, total)` counts tokens. Errors: what the function raises, RequestError if the record can't be
    written, WorkerError.
    """
    place = place_of(place)
    record = place.record if work.is_exact else None
    results = [record.known(work.kind, item) if record else None for item in items]
    missing = [index for index, result in enumerate(results) if result is None]
    sizes = [work.num_tokens(item) for item in items]

    def shared(index: int, before: int) -> int:
        return work.num_shared(model, items[index], items[before])

    shards = cut(missing, sizes, place.max_num_batched_tokens, shared)
    contents = [[items[index] for index in shard] for shard in shards]
    names = [f"{work.kind} of items {', '.join(map(str, shard))}" for shard in shards]
    total = sum(sizes)
    done = total - sum(sizes[index] for index in missing)
    began = time.perf_counter()

    def keep(number: int, computed: list[Any]) -> None:
        nonlocal done
        for index, result in zip(shards[number], computed, strict=True):
            results[index] = result
        if record:
            record.extend(work.kind, contents[number], computed)
        num_tokens = sum(sizes[index] for index in shards[number])
        done += num_tokens
        place.num_tokens += num_tokens
        report(done, total)

    report = progress or (lambda *_: None)
    report(done, total)
    if place.executor is None:
        function = functools.partial(work.function, model)
    else:
        function = functools.partial(run_shard, work.function, source_of(model))
    try:
        map_shards(function, contents, place.executor, keep, names)
    finally:
        place.seconds += time.perf_counter() - began
    return results


def cut(
    indices: Iterable[int], sizes: Sequence[int], most: int, shared: Callable[[int, int], int] = lambda *_: 0
) -> list[list[int]]:
    """The indices in runs whose sizes sum to at most `most`; an item that is larger is a run by itself.

    Of items with the same long beginning, more than `most` tokens, each counts by what it adds to the one before it,
    `shared(index, before)` less than its size, and a run may hold twice the tokens of its longest item.
    """
    runs: list[list[int]] = []
    room = tokens = longest = 0
    for index in indices:
        size = sizes[index]
        common = shared(index, runs[-1][-1]) if runs and min(size, sizes[runs[-1][-1]]) > most else 0
        if common > most and tokens + size - common <= 2 * max(longest, size):
            size, longest = size - common, max(longest, size)
        elif not runs or size > room:
            runs.append([])
            room, tokens, longest = most, 0, size
        runs[-1].append(index)
        room -= size
        tokens += size
    return runs


def map_shards(
    function: Callable[[Any], Any],
    shards: Sequence[Any],
    executor: Executor | None,
    keep: Callable[[int, Any], None],
    names: Sequence[str],
) -> None:
    """Calls `keep(index, function(shard))` in this thread for each shard, as soon as its result is there.

    function  top-level or a functools.partial of one, of data that can be pickled; any shard may be computed twice
    executor  None: here, one after another. It stays open. Its attribute `at_once` limits the shards in flight, and its
              `require_workers`, called every second without a result, raises if none can come
    names     of the shards, for messages
    errors    what the function raised; WorkerError for a shard whose worker died DEATHS times while no other shard
              was in flight, and for an executor that takes no work
    """
    if executor is None:
        for index, shard in enumerate(shards):
            keep(index, function(shard))
        return
    # A broken pool loses all shards in flight, and does not say which one broke it. So lost ones go again, one by one.
    lost = fly(function, dict(enumerate(shards)), executor, keep, getattr(executor, "at_once", AT_ONCE))
    for _ in range(DEATHS):
        lost = fly(function, {index: shards[index] for index in lost}, executor, keep, 1)
    for index, error in lost.items():
        message = f"{names[index]}: lost {DEATHS} times, as its worker died, can't be reached, or can't send its result"
        raise WorkerError(f"{message}: {described(error)}") from error


def fly(
    function: Callable[[Any], Any],
    shards: Mapping[int, Any],
    executor: Executor,
    keep: Callable[[int, Any], None],
    at_once: int,
) -> dict[int, Exception]:
    """Each shard once, at most so many in flight; those that were lost, with what the executor said of them."""
    waiting, flying, lost = deque(shards), dict[Future[Any], int](), dict[int, Exception]()
    require_workers = getattr(executor, "require_workers", lambda: None)
    try:
        while waiting or flying:
            while waiting and len(flying) < at_once:
                try:
                    future = executor.submit(functools.partial(attempt, function), shards[waiting[0]])
                except Exception as error:  # broken, or shut down by its owner
                    raise WorkerError(f"the executor takes no work: {described(error)}") from error
                flying[future] = waiting.popleft()
            while not (done := wait(flying, 1.0, FIRST_COMPLETED).done):
                require_workers()
            for future in done:
                index = flying.pop(future)
                try:
                    result, problem = future.result()
                except Exception as error:
                    lost[index] = error
                    continue
                if problem is not None:
                    raise problem
                keep(index, result)
    finally:
        for future in flying:
            future.cancel()
    return lost


def attempt(function: Callable[[Any], Any], shard: Any) -> tuple[Any, Exception | None]:
    """In the worker: the result, or what was raised. So what the future itself raises is the executor's, and a loss.

    Dask takes a result for an exception if the worker dies while the result comes: no class of errors would tell that.
    """
    try:
        return function(shard), None
    except Exception as error:
        error.add_note(traceback.format_exc())
        return None, error


def described(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class Workers(Executor):
    """Worker processes on this machine. If one dies, what is in flight is lost, and `submit` starts all anew."""

    def __init__(self, count: int) -> None:
        self.at_once, self._count = 2 * count, count
        self._pool = self._started()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Processes start here, and share the cores: as many BLAS threads each, unless that is set already."""
        threads = str(max(1, threads_of(os.environ) // self._count))
        is_set = any(os.environ.get(name) for name in THREAD_VARIABLES)
        if not is_set:
            os.environ["OPENBLAS_NUM_THREADS"] = threads
        try:
            return self._pool.submit(function, *arguments, **named)
        except (BrokenExecutor, OSError):  # OSError: its thread cleared a broken pool away while it started a process
            self._pool = self._started()
            return self._pool.submit(function, *arguments, **named)
        finally:
            if not is_set:
                del os.environ["OPENBLAS_NUM_THREADS"]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _started(self) -> Executor:
        """Spawned, not forked: a fork would lose the threads of BLAS."""
        import multiprocessing  # not in a browser
        from concurrent.futures import ProcessPoolExecutor

        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._count, mp_context=spawn, initializer=begin_worker)


# --- in the worker


def begin_worker() -> None:
    """Ctrl-C reaches workers too: they end without a traceback, and the parent reports it. Nor does one outlive the
    parent: a killed one leaves it blocked, as each worker holds both ends of the pipe of results."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    keep_freed_memory()


def end_with_parent() -> None:
    import multiprocessing  # not in a browser

    parent = multiprocessing.parent_process()
    assert parent is not None, "of a worker"
    parent.join()
    os._exit(1)


def source_of(model: LoadedModel) -> Source:
    return Source(str(model.path.absolute()), model.numerics.name, model.sha256, model.where_weights, model.rope)


def run_shard(function: Function, source: Source, items: Sequence[Any]) -> list[Any]:
    return function(model_of(source), items)


def model_of(source: Source) -> LoadedModel:
    """The model, loaded once in a process, whatever the number of its threads. WorkerError if it is another one."""
    with _loading:
        return load_source(source)


@functools.lru_cache(maxsize=1)
def load_source(source: Source) -> LoadedModel:
    """WorkerError if it is another checkpoint than in the parent."""
    model = read_model(Path(source.path), source.numerics, weights=source.weights, rope=source.rope)
    if model.sha256 != source.sha256:
        raise WorkerError(
            f"{source.path}: a worker has config.json and weights of SHA-256 {model.sha256}, expected {source.sha256}"
        )
    return model
