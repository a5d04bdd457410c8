"""A server under fuzzing: after each trace, whether it is still there, keeps nothing, and what its counters show."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.oracle.engines.http_client import BadReply, HttpError, TimedOut
from lfm2np.oracle.engines.http_target import HttpTarget
from lfm2np.oracle.engines.records import BROKEN, DEAD, MOST_REQUESTS, Request, Trace
from lfm2np.oracle.engines.target import LEAK, Abilities, Answers, Arrived, Played, TargetError, Trouble, ignored
from lfm2np.suite.fuzz.started import Watcher, counted

HEALTH_CHECKS, HEALTH_PAUSE = 8, 0.25  # times, seconds
PATIENCE = 20.0  # seconds for memory and slots to come free; less if an answer may take less


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
        self._watcher: Watcher | None = None

    def probe(self) -> Abilities:
        abilities = super().probe()
        self._watcher = self._watcher or Watcher(self.client)
        return abilities

    def body(self, request: Request) -> dict[str, Any]:
        """What is sent for the request."""
        return super().body(self.with_text(request))

    def play(self, trace: Trace, arrived: Arrived = ignored) -> Played:
        before = self._watcher.metrics() if self._watcher else {}
        held = self._watcher.held() if self._watcher else {}
        answers, trouble = self._server_trouble(super().play(trace, arrived).answers, held)
        after = self._watcher.metrics() if self._watcher and trouble is None else {}
        cached = sum(float(some[0].cached_tokens) for some in answers if some[0].cached_tokens)
        return Played(answers, trouble, {**counted(before, after), "cached prompt tokens": cached})

    def _server_trouble(
        self, answers: tuple[Answers, ...], held: Mapping[str, float]
    ) -> tuple[tuple[Answers, ...], Trouble | None]:
        """Whether the server is gone, be it by a request that nobody waited for, or keeps something though all requests
        have ended. If it is still there, it only refused a connection."""
        bad = [answer.error for some in answers for answer in some if answer.error is not None]
        if not self._is_there():
            why = f": {bad[0]}" if bad else ", though every request that was waited for was answered"
            return answers, Trouble(DEAD, f"{self.client.place}: no connection any more{why}")
        if bad or self._watcher is None:
            return tuple(map(still_there, answers)), None
        more = self._watcher.leak(held, min(PATIENCE, self.timeout))
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
