"""Work in pieces on several threads: each row once, errors and settings as on one; bits are tests/truth/'s subject."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threads import threads

from lfm2np.arithmetic import pieces
from lfm2np.arithmetic.pieces import over_pieces, threads_of


@given(st.sampled_from([1, 2, 3, 5]), st.integers(0, 200), st.integers(0, 9), st.sampled_from([None, 1, 7, 1000]))
def test_each_row_is_computed_once(count: int, rows: int, elements: int, limit: int | None) -> None:
    times = np.zeros(rows, np.int64)

    def compute(piece: slice) -> None:
        times[piece] += 1

    with threads(count):
        over_pieces(compute, rows, elements, limit)
    assert (times == 1).all()


def computed_by_two() -> bool:
    """Whether another thread computes a piece while this one does."""
    both = threading.Barrier(2)
    with threads(2):
        over_pieces(lambda rows: both.wait(timeout=30), 2, 8)
    return True


def test_several_threads_do_compute() -> None:
    assert computed_by_two()


@pytest.mark.parametrize("problem", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("in_helper", [True, False])
def test_what_a_piece_raises_is_raised_and_nothing_computes_any_more(
    in_helper: bool, problem: type[BaseException]
) -> None:
    begun: list[slice] = []
    raised = threading.Event()

    def compute(rows: slice) -> None:
        begun.append(rows)
        if in_helper == (threading.current_thread() is not threading.main_thread()):
            raised.set()
            raise problem("of the piece")
        raised.wait(timeout=30)
        time.sleep(0.01)

    with threads(3), pytest.raises(problem, match="of the piece"):
        over_pieces(compute, 8000, 1, 8)
    require_stopped(begun)


def require_stopped(begun: list[slice]) -> None:
    """Some of 1,000 pieces, which take 0.01 s each, were not begun, and none is."""
    seen = len(begun)
    assert seen < 1000
    time.sleep(0.02)
    assert len(begun) == seen


def test_an_interrupt_while_work_is_handed_out_leaves_nothing_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[slice] = []
    taken = threading.Event()

    class Interrupted(pieces.SimpleQueue):  # type: ignore[type-arg]
        def put(self, *work: Any) -> None:  # type: ignore[override]
            super().put(*work)
            taken.wait(timeout=30)
            raise KeyboardInterrupt

    def compute(rows: slice) -> None:
        begun.append(rows)
        taken.set()
        time.sleep(0.01)

    monkeypatch.setattr(pieces, "_handed_out", Interrupted())
    monkeypatch.setattr(pieces, "_helpers", [])
    with threads(3), pytest.raises(KeyboardInterrupt):
        over_pieces(compute, 8000, 1, 8)
    require_stopped(begun)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """As in a terminal: what a shell runs in the background may have them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_of_the_wait_for_others_comes_when_they_are_done() -> None:
    """The caller has no piece any more, and another thread still has one."""
    ended, begun, main = [], threading.Event(), threading.main_thread()

    def compute(rows: slice) -> None:
        if threading.current_thread() is main:
            begun.wait(timeout=30)
            return
        begun.set()
        time.sleep(0.03)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        ended.append(rows)

    with threads(2), pytest.raises(KeyboardInterrupt):
        over_pieces(compute, 2, 8)
    assert ended


@pytest.mark.parametrize("had", [0, 1])
def test_where_no_thread_can_be_had_nothing_is_lost_and_nothing_is_kept(
    had: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while another thread computes, whose helper must not take what was handed to none."""
    starts: list[None] = []
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "lfm2np-pieces":
            starts.append(None)
            if len(starts) > had:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(pieces, "_helpers", [])
    monkeypatch.setattr(pieces, "_handed_out", pieces.SimpleQueue())
    monkeypatch.setattr(threading.Thread, "start", refused)
    whole: list[bool] = []

    def add() -> None:
        for _ in range(50):
            seen: list[slice] = []
            over_pieces(lambda rows, seen=seen: (seen.append(rows), time.sleep(0.001)), 80, 1, 8)  # type: ignore[misc]
            whole.append(len(seen) == 10)

    with threads(4):
        other = threading.Thread(target=add)
        other.start()
        add()
        other.join()
    assert whole == [True] * 100
    assert had or pieces._handed_out.empty()


def test_the_callers_errstate_holds_in_every_thread() -> None:
    both = threading.Barrier(2)
    seen: list[str] = []

    def compute(rows: slice) -> None:
        both.wait(timeout=30)
        seen.append(np.geterr()["divide"])

    for wanted in ("ignore", "raise"):
        with threads(2), np.errstate(divide=wanted):
            over_pieces(compute, 2, 8)
    assert seen == ["ignore", "ignore", "raise", "raise"]


def test_pieces_may_have_pieces() -> None:
    times = np.zeros((40, 40), np.int64)

    def compute(rows: slice) -> None:
        def inner(columns: slice) -> None:
            times[rows, columns] += 1

        over_pieces(inner, 40, 8)

    with threads(3):
        over_pieces(compute, 40, 8)
    assert (times == 1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    assert computed_by_two()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(computed_by_two).get(timeout=60)


PROGRAM = """
import threading, sys
import numpy as np
from lfm2np.arithmetic import exact, pieces

def norm():
    exact.rms_norm(np.ones((500, 1024), np.float32), np.ones(1024, np.float32), 1e-5)

norm()
print(pieces.THREADS, threading.active_count())
if sys.argv[1:]:  # a thread that goes on when the main one is done
    threading.Thread(target=lambda: (threading.main_thread().join(), norm(), print("done"))).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("given", "more"), [("1", 0), ("3", 2)])
def test_a_program_has_the_threads_of_its_environment_and_ends(given: str, more: int) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in pieces.THREAD_VARIABLES}
    words = [sys.executable, "-c", PROGRAM, *(["after"] if more else [])]
    done = subprocess.run(
        words, env={**variables, "OMP_NUM_THREADS": given}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{given} {1 + more}\n" + ("done\n" if more else "")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "2"}, 3),
        ({"OPENBLAS_NUM_THREADS": "", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "4"}, 2),
        ({"OPENBLAS_NUM_THREADS": "0", "MKL_NUM_THREADS": " 4 "}, 4),
        ({"OPENBLAS_NUM_THREADS": "many", "OMP_NUM_THREADS": "-1"}, None),
        ({}, None),
    ],
)
def test_the_environment_says_how_many(environment: dict[str, str], expected: int | None) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert threads_of(environment) == (cores if expected is None else expected)


REST = "import os, lfm2np.commands.cli; print(os.environ['OPENBLAS_THREAD_TIMEOUT'])"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "program", "printed"),
    [
        ({}, REST, "20"),
        ({"OPENBLAS_THREAD_TIMEOUT": "26"}, REST, "26"),
        ({}, "import os; x = dict(os.environ); import lfm2np; lfm2np.load; print(x == dict(os.environ))", "True"),
        ({}, "import sys, lfm2np; print('numpy' in sys.modules)", "False"),  # so that a command can say so in time
    ],
)
def test_the_threads_of_blas_are_told_to_rest_by_a_command_unless_somebody_told_them_otherwise(
    given: dict[str, str], program: str, printed: str
) -> None:
    """While they wait for the next product they would keep the cores from the threads here."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_THREAD_TIMEOUT"} | given
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == f"{printed}\n"
