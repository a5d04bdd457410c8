"""The only thread that touches the engine: requests join and leave between its steps.

Whatever a step raises ends the engine (engine.py), and anything that goes wrong here ends the thread: then all are
told, and so is who comes later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from lfm2np.engine.engine import Engine
from lfm2np.engine.outputs import RequestOutput, RunMetrics
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import Lfm2npError, RequestError


@dataclass(frozen=True)
class Job:
    name: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class Refused:
    """A job that the engine did not take."""

    why: str


@dataclass(frozen=True)
class Failed:
    """A job whose steps failed, through no fault of its own that is known."""

    why: str


Told = RequestOutput | Refused | Failed
Tell = Callable[[Sequence[tuple[str, Told]]], None]  # what is new of jobs, by name; called in the engine's thread
Command = Callable[[], None]


@dataclass(frozen=True)
class State:
    running: int = 0
    waiting: int = 0
    num_blocks: int = 0
    used_blocks: int = 0  # that requests hold; cached ones are free
    metrics: RunMetrics = field(default_factory=RunMetrics)


class Runner:
    """An engine and its thread. All methods may be called from any thread."""

    def __init__(self, engine: Engine, tell: Tell) -> None:
        self._engine, self._tell = engine, tell
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._under_way: set[str] = set()
        self._stopping = False
        self.broken: str | None = None  # why the thread ended, unless it was told to
        self.state = state_of(engine)
        self._thread = threading.Thread(target=self._run, name="lfm2np-engine", daemon=True)
        self._thread.start()

    def add(self, jobs: Sequence[Job]) -> None:
        """They join before the same step."""
        self._commands.put(lambda: self._add(jobs))
        if self.broken is not None:  # the thread may have ended just before
            self._tell([(job.name, Failed(self.broken)) for job in jobs])

    def abort(self, names: Sequence[str]) -> None:
        """Reports no more of these, whatever their state."""
        self._commands.put(lambda: self._abort(names))

    def stop(self) -> None:
        """After the step under way; waits for that."""
        self._commands.put(self._stop)
        self._thread.join()

    # --- in the engine's thread

    def _run(self) -> None:
        try:
            while not self._stopping and self.broken is None:
                self._carry_out()
                if self._engine.has_unfinished and not self._stopping:
                    self._step()
                self.state = state_of(self._engine)
        except Exception as problem:
            self.broken = f"{type(problem).__name__}: {problem}"
        if self.broken is not None:
            self._tell([(name, Failed(self.broken)) for name in sorted(self._under_way)])
            with contextlib.suppress(Empty):
                while True:
                    self._commands.get_nowait()()

    def _carry_out(self) -> None:
        """All commands that are there; waits for one if there is nothing to compute."""
        if not self._engine.has_unfinished:
            self._commands.get()()
        with contextlib.suppress(Empty):
            while not self._stopping:
                self._commands.get_nowait()()

    def _add(self, jobs: Sequence[Job]) -> None:
        if self.broken is not None:
            self._tell([(job.name, Failed(self.broken)) for job in jobs])
            return
        taken, refused = set(self._under_way), list[tuple[str, Told]]()
        self._under_way.update(job.name for job in jobs)  # first: whatever happens, they are told
        for job in jobs:
            try:
                self._engine.add_request(job.name, job.prompt_token_ids, job.params, job.priority, job.cache_salt)
                taken.add(job.name)
            except Lfm2npError as problem:
                if job.name not in taken:
                    self._under_way.discard(job.name)
                is_own = isinstance(problem, RequestError) and self._engine.is_usable
                refused.append((job.name, (Refused if is_own else Failed)(str(problem))))
        if refused:
            self._tell(refused)

    def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._under_way and self.broken is None:
                self._under_way.discard(name)
                self._engine.discard(name)

    def _stop(self) -> None:
        self._stopping = True

    def _step(self) -> None:
        outputs = self._engine.step()
        news = [(output.request_id, output) for output in outputs if output.request_id in self._under_way]
        self._under_way.difference_update(output.request_id for output in outputs if output.finished)
        if news:
            self._tell(news)


def state_of(engine: Engine) -> State:
    scheduler, num_blocks = engine.scheduler, engine.scheduler.config.num_blocks
    used = num_blocks - scheduler.pool.num_free
    return State(len(scheduler.running), len(scheduler.waiting), num_blocks, used, replace(engine.metrics))
