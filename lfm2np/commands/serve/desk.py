"""Where calls of clients wait for the engine: what the event loop knows of jobs under way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from lfm2np.commands.serve.engine_thread import Job, Runner, Told
from lfm2np.commands.serve.limits import Limits, Refusal
from lfm2np.engine.engine import Engine
from lfm2np.engine.outputs import RequestOutput
from lfm2np.errors import RequestError

RETRY_SECONDS = "1"


@dataclass(eq=False)
class Call:
    """A client's request: its jobs, the latest output of each, and whether there is a new one."""

    jobs: tuple[Job, ...] = ()
    outputs: dict[str, Told] = field(default_factory=dict)
    is_new: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_finished(self) -> bool:
        return all(has_ended(self.outputs.get(job.name)) for job in self.jobs)

    async def news(self) -> None:
        """Waits for output that has not been looked at; returns at once if there is some."""
        await self.is_new.wait()
        self.is_new.clear()


class Desk:
    """The calls of one engine; its methods are the event loop's only."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._calls: dict[str, Call] = {}  # by the name of each job that has not ended
        self._places: dict[Call, int] = {}  # that it takes of max_requests
        self.runner = Runner(engine, self._tell)

    @property
    def num_places(self) -> int:
        return sum(self._places.values())

    def enter(self, places: int) -> Call:
        """A call for so many prompts times samples. RequestError if there can't be so many, Refusal if not now; who
        enters must leave."""
        if self.runner.broken is not None:
            raise Refusal(503, f"the engine ended: {self.runner.broken}")
        most, taken = self._limits.max_requests, self.num_places
        if places > most:
            raise RequestError(f"{places} prompts times samples: expected at most {most}")
        if taken + places > most:
            message = f"{places} prompts times samples, and {taken} are under way: expected at most {most} together"
            raise Refusal(429, message, headers={"Retry-After": RETRY_SECONDS})
        call = Call()
        self._places[call] = places
        return call

    def start(self, call: Call, jobs: Sequence[Job]) -> None:
        call.jobs = tuple(jobs)
        self._calls |= {job.name: call for job in jobs}
        self.runner.add(call.jobs)

    def leave(self, call: Call) -> None:
        """Nothing more is wanted of it: what has not ended is aborted."""
        del self._places[call]
        open_jobs = [job.name for job in call.jobs if self._calls.pop(job.name, None) is not None]
        if open_jobs:
            self.runner.abort(open_jobs)

    def _tell(self, news: Sequence[tuple[str, Told]]) -> None:
        """In the engine's thread, which may outlive the loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, news)

    def _deliver(self, news: Sequence[tuple[str, Told]]) -> None:
        for name, event in news:
            call = self._calls.get(name)
            if call is not None:
                call.outputs[name] = event
                call.is_new.set()
                if has_ended(event):
                    del self._calls[name]


def has_ended(message: Told | None) -> bool:
    return message is not None and (not isinstance(message, RequestOutput) or message.finished)
