"""Work in pieces on several threads: each row once, errors and settings as on one, and no bit that depends on it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threads import threads

from lfm2np.arithmetic import exact, exact_attention, pieces
from lfm2np.arithmetic.pieces import over_pieces, threads_of
from lfm2np.truth import integers

COUNTS = st.sampled_from([1, 2, 3, 5])
HEAD_DIM, TAPS = 6, 3


@given(COUNTS, st.integers(0, 200), st.integers(0, 9), st.sampled_from([None, 1, 7, 1000]))
def test_each_row_is_computed_once(count: int, rows: int, elements: int, limit: int | None) -> None:
    times = np.zeros(rows, np.int64)

    def compute(piece: slice) -> None:
        times[piece] += 1

    with threads(count):
        over_pieces(compute, rows, elements, limit)
    assert (times == 1).all()


def operations(rng: np.random.Generator, rows: int, width: int) -> dict[str, Callable[[], Any]]:
    """Every operation of the exact arithmetic that works in pieces, on numbers of all sizes."""

    def normal(*shape: int) -> Any:
        sizes = np.ldexp(np.float32(1.0), rng.integers(-20, 20, (shape[0], *[1] * (len(shape) - 1))))
        return rng.normal(size=shape).astype(np.float32) * sizes

    x, y = normal(rows, width), normal(rows, width)
    matrix, bias = exact.prepare_matrix(normal(7, width), "w"), normal(7)
    heads, angles = normal(rows, 2, HEAD_DIM), rng.normal(size=(rows, HEAD_DIM // 2))
    windows = [normal(TAPS - 1 + tokens, width) for tokens in (1, rows, 2)]
    window, taps = normal(rows + TAPS - 1, width), normal(width, TAPS)
    outputs, weights = normal(rows, 2, width), normal(rows, 2)
    scale = integers.attention_scale(normal(HEAD_DIM), normal(HEAD_DIM), normal(2 * HEAD_DIM, width))
    return {
        "add": lambda: exact.add(x, y),
        "multiply": lambda: exact.multiply(x, y),
        "linear": lambda: exact.linear(x, matrix, bias),
        "norm": lambda: exact.rms_norm(x, y[0], 1e-5),
        "head norms": lambda: exact.rms_norm(heads, heads[0, 0], 1e-5),
        "gate": lambda: exact.swiglu(x, y),
        "keys": lambda: exact_attention.on_grid(heads, np.arange(HEAD_DIM, dtype=np.int32)),
        "values": lambda: np.dstack(exact_attention.value_units(heads, scale)),
        "rotation": lambda: exact.rotate(heads, np.cos(angles), np.sin(angles)),
        "convolution": lambda: exact.convolve_ragged([window], taps, y[0]),
        "convolutions": lambda: exact.convolve_ragged(windows, taps, y[0]),
        "experts": lambda: exact.combine_experts(outputs, weights),
    }


@given(st.integers(0, 2**32), COUNTS, st.integers(1, 70), st.integers(1, 33), st.sampled_from([1, 8, 100]))
def test_no_bit_depends_on_the_number_of_threads(seed: int, count: int, rows: int, width: int, least: int) -> None:
    for name, compute in operations(np.random.default_rng(seed), rows, width).items():
        with threads(1):
            alone = compute()
        with threads(count, least):
            assert compute().tobytes() == alone.tobytes(), name


def computed_by_two() -> bool:
    """Whether another thread computes a piece while this one does."""
    both = threading.Barrier(2)
    with threads(2):
        over_pieces(lambda rows: both.wait(timeout=30), 2, 8)
    return True


def test_several_threads_do_compute() -> None:
    """The control of the test above."""
    assert computed_by_two()


@pytest.mark.parametrize("in_helper", [True, False])
def test_what_a_piece_raises_is_raised_and_nothing_computes_any_more(in_helper: bool) -> None:
    begun: list[slice] = []

    def compute(rows: slice) -> None:
        begun.append(rows)
        time.sleep(0.001)
        if in_helper == (threading.current_thread() is not threading.main_thread()):
            raise MemoryError("of the piece")

    with threads(3), pytest.raises(MemoryError, match="of the piece"):
        over_pieces(compute, 800, 1, 8)
    require_stopped(begun)


def require_stopped(begun: list[slice]) -> None:
    """Some of 100 pieces were not begun, and none is."""
    seen = len(begun)
    assert seen < 50
    time.sleep(0.01)
    assert len(begun) == seen


@pytest.fixture
def interrupts() -> Iterator[None]:
    """As in a terminal: what a shell runs in the background may have them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_of_the_caller_comes_at_once_and_leaves_nothing_computing() -> None:
    begun: list[slice] = []
    by_caller: list[slice] = []

    def compute(rows: slice) -> None:
        begun.append(rows)
        if threading.current_thread() is threading.main_thread():
            by_caller.append(rows)
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.001)

    with threads(3), pytest.raises(KeyboardInterrupt):
        over_pieces(compute, 800, 1, 8)
    assert len(by_caller) == 1
    require_stopped(begun)


class Interrupted(pieces.SimpleQueue):  # type: ignore[type-arg]
    """Where work is handed out, with an interrupt when it has taken one."""

    def put(self, *work: Any) -> None:  # type: ignore[override]
        super().put(*work)
        time.sleep(0.01)
        raise KeyboardInterrupt


def slowly(begun: list[slice]) -> Callable[[slice], None]:
    def compute(rows: slice) -> None:
        begun.append(rows)
        time.sleep(0.001)

    return compute


def test_an_interrupt_while_work_is_handed_out_leaves_nothing_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[slice] = []
    monkeypatch.setattr(pieces, "_handed_out", Interrupted())
    monkeypatch.setattr(pieces, "_helpers", [])
    with threads(3), pytest.raises(KeyboardInterrupt):
        over_pieces(slowly(begun), 800, 1, 8)
    require_stopped(begun)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_of_the_wait_for_others_comes_when_they_are_done() -> None:
    """The caller has no piece any more, and another thread still has one."""
    ended, main = [], threading.main_thread()

    def compute(rows: slice) -> None:
        if threading.current_thread() is main:
            time.sleep(0.01)
            return
        time.sleep(0.03)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        ended.append(rows)

    with threads(2), pytest.raises(KeyboardInterrupt):
        for _ in range(100):  # until the other thread had one
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
            over_pieces(slowly(seen), 80, 1, 8)
            whole.append(len(seen) == 10)

    with threads(4):
        other = threading.Thread(target=add)
        other.start()
        add()
        other.join()
    assert whole == [True] * 100
    if not had:
        assert pieces._handed_out.empty()


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


@pytest.mark.parametrize(("given", "more"), [("1", 0), ("2", 1), ("3", 2)])
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


@pytest.mark.parametrize(("given", "expected"), [({}, "20"), ({"OPENBLAS_THREAD_TIMEOUT": "26"}, "26")])
def test_the_threads_of_blas_are_told_to_rest_unless_somebody_told_them_otherwise(
    given: dict[str, str], expected: str
) -> None:
    """While they wait for the next product they would keep the cores from the threads here. A command says so before
    NumPy is loaded; the package changes nothing in a process that imports it."""
    asked = "import os; before = dict(os.environ); import lfm2np; lfm2np.load; "
    command = "import os, lfm2np.commands.cli; "
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_THREAD_TIMEOUT"} | given
    for words, shown in (
        (asked + "print(before == dict(os.environ))", "True"),
        (command + "print(os.environ['OPENBLAS_THREAD_TIMEOUT'])", expected),
        ("import sys, lfm2np; print('numpy' in sys.modules)", "False"),  # so that a command can say so in time
    ):
        ran = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout == f"{shown}\n"
