"""Work that any process with the checkpoint can do: which function, on which items, and where.

An item and its result are plain data: None, bool, int, float, str, lists, dicts with strings as keys, NumPy arrays. So
they can be pickled for a worker and written to a file (results_file.py), and a worker needs nothing of its parent
but the checkpoint's path. Where a kind of work is exact, its results are the same bits wherever they are computed.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lfm2np.checkpoint.loaded import LoadedModel, read_model
from lfm2np.engine.work.shards import AT_ONCE, AnyExecutor, map_shards
from lfm2np.errors import WorkerError
from lfm2np.values import Progress

MAX_NUM_BATCHED_TOKENS = 512  # of one shard: bounds a ragged pass; twice as large ones are hardly faster
_loading = threading.Lock()


@dataclass(frozen=True)
class Work:
    """A kind of work: a top-level function, `function(model, items)`, one result an item; and the tokens of an item."""

    kind: str
    function: Callable[[LoadedModel, Sequence[Any]], list[Any]]
    num_tokens: Callable[[Any], int]
    is_exact: bool = True  # the same bits on every machine; else results are not recorded
    # Tokens of an item that are computed once with the item before it, if `function` gets both; None: none.
    num_shared: Callable[[LoadedModel, Any, Any], int] | None = None


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
    prepared: str | None = None  # LoadedModel.prepared_directory
    rope: str = "trained"  # LoadedModel.rope


@dataclass(eq=False)
class Place:
    """Where work is done, and the tokens and seconds it took.

    executor  see shards.map_shards; the checkpoint stands under the same path on all its machines
    record    has earlier results, and keeps new ones as they come
    """

    executor: AnyExecutor = None
    record: Record | None = None
    at_once: int = AT_ONCE
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    num_tokens: int = field(default=0, init=False)  # that were computed, not known from the record
    seconds: float = field(default=0.0, init=False)

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_tokens / self.seconds if self.num_tokens else None


AnyPlace = AnyExecutor | Place


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
    shards = cut(missing, sizes, place.max_num_batched_tokens, functools.partial(num_shared, work, model, items))
    total, done = sum(sizes), sum(sizes) - sum(sizes[index] for index in missing)
    if progress:
        progress(done, total)
    began = time.perf_counter()

    def keep(number: int, computed: list[Any]) -> None:
        nonlocal done
        indices = shards[number]
        for index, result in zip(indices, computed, strict=True):
            results[index] = result
        if record:
            record.extend(work.kind, [items[index] for index in indices], computed)
        done += sum(sizes[index] for index in indices)
        place.num_tokens += sum(sizes[index] for index in indices)
        if progress:
            progress(done, total)

    here = place.executor is None
    function = functools.partial(work.function, model) if here else functools.partial(run_shard, work, source_of(model))
    try:
        map_shards(
            function,
            [[items[index] for index in shard] for shard in shards],
            place.executor,
            keep,
            [f"{work.kind} of items {', '.join(map(str, shard))}" for shard in shards],
            place.at_once,
        )
    finally:
        place.seconds += time.perf_counter() - began
    return results


def num_shared(work: Work, model: LoadedModel, items: Sequence[Any], index: int, before: int) -> int:
    return 0 if work.num_shared is None else work.num_shared(model, items[index], items[before])


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


# --- in the worker


def source_of(model: LoadedModel) -> Source:
    kept_in = None if model.prepared_directory is None else str(model.prepared_directory.absolute())
    return Source(
        str(model.path.absolute()), model.numerics.name, model.sha256, model.where_weights, kept_in, model.rope
    )


def run_shard(work: Work, source: Source, items: Sequence[Any]) -> list[Any]:
    return work.function(model_of(source), items)


def model_of(source: Source) -> LoadedModel:
    """The model, loaded once in a process, whatever the number of its threads. WorkerError if it is another one."""
    with _loading:
        return load_source(source)


@functools.lru_cache(maxsize=1)
def load_source(source: Source) -> LoadedModel:
    """WorkerError if it is another checkpoint than in the parent."""
    model = read_model(
        Path(source.path), source.numerics, weights=source.weights, prepared=source.prepared, rope=source.rope
    )
    if model.sha256 != source.sha256:
        raise WorkerError(
            f"{source.path}: a worker has config.json and weights of SHA-256 {model.sha256}, expected {source.sha256}"
        )
    return model
