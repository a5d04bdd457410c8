"""The same requests under other policies: the real scheduler again, with the answers that the run recorded.

Tokens do not depend on the schedule, so no model is needed: the recorded ones come when the scheduler asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lfm2np.teaching.drawings.runs.recorded_run import ENTRY_FIELDS, Entry, Run, Step
from scheduler import POLICIES, Request, Scheduler, SchedulerConfig

MOST_STEPS = 100_000


@dataclass(frozen=True)
class Pass:
    """One step, and the requests that a rectangle would have rows for, with their slots."""

    step: Step
    batch: Mapping[str, int]

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


@dataclass(frozen=True)
class Outcome:
    """What a policy made of the requests. Steps are counted from 0; times are steps after the arrival."""

    name: str
    run: Run  # as if this had been recorded, every sequence a request of its own
    passes: tuple[Pass, ...]
    first: Mapping[str, int]  # request -> steps until its first token
    last: Mapping[str, int]  # request -> steps until its last

    @property
    def steps(self) -> int:
        return sum(each.rows > 0 for each in self.passes)

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.passes)

    @property
    def padding(self) -> int:
        """Under `static` a request stays in its batch until the longest ends; else a batch is a step's requests."""
        return sum(each.padding for each in self.passes)


def answers(run: Run) -> dict[str, list[int]]:
    """All tokens that a run gave each request; requests that got none are left out."""
    tokens: dict[str, list[int]] = {}
    for step in run.steps:
        for name, ids in step.tokens.items():
            tokens.setdefault(name, []).extend(ids)
    return tokens


def under(run: Run, name: str, **changes: Any) -> Outcome:
    """All requests, each by itself, through a scheduler with these sizes."""
    known = answers(run)
    left = [replace(request, parent=None) for key, request in run.requests.items() if key in known]
    requests = {request.request_id: request for request in left}
    config: dict[str, Any] = {**run.config, **changes}
    if config.get("sliding_window") and POLICIES[config["policy"]].reserves:
        # The pool of a run that takes windows only may not hold a whole length, which these policies take at first.
        config["num_window_blocks"] = max(config["num_window_blocks"], config["num_blocks"])
    scheduler = Scheduler(SchedulerConfig(**config))
    arrived: dict[str, int] = {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    passes = []
    batch: dict[str, int] = {}
    for step in range(MOST_STEPS):
        for request in [request for request in left if request.arrival <= step]:
            left.remove(request)
            arrived[request.request_id] = step
            scheduler.add(Request(request.request_id, request.prompt, len(known[request.request_id])))
        if not left and not scheduler.has_unfinished:
            break
        if scheduler.config.policy != "static" or not scheduler.running:
            batch = {}
        plan = scheduler.schedule()
        said = {
            name_: [known[name_][scheduler.requests[name_].num_output_tokens]]
            for entry in plan.scheduled
            for name_ in entry.samples
        }
        finished = {ended.request_id: "length" for ended in scheduler.update(plan, said)}
        for name_ in finished:
            last[name_] = step - arrived[name_]
        for name_ in said:
            first.setdefault(name_, step - arrived[name_])
        batch |= {entry.request_id: entry.slot for entry in plan.scheduled}
        computed = Step(
            number=step,
            entries=tuple(Entry(**{key: getattr(entry, key) for key in ENTRY_FIELDS}) for entry in plan.scheduled),
            moves=tuple((move.kind, move.source, move.destination) for move in plan.moves),
            admitted=plan.admitted,
            preempted=plan.preempted,
            tokens={name_: tuple(ids) for name_, ids in said.items()},
            finished=finished,
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            free_blocks=scheduler.pool.num_free,
        )
        passes.append(Pass(computed, dict(batch)))
    steps = tuple(each.step for each in passes)
    rerun = replace(run, config=config, requests=requests, steps=steps, events=(), schedule=())
    return Outcome(name, rerun, tuple(passes), first, last)


def one_after_another(run: Run) -> tuple[int, int, int]:
    """Without any batch: passes, rows computed with a cache, and rows without one."""
    passes = with_cache = without = 0
    for name, ids in answers(run).items():
        prompt = len(run.requests[name].prompt)
        passes += len(ids)
        with_cache += prompt + len(ids) - 1
        without += sum(prompt + count for count in range(len(ids)))
    return passes, with_cache, without
