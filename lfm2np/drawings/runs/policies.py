"""The same requests under other policies: the real scheduler again, with the answers that the run recorded.

Tokens do not depend on the schedule, so no model is needed: the recorded ones come when the scheduler asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lfm2np.drawings.runs.run import Run
from scheduler import POLICIES, Request, Scheduler, SchedulerConfig

MOST_STEPS = 100_000


@dataclass(frozen=True)
class Pass:
    """One step: of each request of its batch the state slot and the tokens that it gets."""

    shares: Mapping[str, tuple[int, int]]  # in the order of the flat array: slot, tokens
    batch: Mapping[str, int]  # the requests that a rectangle would have rows for, and their slots

    @property
    def rows(self) -> int:
        return sum(count for _, count in self.shares.values())

    @property
    def longest(self) -> int:
        return max((count for _, count in self.shares.values()), default=0)

    @property
    def padding(self) -> int:
        """Cells that a rectangle wastes: the batch's requests by the longest share."""
        return len(self.batch) * self.longest - self.rows


@dataclass(frozen=True)
class Outcome:
    """What a policy made of the requests. Steps are counted from 0; times are steps after the arrival."""

    name: str
    passes: tuple[Pass, ...]
    first: Mapping[str, int]  # request -> steps until its first token
    last: Mapping[str, int]  # request -> steps until its last

    @property
    def steps(self) -> int:
        return sum(one.rows > 0 for one in self.passes)

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.passes)

    @property
    def padding(self) -> int:
        """Under `static` a request stays in its batch until the longest ends; else a batch is a step's requests."""
        return sum(one.padding for one in self.passes)


def answers(run: Run) -> dict[str, list[int]]:
    """All tokens that a run gave each request; requests that got none are left out."""
    found: dict[str, list[int]] = {}
    for step in run.steps:
        for name, ids in step.tokens.items():
            found.setdefault(name, []).extend(ids)
    return found


def under(run: Run, name: str, **changes: Any) -> Outcome:
    """All requests, each by itself, through a scheduler with these sizes."""
    known = answers(run)
    left = [request for key, request in run.requests.items() if key in known]
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
        for one in [one for one in left if one.arrival <= step]:
            left.remove(one)
            arrived[one.request_id] = step
            scheduler.add(Request(one.request_id, one.prompt, len(known[one.request_id])))
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
        for ended in scheduler.update(plan, said):
            last[ended.request_id] = step - arrived[ended.request_id]
        for name_ in said:
            first.setdefault(name_, step - arrived[name_])
        shares = {entry.request_id: (entry.slot, len(entry.token_ids)) for entry in plan.scheduled}
        batch |= {share: slot for share, (slot, _) in shares.items()}
        passes.append(Pass(shares, dict(batch)))
    return Outcome(name, tuple(passes), first, last)


def one_after_another(run: Run) -> tuple[int, int, int]:
    """Without any batch: passes, rows computed with a cache, and rows without one."""
    passes = with_cache = without = 0
    for name, ids in answers(run).items():
        prompt = len(run.requests[name].prompt)
        passes += len(ids)
        with_cache += prompt + len(ids) - 1
        without += sum(prompt + count for count in range(len(ids)))
    return passes, with_cache, without
