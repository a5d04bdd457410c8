"""Adapters of this package's own scheduler and of its block pool: what `--scheduler` tests by default, and examples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import scheduler
from scheduler import FREED, BatchPlan, Move, ScheduledTokens, SchedulerConfig
from scheduler.protocol import Copy, Entry, Refused, Request, Step, Window, flat_places

ENDS = {  # the memories that a move copies from and to
    "copy_block": ("block", "block"),
    "copy_window_block": ("window block", "window block"),
    "zero_state": (None, "state"),
    "restore_state": ("checkpoint", "state"),
    "copy_state": ("state", "state"),
}


class OwnScheduler:
    """scheduler.Scheduler; which of its policies, the seed says. `more`: of SchedulerConfig."""

    def __init__(self, sizes: Mapping[str, Any], **more: Any) -> None:
        names = tuple(scheduler.POLICIES)
        window = sizes.get("sliding_window")
        self.config = SchedulerConfig(
            num_blocks=sizes["num_blocks"],
            block_size=sizes["block_size"],
            max_num_seqs=sizes["max_num_seqs"],
            max_num_batched_tokens=sizes["max_num_batched_tokens"],
            policy=sizes.get("policy") or names[sizes.get("seed", 0) % len(names)],
            prefix_caching=sizes.get("prefix_caching", True),
            max_waiting_tokens=3,
            sliding_window=window,
            num_window_blocks=sizes.get("num_window_blocks", 0) if window else 0,
            **more,
        )
        self.policies = {"fcfs", "preempts-last", "resumes-first"} if self.config.policy == "fcfs" else set()
        if self.config.prefix_caching and window is None:
            self.policies.add("finds-prefixes")
        self.scheduler = scheduler.Scheduler(self.config)
        self.plan: BatchPlan | None = None
        self.drafts: Mapping[str, Sequence[int]] = {}

    def add(self, request: Request) -> None:
        children = [self._request(request, name) for name in request.children]
        try:
            self.scheduler.add(self._request(request, request.request_id), children)
        except scheduler.RequestRefused as refusal:
            raise Refused(str(refusal)) from None

    def _request(self, request: Request, name: str) -> scheduler.Request:
        return scheduler.Request(
            name,
            request.prompt_token_ids,
            request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        self.drafts = drafts

    def step(self) -> Step:
        plan = self.scheduler.schedule()
        takers = {each.request_id for each in plan.scheduled if each.samples == (each.request_id,)}
        drafts = {name: tokens for name, tokens in self.drafts.items() if name in takers}
        if drafts:
            plan = self.scheduler.add_drafts(plan, drafts)
        self.plan, self.drafts = plan, {}
        return self._step(plan)

    def _step(self, plan: BatchPlan) -> Step:
        entries = [self._entry(each) for each in plan.scheduled]
        return Step(entries, [copy_of(move) for move in plan.moves], plan.preempted)

    def _entry(self, each: ScheduledTokens) -> Entry:
        size = self.config.block_size
        places = flat_places(each.block_table, size, 0, each.stop)
        window = None
        if self.config.sliding_window is not None:
            first = sum(block == FREED for block in each.window_table) * size
            reads = flat_places(each.window_table, size, first, each.stop)
            window = Window(flat_places(each.window_table, size, each.start, each.stop), reads, first)
        return Entry(
            each.request_id,
            each.start,
            each.token_ids,
            places[each.start :],
            places,
            window,
            state_from=each.slot,
            state_to=each.slot,
            checkpoints=each.checkpoints,
            num_drafts=each.num_drafts,
        )

    def update(self, tokens: Mapping[str, Sequence[int]]) -> Collection[str]:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        return [each.request_id for each in self.scheduler.update(plan, tokens)]

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def preempt(self, request_id: str) -> None:
        self.scheduler.preempt(request_id)

    def fork(self, parent_id: str, child: Request) -> None:
        try:
            self.scheduler.fork(parent_id, self._request(child, child.request_id))
        except scheduler.RequestRefused as refusal:
            raise Refused(str(refusal)) from None

    def free_blocks(self) -> list[int]:
        return self.scheduler.pool.free_order()

    def free_window_blocks(self) -> list[int] | None:
        windowed = self.scheduler.memory.groups[1:]
        return windowed[0].pool.free_order() if windowed else None

    def free_states(self) -> list[int]:
        return list(self.scheduler.memory.free_slots)

    def verify(self) -> None:
        scheduler.check(self.scheduler)


def copy_of(move: Move) -> Copy:
    source, destination = ENDS[move.kind]
    return Copy(None if source is None else (source, move.source), (destination, move.destination))


factory = OwnScheduler
