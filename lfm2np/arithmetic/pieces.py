"""Work cut into pieces, so that temporary arrays stay small and every core has some of them.

In exact arithmetic no choice here can change a bit: a piece is rows, and a row depends on nothing but itself.

The only threads that this library uses for arithmetic start here. NumPy releases the interpreter's lock during an
operation, and getting it back may take longer than an operation on a few thousand numbers. So a thread's piece is
large, and work that is too small for two pieces stays on the caller's thread. Of matrix products only those are cut
into pieces that BLAS leaves to one core: of attention, and of tiles.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np import system
from lfm2np.errors import NumericsError
from lfm2np.truth.processor import require_ieee

PIECE = 2**18  # elements: a float64 temporary of that size stays in the cache
SCORES = 2**22  # bytes of attention scores that are computed together: most such batches occupy two threads
PRODUCTS = 2**20  # elements of products that wait to be rounded: memory is reused, not mapped again
SMALL_PIECE = 2**15  # elements, on a single thread, where many operations run over one temporary
THREAD_PIECE = 2**18  # elements, for one of several threads, which wait less for each other in long operations
LEAST_PIECE = 2**17  # elements that are worth a thread: at half of it softmax gained as much as norms lost
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def threads_of(environment: Mapping[str, str]) -> int:
    """As many as BLAS would take: the first variable that is a number above 0, else the cores of this process.

    One where the system has no threads.
    """
    if not system.HAS_THREADS:
        return 1
    for name in THREAD_VARIABLES:
        value = environment.get(name, "").strip()
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


THREADS = threads_of(os.environ)  # that compute pieces, the caller's among them; read when BLAS reads it


def pieces(count: int, elements: int, limit: int | None = None) -> Iterator[slice]:
    """Slices of range(count) so that `elements` each stay within `limit` (PIECE) together."""
    step = max(1, (limit or PIECE) // max(1, elements))
    return (slice(start, min(count, start + step)) for start in range(0, count, step))


def over_pieces(function: Callable[[slice], object], count: int, elements: int, limit: int | None = None) -> None:
    """function(rows) once for each slice of range(count), whose rows have `elements` each, on THREADS if that pays.

    limit  elements of a piece; None: SMALL_PIECE on one thread, THREAD_PIECE on several, less if that gives work to all

    Returns when all are done. The caller's thread computes pieces too, and all of them if there is no other thread. The
    others run in copies of its context, which includes NumPy's errstate. An exception or interrupt is re-raised here:
    pieces that have not started are skipped, and those under way are waited for.
    """
    threads = worth_threads(count, elements)
    if threads < 2:
        for rows in pieces(count, elements, limit or SMALL_PIECE):
            function(rows)
        return
    shared = Shared(
        function, deque(pieces(count, elements, min(limit or THREAD_PIECE, -(-count * elements // threads))))
    )
    try:
        for _ in range(min(threads - 1, len(shared.waiting) - 1, num_helpers())):
            _handed_out.put((copy_context(), shared))
        shared.compute()
    finally:
        shared.close()
    if shared.error is not None:
        raise shared.error


class Shared:
    """The pieces of one call, which several threads take one after another."""

    def __init__(self, function: Callable[[slice], object], waiting: deque[slice]) -> None:
        self.function, self.waiting = function, waiting
        self.error: BaseException | None = None  # of a helper
        self._helping = 0
        self._change = threading.Condition()

    def compute(self) -> None:
        """Until none is left."""
        while (rows := next_piece(self.waiting)) is not None:
            self.function(rows)

    def help(self, refusal: str | None) -> None:
        """The same in another thread, unless the caller has gone already; `refusal` says why it must not compute."""
        with self._change:
            self._helping += 1
        try:
            if refusal is not None:
                raise NumericsError(f"a thread of lfm2np: {refusal}")
            self.compute()
        except BaseException as problem:
            self.waiting.clear()
            self.error = problem
        finally:
            with self._change:
                self._helping -= 1
                self._change.notify_all()

    def close(self) -> None:
        """No piece is begun any more; waits for those under way, whatever interrupts that."""
        interrupt: BaseException | None = None
        while True:
            try:
                self.waiting.clear()
                with self._change:
                    while self._helping:
                        self._change.wait()
                break
            except BaseException as problem:
                interrupt = problem
        if interrupt is not None:
            raise interrupt


def worth_threads(count: int, elements: int) -> int:
    """How many threads work on so many rows of so many elements each is worth; 0 or 1: the caller's."""
    return min(THREADS, count, count * elements // LEAST_PIECE)


def row_size(x: NDArray[Any]) -> int:
    """Elements of a row of x [rows, ...]."""
    return x.size // max(1, len(x))


def elementwise(operation: np.ufunc, x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """The operation on two arrays of one shape."""
    output = np.empty(x.shape, np.result_type(x, y))
    over_pieces(lambda rows: operation(x[rows], y[rows], out=output[rows]), len(x), row_size(x))
    return output


def next_piece(waiting: deque[slice]) -> slice | None:
    """The first of those that no thread has begun; None if there is none."""
    with suppress(IndexError):
        return waiting.popleft()
    return None


_handed_out: SimpleQueue[tuple[Context, Shared]] = SimpleQueue()
_helpers: list[threading.Thread] = []  # started by the first work that is large enough; they end with the interpreter
_starting = threading.Lock()


def num_helpers() -> int:
    """Threads beside the caller's, which are started if they are not there; fewer where none can be had."""
    with _starting, suppress(RuntimeError):  # no thread to be had, or the interpreter is ending
        while len(_helpers) < THREADS - 1:
            thread = threading.Thread(target=help_others, args=(_handed_out,), name="lfm2np-pieces", daemon=True)
            thread.start()
            _helpers.append(thread)
    return len(_helpers)


def help_others(handed_out: SimpleQueue[tuple[Context, Shared]]) -> None:
    """Whether subnormals are flushed is a property of a thread, inherited from its parent: each checks itself once."""
    refusal: str | None = None
    try:
        require_ieee()
    except NumericsError as problem:
        refusal = str(problem)
    while True:
        context, shared = handed_out.get()
        context.run(shared.help, refusal)
        del context, shared  # and the arrays that they hold, while it waits


def forget_helpers() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _handed_out, _starting
    _handed_out, _starting = SimpleQueue(), threading.Lock()
    _helpers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_helpers)
