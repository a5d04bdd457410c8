"""The only thread that touches the engine, and what the event loop knows of requests in progress.

Requests join and leave between steps. An exception in a step ends the engine: running requests get it, and so do those
that come later.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from lfm2np.commands.serve.settings import Refusal
from lfm2np.engine.engine import Engine
from lfm2np.engine.outputs import RequestOutput, RunMetrics
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError

RETRY = {"Retry-After": "1"}


@dataclass(frozen=True)
class Job:
    """One prompt of a client's request, as the engine takes it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""


@dataclass(eq=False)
class Call:
    """A client's request, for the event loop.

    places   of `max_requests` that it takes
    outputs  the latest of each job, by its request id
    problem  that ended it
    """

    places: int
    jobs: Sequence[Job] = ()
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    problem: Exception | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, problem: Exception) -> None:
        self.problem = self.problem or problem
        self.changed.set()

    async def changes(self) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
        """Outputs so far with their prompt's number, at each change, until all are finished; or raises the problem."""
        is_finished = False
        while not is_finished:
            await self.changed.wait()
            self.changed.clear()
            if self.problem is not None:
                raise self.problem
            outputs = [(index, self.outputs.get(job.request_id)) for index, job in enumerate(self.jobs)]
            is_finished = all(output is not None and output.finished for _, output in outputs)
            yield [(index, output) for index, output in outputs if output is not None]


@dataclass(frozen=True)
class State:
    running: int
    waiting: int
    num_blocks: int
    used_blocks: int  # that requests hold; cached ones are free
    metrics: RunMetrics

    @property
    def usage(self) -> float:
        return self.used_blocks / self.num_blocks


class EngineThread:
    """An engine and its thread. Its public methods are the event loop's only."""

    def __init__(self, engine: Engine, max_requests: int) -> None:
        self._engine, self._max_requests = engine, max_requests
        self._loop = asyncio.get_running_loop()
        self._calls: set[Call] = set()
        self._by_id: dict[str, Call] = {}  # of each job that has not ended
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_stopping = False
        self.broken: str | None = None  # what ended the engine
        self.state = state_of(engine)
        self._thread = threading.Thread(target=self._run, name="lfm2np-engine", daemon=True)
        self._thread.start()

    @property
    def num_places(self) -> int:
        return sum(call.places for call in self._calls)

    @contextlib.contextmanager
    def entered(self, places: int) -> Iterator[Call]:
        """A call for so many prompts times samples; what it holds is free when the block ends.

        RequestError if there can't be so many, Refusal if not now.
        """
        if self.broken is not None:
            raise Refusal(503, f"the engine ended: {self.broken}")
        if places > self._max_requests:
            raise RequestError(f"{places} prompts times samples: expected at most {self._max_requests}")
        if places + self.num_places > self._max_requests:
            others = f"{self.num_places} are in progress: expected at most {self._max_requests} together"
            raise Refusal(429, f"{places} prompts times samples, and {others}", headers=RETRY)
        call = Call(places)
        self._calls.add(call)
        try:
            yield call
        finally:
            self._free(call)

    def start(self, call: Call, jobs: Sequence[Job]) -> None:
        if call.problem is None:
            call.jobs = jobs
            self._by_id |= {job.request_id: call for job in jobs}
            self._commands.put(lambda: self._add(jobs))

    def end(self, call: Call, problem: Exception) -> None:
        """What it holds is free at once, whether its client reads that or not."""
        call.fail(problem)
        self._free(call)

    def stop(self) -> None:
        """After the current step; waits for that, so it may be called from any thread."""
        self._commands.put(self._stop)
        self._thread.join()

    def _free(self, call: Call) -> None:
        self._calls.discard(call)
        names = [job.request_id for job in call.jobs if self._by_id.pop(job.request_id, None)]
        if names:
            self._commands.put(lambda: self._abort(names))

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            call = self._by_id.get(output.request_id)
            if call is None:  # aborted meanwhile
                continue
            if output.finished:
                del self._by_id[output.request_id]
            call.outputs[output.request_id] = output
            call.changed.set()
            for sample in output.outputs:
                if sample.error is not None:
                    call.fail(Refusal(500, sample.error))

    def _refuse(self, request_id: str, problem: Exception) -> None:
        if request_id in self._by_id:
            self._by_id[request_id].fail(problem)

    def _break(self, why: str) -> None:
        self.broken = why
        for call in self._calls:
            call.fail(Refusal(500, why))

    # --- in the engine's thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._carry_out()
                outputs = self._engine.step() if self._engine.has_unfinished and not self._is_stopping else []
                self.state = state_of(self._engine)
                self._in_loop(self._deliver, outputs)
        except Exception as problem:
            self._in_loop(self._break, f"{type(problem).__name__}: {problem}")

    def _in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            self._loop.call_soon_threadsafe(function, *arguments)

    def _carry_out(self) -> None:
        """All commands that are there; waits for one if there is nothing to compute."""
        if not self._engine.has_unfinished:
            self._commands.get()()
        with contextlib.suppress(Empty):
            while True:
                self._commands.get_nowait()()

    def _add(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            try:
                self._engine.add_request(job.request_id, job.prompt_token_ids, job.params, job.priority, job.cache_salt)
            except RequestError as problem:  # one of several prompts ends all of its call
                self._in_loop(self._refuse, job.request_id, problem)
                return

    def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._engine.discard(name)

    def _stop(self) -> None:
        self._is_stopping = True


def state_of(engine: Engine) -> State:
    scheduler, num_blocks = engine.scheduler, engine.scheduler.config.num_blocks
    used = num_blocks - scheduler.pool.num_free
    return State(len(scheduler.running), len(scheduler.waiting), num_blocks, used, replace(engine.metrics))
