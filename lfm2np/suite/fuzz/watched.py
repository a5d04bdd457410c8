"""A server under fuzzing: after each trace, whether it is still there, and keeps nothing.

It may report active requests and memory in use: any of it may be missing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.errors import RequestError
from lfm2np.oracle.engines import dialects
from lfm2np.oracle.engines.http_client import BadReply, HttpError, TimedOut, metrics_of
from lfm2np.oracle.engines.http_target import HttpTarget
from lfm2np.oracle.engines.records import BROKEN, DEAD, MOST_REQUESTS, Request, Trace
from lfm2np.oracle.engines.records_json import parse_line
from lfm2np.oracle.engines.target import LEAK, Answers, Played, TargetError, Trouble

HEALTH_CHECKS, HEALTH_PAUSE = 8, 0.25  # times, seconds
PATIENCE = 20.0  # seconds for memory and slots to come free; less if an answer may take less
SLOTS = "busy slots"
PAUSE = 0.05  # seconds between two requests


def more_than(before: Mapping[str, float], now: Mapping[str, float]) -> str | None:
    for name, value in now.items():
        if value > before.get(name, 0.0):
            return f"{name} {value:g}, expected {before.get(name, 0.0):g} as before"
    return None


class WatchedServer(HttpTarget):
    """One server. `timeout` is seconds for one answer: a server that takes longer hangs. `fields` are added to each
    request."""

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer | None,
        name: str | None,
        timeout: float,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(url, tokenizer, name, MOST_REQUESTS, timeout, retries=0, fields=fields)
        self.timeout = timeout

    @cached_property
    def sources(self) -> list[Callable[[], Mapping[str, float]]]:
        """What it reports when it is idle, before the first trace: what it does not is not requested again."""
        return [source for source in (self._metrics, self._busy_slots) if source()]

    def _metrics(self) -> dict[str, float]:
        """Active requests and memory in use."""
        with contextlib.suppress(HttpError, TargetError):
            metrics = metrics_of(self.client.get_text("/metrics"))
            names = [name for each in dialects.DIALECTS for name in (*each.metrics.active, *each.metrics.memory)]
            return {name: metrics[name] for name in names if name in metrics}
        return {}

    def _busy_slots(self) -> dict[str, float]:
        """Of llama.cpp's /slots."""
        with contextlib.suppress(HttpError, TargetError, RequestError):
            slots = parse_line(self.client.get_text("/slots"), "/slots")
            if isinstance(slots, list) and slots and all(isinstance(slot, dict) for slot in slots):
                return {SLOTS: float(sum(bool(slot.get("is_processing")) for slot in slots))}
        return {}

    def held(self) -> dict[str, float]:
        return {name: value for source in self.sources for name, value in source().items()}

    def leak(self, before: Mapping[str, float], patience: float) -> str | None:
        """What is not freed within so many seconds, beyond what was held before.

        So no trace is blamed for what an earlier one left behind, and cached memory that a server counts as used is no
        leak.
        """
        until = time.monotonic() + patience
        while (more := more_than(before, self.held())) is not None and time.monotonic() < until:
            time.sleep(PAUSE)
        return more

    def body(self, request: Request) -> dict[str, Any]:
        """What is sent for the request."""
        return super().body(self.with_text(request))

    def play(self, trace: Trace) -> Played:
        held = self.held()
        return Played(*self._server_trouble(super().play(trace).answers, held))

    def _server_trouble(
        self, answers: tuple[Answers, ...], held: Mapping[str, float]
    ) -> tuple[tuple[Answers, ...], Trouble | None]:
        """Whether the server is gone, be it by a request that nobody waited for, or keeps something though all requests
        have ended. If it is still there, it only refused a connection."""
        bad = [answer.error for some in answers for answer in some if answer.error is not None]
        if not self._is_there():
            why = f": {bad[0]}" if bad else ", though every request that was waited for was answered"
            return answers, Trouble(DEAD, f"{self.client.place}: no connection any more{why}")
        if bad:
            return tuple(map(still_there, answers)), None
        more = self.leak(held, min(PATIENCE, self.timeout))
        return answers, None if more is None else Trouble(LEAK, f"all requests have ended, but {more}")

    def _is_there(self) -> bool:
        """A process that dies may accept connections for a moment more, and break them."""
        for _ in range(HEALTH_CHECKS):
            try:
                self.client.get_text("/health")
            except TargetError:
                return False
            except HttpError as problem:
                if problem.status is not None or isinstance(problem, BadReply | TimedOut):
                    break
                time.sleep(HEALTH_PAUSE)
            else:
                break
        return True


def still_there(answers: Answers) -> Answers:
    """A server that answers is not dead."""
    return tuple(replace(answer, kind=BROKEN) if answer.kind == DEAD else answer for answer in answers)
