"""The same requests under other policies: the real scheduler again, with the answers that the run recorded.

Tokens do not depend on the schedule, so no model is needed: the recorded ones come when the scheduler asks for them.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any

from lfm2np.teaching.drawings.runs.recorded_run import Run, Step, read_run
from scheduler import POLICIES, Request, Scheduler, SchedulerConfig, TraceWriter, reasons

MOST_STEPS = 100_000


@dataclass(frozen=True)
class Pass:
    """One step, and the requests that a rectangle would have rows for."""

    step: Step
    batch: Set[str]

    @property
    def rows(self) -> int:
        return self.step.num_tokens

    @property
    def longest(self) -> int:
        return max((len(entry.token_ids) for entry in self.step.entries), default=0)

    @property
    def padding(self) -> int:
        """Cells that a rectangle wastes: the batch's requests by the longest share."""
        return len(self.batch) * self.longest - self.rows


def passes(run: Run) -> Iterator[Pass]:
    """Of each step; under `static` a batch keeps its rows until all of it have ended."""
    batch, running = set[str](), 0
    for step in run.steps:
        if run.config["policy"] != "static" or not running:
            batch = set()
        batch = batch | {entry.request_id for entry in step.entries}
        running = step.running
        yield Pass(step, batch)


@dataclass(frozen=True)
class Outcome:
    """What a policy made of the requests. Steps are counted from 0; times are steps after the arrival."""

    policy: str
    run: Run  # as if this had been recorded, every sequence a request of its own
    passes: tuple[Pass, ...]

    @property
    def steps(self) -> int:
        return sum(each.rows > 0 for each in self.passes)

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.passes)

    @property
    def padding(self) -> int:
        return sum(each.padding for each in self.passes)

    @property
    def first(self) -> dict[str, int]:
        """Request -> steps until its first token."""
        return {name: number - self.run.requests[name].arrival for name, number in self._said(reversed(self.run.steps))}

    @property
    def last(self) -> dict[str, int]:
        """Request -> steps until its last token."""
        return {name: number - self.run.requests[name].arrival for name, number in self._said(self.run.steps)}

    def _said(self, steps: Iterable[Step]) -> Iterator[tuple[str, int]]:
        return ((name, step.number) for step in steps for name in step.tokens)


def answers(run: Run) -> dict[str, list[int]]:
    """All tokens that a run gave each request; requests that got none are left out."""
    tokens: dict[str, list[int]] = {}
    for step in run.steps:
        for name, ids in step.tokens.items():
            tokens.setdefault(name, []).extend(ids)
    return tokens


def under(run: Run, policy: str, **changes: Any) -> Outcome:
    """All requests, each by itself, through a scheduler with this policy and these sizes in place of the run's."""
    known = answers(run)
    left = [request for name, request in run.requests.items() if name in known]
    config: dict[str, Any] = {**run.config, "policy": policy, **changes}
    if config.get("sliding_window") and POLICIES[policy].reserves:
        # The pool of a run that takes windows only may not hold a whole length, which these policies take at first.
        config["num_window_blocks"] = max(config["num_window_blocks"], config["num_blocks"])
    scheduler, file = Scheduler(SchedulerConfig(**config)), io.StringIO()
    trace = TraceWriter(file, scheduler.config)
    while (left or scheduler.has_unfinished) and scheduler.step < MOST_STEPS:
        for asked in [request for request in left if request.arrival <= scheduler.step]:
            left.remove(asked)
            request = Request(asked.request_id, asked.prompt, len(known[asked.request_id]))
            scheduler.add(request)
            trace.add(request, ())
        plan = scheduler.schedule()
        said = {
            name: [known[name][scheduler.requests[name].num_output_tokens]]
            for entry in plan.scheduled
            for name in entry.samples
        }
        finished = reasons(scheduler.update(plan, said))
        state = len(scheduler.waiting), len(scheduler.running), scheduler.pool.num_free
        trace.step(plan, {}, said, (), finished, state, None)
    rerun = replace(read_run(file.getvalue().splitlines(), is_whole=False), texts=run.texts)
    return Outcome(policy, rerun, tuple(passes(rerun)))


def one_after_another(run: Run) -> tuple[int, int, int]:
    """Without any batch: passes, rows computed with a cache, and rows without one."""
    passes = with_cache = without = 0
    for name, ids in answers(run).items():
        prompt = len(run.requests[name].prompt)
        passes += len(ids)
        with_cache += prompt + len(ids) - 1
        without += sum(prompt + count for count in range(len(ids)))
    return passes, with_cache, without
