"""A map over shards on executors of every kind: all results in order, or one error that names what was lost."""

from __future__ import annotations

import functools
import multiprocessing
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from executors import FOREVER, Died, Fragile, always_killed, killed_once, refused, squared, unpicklable
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.engine.work.shards import ATTEMPTS, map_shards
from lfm2np.errors import WorkerError

SQUARES = [index * index for index in range(12)]


def processes(workers: int = 2) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


@pytest.mark.parametrize("executor", [None, functools.partial(ThreadPoolExecutor, 3), processes])
def test_results_come_in_the_order_of_the_shards(executor: Callable[[], Executor] | None) -> None:
    kept: dict[int, int] = {}
    assert map_shards(squared, range(12), executor, kept.__setitem__) == SQUARES
    assert kept == dict(enumerate(SQUARES))


def test_an_executor_stays_open_and_one_made_here_is_shut_down() -> None:
    pools: list[ThreadPoolExecutor] = []

    def make() -> ThreadPoolExecutor:
        pools.append(ThreadPoolExecutor(2))
        return pools[-1]

    map_shards(squared, range(3), make)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pools[0].submit(squared, 1)
    with ThreadPoolExecutor(2) as mine:
        map_shards(squared, range(3), mine)
        assert mine.submit(squared, 3).result() == 9


def test_nothing_to_do_needs_no_executor() -> None:
    assert map_shards(squared, [], lambda: pytest.fail("made")) == []


@given(
    st.integers(1, 12),
    st.dictionaries(st.integers(0, 11), st.integers(1, ATTEMPTS - 1)),
    st.integers(1, 14),
    st.booleans(),
)
def test_workers_that_die_now_and_then_change_nothing(
    count: int, deaths: dict[int, int], at_once: int, breaks: bool
) -> None:
    left, kept = Counter(deaths), []

    def keep(index: int, result: int) -> None:
        kept.append((index, result))

    results = map_shards(squared, range(count), lambda: Fragile(left, breaks), keep, at_once=at_once)
    assert results == SQUARES[:count]
    assert sorted(kept) == list(enumerate(results)), "each result is kept once"
    assert all(left[shard] == 0 for shard in deaths if shard < count), "the control: the workers did die"


@given(st.integers(1, 12), st.sets(st.integers(0, 11), min_size=1), st.integers(1, 14), st.booleans())
def test_a_shard_that_kills_every_worker_is_named(count: int, deadly: set[int], at_once: int, breaks: bool) -> None:
    left = Counter(dict.fromkeys(deadly, FOREVER))
    names = [f"item {index}" for index in range(count)]
    kept: dict[int, int] = {}

    def run() -> list[int]:
        return map_shards(squared, range(count), lambda: Fragile(left, breaks), kept.__setitem__, names, at_once)

    if not deadly & set(range(count)):
        assert run() == SQUARES[:count]
        return
    with pytest.raises(WorkerError, match=f"lost {ATTEMPTS} times, as its worker died") as caught:
        run()
    assert str(caught.value).split(":")[0] in {f"item {index}" for index in deadly}
    assert all(result == SQUARES[index] for index, result in kept.items())
    assert not deadly & kept.keys()


def test_the_others_come_through_beside_a_shard_that_kills_every_worker() -> None:
    """Those in front of it, and those that were in flight with it and are not to blame."""
    kept: dict[int, int] = {}
    with pytest.raises(WorkerError, match="shard 5"):
        map_shards(squared, range(12), lambda: Fragile(Counter({5: FOREVER}), True), kept.__setitem__, at_once=4)
    assert kept.keys() >= set(range(5))


def test_a_broken_executor_that_can_not_be_made_anew_says_what_was_lost() -> None:
    kept: dict[int, int] = {}
    executor = Fragile(Counter({2: 1}), True)
    with pytest.raises(WorkerError, match=r"broke after 2 of 6 shards .*in flight were .*shard 2") as caught:
        map_shards(squared, range(6), executor, kept.__setitem__)
    assert "BrokenExecutor: a worker died" in str(caught.value)
    assert kept == {0: 0, 1: 1}
    with pytest.raises(WorkerError, match="takes no work: BrokenExecutor"):
        map_shards(squared, range(6), executor)


def test_an_error_of_a_single_task_does_not_need_another_executor() -> None:
    with Fragile(Counter({2: ATTEMPTS - 1, 4: 1}), False) as executor:
        assert map_shards(squared, range(6), executor) == SQUARES[:6]
    with Fragile(Counter({2: ATTEMPTS}), False) as executor, pytest.raises(WorkerError, match="Died: on 2") as caught:
        map_shards(squared, range(6), executor)
    assert isinstance(caught.value.__cause__, Died)


@pytest.mark.parametrize("executor", [None, functools.partial(ThreadPoolExecutor, 2), processes])
def test_what_the_function_raises_is_raised_and_not_tried_again(executor: Callable[[], Executor] | None) -> None:
    with pytest.raises(ValueError, match="three is none") as caught:
        map_shards(refused, range(6), executor)
    if executor is not None:
        assert "in refused" in caught.value.__notes__[0], "the worker's own traceback"


def test_an_error_that_can_not_be_pickled_comes_as_its_text() -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: 0 and 2"):
        map_shards(unpicklable, [0], processes)


def test_work_that_can_not_be_sent_is_said_to_be_so() -> None:
    with pytest.raises(WorkerError, match=r"shard 0: lost 3 times.*(pickle|local object)"):
        map_shards(lambda shard: shard, [0], processes)


def test_a_killed_process_is_replaced(tmp_path: Path) -> None:
    for shard in (1, 4, 7):
        (tmp_path / str(shard)).touch()
    function = functools.partial(killed_once, str(tmp_path))
    assert map_shards(function, range(8), processes, at_once=4) == SQUARES[:8]
    assert not list(tmp_path.iterdir()), "the control: the processes were killed"


def test_a_shard_that_kills_every_process_is_named() -> None:
    with pytest.raises(WorkerError, match=r"shard 3: lost 3 times.*BrokenProcessPool"):
        map_shards(functools.partial(always_killed, 3), range(6), processes, at_once=4)


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
        map_shards(squared, range(4), executor)
    assert all(future.cancelled() for future in executor.futures[1:])
