"""One process that computes pages, one after another; it is ended and made anew where a run takes too long or dies."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from lfm2np.system import session
from lfm2np.teaching.lab.lab_page import FAILED, NO_MEMORY

COMMAND = (sys.executable, "-m", "lfm2np.teaching.lab.child")
SECONDS = 30.0  # of a run
MOST_KEPT, MOST_BYTES = 8, 64 * 2**20  # pages, and characters of them
KEPT = (200, 400)  # what a link always gives
TOO_LONG = 504


@dataclass(frozen=True)
class Reply:
    """A page where the status is 200 or 400, else one sentence."""

    status: int
    text: str


class Worker:
    """Use it as a context manager: the process is there until its end, and no longer.

    seconds   that a run may take
    command   what is started; another one is for tests
    """

    def __init__(self, seconds: float = SECONDS, command: Sequence[str] = COMMAND) -> None:
        self._seconds, self._command = seconds, tuple(command)
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # one run at a time
        self._state = threading.Lock()  # of the child and the kept pages
        self._kept: OrderedDict[str, Reply] = OrderedDict()
        self._closed = False

    def __enter__(self) -> Self:
        with self._lock:
            self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, also in the middle of a run."""
        with self._state:
            self._closed = True
            self._end()

    @property
    def pid(self) -> int | None:
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    def kept(self, query: str) -> Reply | None:
        with self._state:
            if query in self._kept:
                self._kept.move_to_end(query)
            return self._kept.get(query)

    def reply(self, query: str) -> Reply:
        """Waits for runs before it, and then for its own."""
        with self._lock:
            reply = self.kept(query)
            if reply is None:
                reply = self._run(query)
                if reply.status in KEPT:
                    self._keep(query, reply)
            return reply

    def _keep(self, query: str, reply: Reply) -> None:
        with self._state:
            self._kept[query] = reply
            while len(self._kept) > MOST_KEPT or sum(len(page.text) for page in self._kept.values()) > MOST_BYTES:
                self._kept.popitem(last=False)

    def _run(self, query: str) -> Reply:
        child = self._start()
        if child is None:
            return Reply(FAILED, "the laboratory has ended")
        with self._ended_when_late(child) as late:
            reply = ask(child, query)
        if reply is None:
            self._drop(child)
            if late.is_set():
                return Reply(TOO_LONG, f"the run took longer than {self._seconds:g} s and was stopped")
            return Reply(FAILED, "the process that computes the run died; the next run has a new one")
        if reply.status == NO_MEMORY:  # what it still holds is not known
            self._drop(child)
        return reply

    @contextlib.contextmanager
    def _ended_when_late(self, child: subprocess.Popen[bytes]) -> Iterator[threading.Event]:
        late, done = threading.Event(), threading.Lock()

        def end() -> None:
            if done.acquire(blocking=False):
                late.set()
                child.kill()

        timer = threading.Timer(self._seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield late
        finally:
            done.acquire(blocking=False)  # an answer that is there counts, however late
            timer.cancel()

    def _start(self) -> subprocess.Popen[bytes] | None:
        """The process; None once the worker is closed."""
        with self._state:
            if self._closed:
                return None
            if self._child is None or self._child.poll() is not None:
                self._end()
                # One thread: the matrices are small. A session of its own: an interrupt from the terminal drains.
                self._child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                    **session(),
                )
            return self._child

    def _drop(self, child: subprocess.Popen[bytes]) -> None:
        with self._state:
            if self._child is child:
                self._end()

    def _end(self) -> None:
        """Kills the process and waits for it, so that nothing stays behind."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def ask(child: subprocess.Popen[bytes], query: str) -> Reply | None:
    """None where the process ended before its answer was whole."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(json.dumps(query).encode() + b"\n")
        child.stdin.flush()
        head = child.stdout.readline().split()
        if len(head) != 2:
            return None
        status, length = int(head[0]), int(head[1])
        content = child.stdout.read(length)
    except (OSError, ValueError):  # a broken pipe, or one that was closed meanwhile
        return None
    return Reply(status, content.decode()) if len(content) == length else None
