"""A server: started by --start COMMAND, and restarted when it is gone; and what it reports about itself.

Active requests, memory in use, hits, preemptions: any of it may be missing.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping
from subprocess import DEVNULL

from lfm2np.errors import RequestError
from lfm2np.oracle.engines import dialects
from lfm2np.oracle.engines.http_client import HttpClient, HttpError, metrics_of
from lfm2np.oracle.engines.records_json import parse_line
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


SLOTS = "busy slots"
PAUSE = 0.05  # seconds between two requests


class Watcher:
    """Watches one server. What it does not report at the beginning is not requested again."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._has_metrics, self._has_slots = True, True
        first = self.metrics()
        self._has_metrics = bool(first)
        self._has_slots = self.busy_slots() is not None

    def metrics(self) -> dict[str, float]:
        if self._has_metrics:
            with contextlib.suppress(HttpError, TargetError):
                return metrics_of(self._client.get_text("/metrics"))
        return {}

    def busy_slots(self) -> int | None:
        """Of llama.cpp's /slots."""
        if self._has_slots:
            with contextlib.suppress(HttpError, TargetError, RequestError):
                slots = parse_line(self._client.get_text("/slots"), "/slots")
                if isinstance(slots, list) and slots and all(isinstance(slot, dict) for slot in slots):
                    return sum(bool(slot.get("is_processing")) for slot in slots)
        return None

    def held(self) -> dict[str, float]:
        """Active requests and memory in use, as far as the server reports them."""
        metrics = self.metrics()
        names = [name for each in dialects.DIALECTS for name in (*each.metrics.active, *each.metrics.memory)]
        held = {name: metrics[name] for name in names if name in metrics}
        busy = self.busy_slots()
        return held if busy is None else {**held, SLOTS: float(busy)}

    def leak(self, before: Mapping[str, float], patience: float) -> str | None:
        """What is not freed within so many seconds, beyond what was held before.

        So no trace is blamed for what an earlier one left behind, and cached memory that a server counts as used is no
        leak.
        """
        until = time.monotonic() + patience
        while (more := more_than(before, self.held())) is not None and time.monotonic() < until:
            time.sleep(PAUSE)
        return more


def more_than(before: Mapping[str, float], now: Mapping[str, float]) -> str | None:
    for name, value in now.items():
        if value > before.get(name, 0.0):
            return f"{name} {value:g}, expected {before.get(name, 0.0):g} as before"
    return None


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By how much the counters rose."""
    names = [name for dialect in dialects.DIALECTS for name in dialect.metrics.counters]
    return {name: after[name] - before.get(name, 0.0) for name in names if name in after}
