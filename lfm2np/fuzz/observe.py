"""What a server reports about itself: active requests, memory in use, hits, preemptions. Any of it may be missing."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping

from lfm2np.errors import RequestError
from lfm2np.oracle.targets import dialects
from lfm2np.oracle.targets.http_client import HttpClient, HttpError
from lfm2np.oracle.targets.records import parse_line
from lfm2np.oracle.targets.target import TargetError

SLOTS = "busy slots"
PAUSE = 0.05  # seconds between two requests


def metrics_of(text: str) -> dict[str, float]:
    """Prometheus' text format: the sum of each name's samples; lines of another form are skipped."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.split("{")[0].split(" ")[0]
        if not name or line.startswith("#"):
            continue
        with contextlib.suppress(ValueError, IndexError):
            sums[name] = sums.get(name, 0.0) + float(line.rsplit("}", 1)[-1].removeprefix(name).split()[0])
    return {name: value for name, value in sums.items() if math.isfinite(value)}


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
