"""A server that is started by --start COMMAND, and started again when it is gone."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from subprocess import DEVNULL

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.http_client import HttpClient, HttpError
from lfm2np.oracle.engines.target import TargetError
from lfm2np.system import kill_session, session, split_command, terminate_session

GRACE, LOOK = 10.0, 0.02  # seconds


class StartedServer:
    """The process of a command and all that it starts, in a session of its own.

    is_up    whether it answers
    seconds  that it may take until it does
    """

    def __init__(self, command: str, is_up: Callable[[], bool], seconds: float) -> None:
        try:
            self._words = split_command(command)
        except ValueError as problem:
            raise RequestError(f"--start {command!r}: {problem}") from None
        if not self._words:
            raise RequestError("--start: expected a command")
        self._is_up, self._seconds = is_up, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self.took = 0.0  # seconds, the last time

    def start(self) -> None:
        """Stops it if it runs, starts it, and waits until it answers. TargetError if it does not, or if another server
        answers there, which would be tested in its place."""
        self.close()
        until = time.monotonic() + GRACE
        while self._is_up():
            if time.monotonic() > until:
                raise TargetError(f"--start {self._words[0]}: another server answers there already, expected none")
            time.sleep(LOOK)
        try:
            self._process = subprocess.Popen(self._words, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, **session())
        except OSError as problem:
            raise TargetError(f"--start {self._words[0]}: {problem.strerror or problem}") from None
        began = time.monotonic()
        until = began + self._seconds
        while not self._is_up():
            if self._process.poll() is not None:
                raise TargetError(
                    f"--start {self._words[0]}: it ended with {self._process.returncode} before it answered"
                )
            if time.monotonic() > until:
                self.close()
                raise TargetError(f"--start {self._words[0]}: no answer within {self._seconds:g} s")
            time.sleep(LOOK)
        self.took = time.monotonic() - began

    def close(self) -> None:
        """Terminates it, then kills it. Any number of times."""
        process, self._process = self._process, None
        if process is None:
            return
        for end in (terminate_session, kill_session):
            end(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def answers(url: str) -> bool:
    """Whether a server is ready there: llama.cpp answers 503 while it loads."""
    client = HttpClient(url, 5.0, retries=0)
    try:
        client.get_text("/health")
    except HttpError as problem:
        return problem.status is not None and problem.status < 500
    except TargetError:
        return False
    finally:
        client.close()
    return True
