"""A child process that exchanges lines, and may misbehave: hang, die, flood, leave children behind.

Three threads keep the pipes from blocking: one writes what is to be sent, one reads whole lines, one drains stderr and
keeps its end for messages. The process leads its own session, and is ended with all that it started.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from lfm2np.child_processes import kill_session, session, split_command
from lfm2np.errors import RequestError
from lfm2np.oracle.targets.records import shortened
from lfm2np.oracle.targets.target import TargetError

MAX_LINE = 64 * 2**20
KEPT_OF_A_LONG_LINE = 2**16  # enough to tell which request it answers
WAITING_LINES = 8
STDERR_LINES, STDERR_CHARACTERS = 10, 500
GRACE = 5.0  # seconds for a process to end by itself
SILENCE_AFTER_THE_END = 2.0  # seconds


@dataclass(frozen=True)
class Line:
    """One line without its end. With a `fault`, `content` is only its beginning."""

    content: bytes
    fault: str | None = None


class LineProcess:
    """The process of a command, which gets `patience` seconds for a line.

    RequestError for an invalid command, TargetError if it can't be started.
    """

    def __init__(self, command: str, patience: float) -> None:
        if not patience > 0:
            raise RequestError(f"patience {patience}: expected seconds, more than 0")
        self.command, self.patience = command, min(patience, threading.TIMEOUT_MAX)
        self._process = start(command)
        self._lines: queue.Queue[Line | None] = queue.Queue(maxsize=WAITING_LINES)  # None: there will be no more
        self._to_send: queue.Queue[bytes | None] = queue.Queue()
        self._stderr: deque[bytes] = deque(maxlen=STDERR_LINES)
        self._closing = threading.Event()
        self._killed = False
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._stderr_thread = start_thread(self._drain_stderr, process.stderr)
        self._threads = [
            self._stderr_thread,
            start_thread(self._read_lines, process.stdout),
            start_thread(self._write_lines, process.stdin),
        ]

    def send(self, line: str) -> None:
        """Never waits: a process that does not read is noticed when it does not answer."""
        self._to_send.put(line.encode() + b"\n")

    def receive(self, since: float) -> Line:
        """The next line. TargetError if the process is gone, or silent since then (time.monotonic) for too long."""
        deadline = since + self.patience
        while True:
            ended = self._process.poll() is not None  # its children may keep the pipe open and write nothing
            until = min(deadline, time.monotonic() + SILENCE_AFTER_THE_END) if ended else deadline
            wait = max(0.0, until - time.monotonic())
            try:
                line = self._lines.get(timeout=wait if ended else min(wait, 0.2))
            except queue.Empty:
                if ended or time.monotonic() >= deadline:
                    raise TargetError(self.complaint("" if ended else f"no answer in {self.patience:g} s")) from None
                continue
            if line is None:
                self._lines.put(None)  # for the next call
                raise TargetError(self.complaint(""))
            return line

    def complaint(self, what: str) -> str:
        """What it did, how it ended if it has, and the end of its stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not what:
                self._process.wait(timeout=1.0)
        code = self._process.poll()
        if code is None:
            parts = [what or "it closed its output, and still runs"]
        else:
            parts = [*([what] if what else []), f"it ended {how_it_ended(code)}"]
            self._kill()  # its children, which would keep stderr open
            self._stderr_thread.join(timeout=1.0)
        lines = [shortened(line.decode(errors="replace"), STDERR_CHARACTERS) for line in list(self._stderr)]
        last = " | ".join(line for line in lines if line)
        last = last if len(last) <= STDERR_CHARACTERS else f"...{last[-STDERR_CHARACTERS:]}"
        parts.append(f"last on stderr: {last}" if last else "nothing on stderr")
        return f"exec:{shortened(self.command, 200)}: {'; '.join(parts)}"

    def close(self, grace: float = GRACE) -> None:
        """Closes its input, and after `grace` seconds kills it and all that it started. Any number of times."""
        self._to_send.put(None)
        end = time.monotonic() + grace
        while self._process.poll() is None and time.monotonic() < end:
            self._discard_lines()
            time.sleep(0.01)
        self._closing.set()
        self._kill()
        for thread in self._threads:
            thread.join(timeout=1.0)  # one may stay, if another process keeps the pipe open

    def _discard_lines(self) -> None:
        """At most as many as the queue holds: they are not needed any more, and the process must not block on them."""
        with contextlib.suppress(queue.Empty):
            for _ in range(WAITING_LINES):
                if self._lines.get_nowait() is None:
                    self._lines.put(None)
                    return

    def _kill(self) -> None:
        """The whole session, once, as its number may be reused later. Waits for its leader."""
        if self._killed:
            return
        self._killed = True
        kill_session(self._process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=GRACE)

    # --- the threads

    def _write_lines(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the process is gone: the reader will notice
            while (line := self._to_send.get()) is not None:
                pipe.write(line)
                pipe.flush()
        with contextlib.suppress(OSError):
            pipe.close()

    def _read_lines(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError), pipe:
            while content := pipe.readline(MAX_LINE + 1):
                if not self._put(checked_line(content, pipe)):
                    return
        self._put(None)

    def _put(self, line: Line | None) -> bool:
        """Whether it is still needed. Waits while the queue is full, so that a flood does not fill the memory."""
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                self._lines.put(line, timeout=0.1)
                return True
        return False

    def _drain_stderr(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError), pipe:
            while line := pipe.readline(4096):
                self._stderr.append(line)


def start(command: str) -> subprocess.Popen[bytes]:
    """The process of a command line, without a shell."""
    try:
        words = split_command(command)
    except ValueError as problem:
        raise RequestError(f"exec:{command}: {problem}, expected a command as a shell would split it") from None
    if not words:
        raise RequestError("exec: without a command, expected exec:COMMAND")
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **session(),
        )
    except (OSError, ValueError) as problem:  # ValueError: a NUL in a word
        raise TargetError(f"exec:{command}: can't be started: {problem}") from None


def start_thread(work: Callable[[IO[bytes]], None], pipe: IO[bytes]) -> threading.Thread:
    thread = threading.Thread(target=work, args=(pipe,), daemon=True)
    thread.start()
    return thread


def checked_line(content: bytes, pipe: IO[bytes]) -> Line:
    """What readline() returned, whole or with its fault. The rest of a line that is too long is skipped."""
    if content.endswith(b"\n"):
        return Line(content[:-1])
    if len(content) <= MAX_LINE:
        return Line(content[:KEPT_OF_A_LONG_LINE], "half a line, and then its output ended")
    while (rest := pipe.readline(2**20)) and not rest.endswith(b"\n"):
        pass
    return Line(content[:KEPT_OF_A_LONG_LINE], f"a line of more than {MAX_LINE} bytes")


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
