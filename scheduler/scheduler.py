"""schedule() says what the next step computes, update() what came of it; between the two the plan is in flight.

add_drafts() may put guesses at the next tokens behind the known ones; update() takes those that were accepted.
Progress is made in update() only: nothing is published before it is written.
A request that is aborted in flight keeps its blocks and its slot until update().
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import islice

from scheduler.config import SchedulerConfig
from scheduler.drafts import with_drafts
from scheduler.errors import PlanError, RequestRefused
from scheduler.memory import Memory
from scheduler.plan import BatchPlan, Move, ScheduledTokens, UnfinishedPlan
from scheduler.policy import POLICIES, Step
from scheduler.refusals import require_answers, require_fork, require_known, require_new, require_room
from scheduler.request import FinishReason, Request, Status, is_queued


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = POLICIES[config.policy](config)
        self.memory = Memory(config)
        self.pool = self.memory.pool
        self.prefix_cache = self.memory.prefix_cache
        self.waiting: list[Request] = []  # in the policy's order, as are those that run
        self.running: list[Request] = []  # in the policy's order: the last is preempted first
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.step = 0
        self.num_preemptions = 0
        self._num_prefilling = 0  # running requests that are not decoding
        self._arrivals = 0
        self._pending: list[Move] = []  # of forks: done before the next step
        self._plan: BatchPlan | None = None
        self._in_flight: frozenset[str] = frozenset()

    # --- requests come and go

    def add(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Queues a request; `forks` are samples of the same prompt, split off once it is computed.

        RequestRefused for an id that is in use, or a request that could never fit into the pool, even alone.
        """
        require_new(self.requests, (request, *forks))
        for sample in (request, *forks):
            require_room(self.memory, sample, self._longest_step(sample))
            require_fork(request, sample)
        for sample in (request, *forks):
            self._register(sample)
            sample.awaits_split = sample is not request
        request.forks = list(forks)
        self._queue(request)

    def _longest_step(self, request: Request) -> int:
        """Most tokens for which it needs blocks at once."""
        whole = request.most_computed_tokens
        return whole if self.policy.reserves else min(whole, self.config.max_num_batched_tokens)

    def _register(self, request: Request) -> None:
        request.arrival, request.arrival_step = self._arrivals, self.step
        self._arrivals += 1
        self.requests[request.request_id] = request

    def abort(self, request_id: str) -> Request:
        """Ends a request at any moment, also in flight. RequestRefused for an id that is not known."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> Request:
        """Ends a request for a reason that the scheduler can't see: a stop string, an error, an abort."""
        request = require_known(self.requests, request_id)
        request.finish_reason = reason
        self._finish(request)
        return request

    def fork(self, parent_id: str, child: Request) -> bool:
        """A new request that goes on from where `parent_id` stands, sharing its blocks; not while a plan is in flight.

        True if it shares, False if it waits and is computed on its own: no slot or no block was free.
        """
        parent = require_known(self.requests, parent_id)
        self._require_no_plan("fork()")
        require_new(self.requests, (child,))
        require_room(self.memory, child, self._longest_step(child))
        require_fork(parent, child)
        self._register(child)
        child.token_ids = list(parent.token_ids)
        return self._split_off(parent, child)

    def preempt(self, request_id: str) -> None:
        """Takes slot and blocks of a running request away, between steps; it is computed again when it is admitted.

        RequestRefused for one that does not run; PlanError while a plan is in flight.
        """
        request = require_known(self.requests, request_id)
        self._require_no_plan("preempt()")
        if request.status is not Status.RUNNING:
            raise RequestRefused(f"request {request_id!r}: {request.status}, can't be preempted")
        self._count_preemption(request)
        self._withdraw(request)

    # --- one step

    def schedule(self) -> BatchPlan:
        """The next step; empty if there is nothing to do. PlanError while the last plan is in flight."""
        self._require_no_plan("schedule()")
        step = UnfinishedPlan(self.config.max_num_batched_tokens, self._pending, {}, [], [])
        self._pending = []
        self.policy.plan(Step(self, step))
        plan = BatchPlan(
            self.step, tuple(step.moves), tuple(step.scheduled.values()), tuple(step.preempted), tuple(step.admitted)
        )
        self._plan, self._in_flight = plan, frozenset(step.scheduled)
        return plan

    def add_drafts(self, plan: BatchPlan, drafts: Mapping[str, Sequence[int]]) -> BatchPlan:
        """The plan in flight, with as many drafts, by request id, as it leaves room for: see drafts.py."""
        if plan is not self._plan:
            raise PlanError(f"add_drafts() for step {plan.step}, which is not in flight")
        self._plan = with_drafts(plan, drafts, self.requests, self.memory, self.config)
        return self._plan

    def _continue(self, step: UnfinishedPlan, decodes: bool, prompts: bool) -> None:
        index = 0
        while index < len(self.running) and step.budget:
            request = self.running[index]
            wanted = decodes if request.is_decoding else prompts
            if wanted and request.request_id not in step.scheduled:
                count = min(request.num_tokens - request.num_computed_tokens, step.budget)
                if not self._make_room(step, request, count):
                    return  # it was the last one, and is preempted
                self._schedule(step, request, count)
            index += 1

    def _make_room(self, step: UnfinishedPlan, request: Request, count: int) -> bool:
        """Blocks for `count` more tokens, preempting from the end; False if the request itself had to go."""
        while not self.memory.grow(request, count, step.moves):
            victim = self.running[-1]
            self._preempt(step, victim)
            if victim is request:
                return False
        return True

    def _schedule(self, step: UnfinishedPlan, request: Request, count: int) -> None:
        size = self.config.block_size
        start, stop = request.num_computed_tokens, request.num_computed_tokens + count
        table, windows = (table[: self.memory.blocks_for(stop)] for table in request.tables)
        for group in self.memory.groups:
            for block in request.tables[group.index][start // size : len(table)]:
                group.pool.require_writable(block)
        ends = range(start // size + 1, stop // size + 1) if self.config.prefix_caching else ()
        last = stop == request.num_tokens
        assert request.slot is not None
        step.scheduled[request.request_id] = ScheduledTokens(
            request_id=request.request_id,
            start=start,
            token_ids=tuple(request.token_ids[start:stop]),
            block_table=table,
            slot=request.slot,
            checkpoints=tuple((end * size, table[end - 1]) for end in ends),
            first_logits=min(stop, max(start, request.first_logits)),
            samples=(request.request_id, *(fork.request_id for fork in request.forks)) if last else (),
            window_table=windows,
        )
        step.budget -= count

    def _preempt(self, step: UnfinishedPlan, request: Request) -> None:
        """Takes slot and blocks away: what was computed is computed again."""
        dropped = step.scheduled.pop(request.request_id, None)
        if dropped is not None:
            step.budget += len(dropped.token_ids)
        if request.request_id in step.admitted:
            step.admitted.remove(request.request_id)
        step.preempted.append(request.request_id)
        self._count_preemption(request)
        self._withdraw(request)

    def _count_preemption(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _withdraw(self, request: Request) -> None:
        """From running back to the queue."""
        self._leave_running(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        self._queue(request)

    # --- admission

    def _admit(self, step: UnfinishedPlan, least: int, whole_prompts: bool, beyond_budget: bool) -> None:
        """None after a preemption in this step."""
        if step.preempted:
            return
        if least > 1 and not self._enough_fit(least):
            return
        while self.waiting and self.memory.free_slots and (step.budget or beyond_budget):
            request = self.waiting[0]
            if not self._enter(step, request, whole_prompts):
                return
            if step.budget:
                self._schedule(step, request, min(request.num_tokens - request.num_computed_tokens, step.budget))

    def _enough_fit(self, count: int) -> bool:
        """Whether that many would be admitted together: TGI puts a batch back that turns out too small."""
        if count > len(self.memory.free_slots) or count > len(self.waiting):
            return False
        free = min(group.pool.num_free - group.watermark for group in self.memory.groups)
        return self.memory.fit_together(islice(self.waiting, count), self.config.max_num_batched_tokens, free)

    def _enter(self, step: UnfinishedPlan, request: Request, whole_prompts: bool) -> bool:
        """Gives a waiting request its slot and the blocks for this step; False, and no change, if it does not fit."""
        keys, reason = self.prefix_cache.find(request)
        start = len(keys) * self.config.block_size
        rest = request.num_tokens - start
        if whole_prompts and step.admitted and rest > step.budget:
            return False
        target = request.most_computed_tokens if self.policy.reserves else start + min(rest, step.budget)
        if not self.memory.can_enter(keys, target, above_watermark=bool(self.running)):
            return False
        del self.waiting[0]
        self.memory.enter(request, keys, target, step.moves)
        self.prefix_cache.count(request, len(keys), reason)
        request.status = Status.RUNNING
        self._num_prefilling += not request.is_decoding
        insort(self.running, request, key=self.policy.key)
        step.admitted.append(request.request_id)
        return True

    # --- what came of it

    def update(self, plan: BatchPlan, tokens: Mapping[str, Sequence[int]], errors: Sequence[str] = ()) -> list[Request]:
        """Takes the tokens that came of a plan, and the ids of requests whose computation failed; who finished by it.

        Each request that samples gets its accepted drafts and one token more, which is not computed yet.
        PlanError, and no change, for another plan than the one in flight, or tokens that are missing or not asked for.
        """
        if plan is not self._plan:
            raise PlanError(f"update() for step {plan.step}, which is not in flight")
        require_answers(plan, self.requests, tokens, errors)
        self._roll_back(plan, tokens)
        self._plan, self._in_flight = None, frozenset()
        self.step += 1
        finished = [self.requests[name] for name in errors if name in self.requests]
        finished = [request for request in finished if not request.is_finished]
        for request in finished:
            request.finish_reason = FinishReason.ERROR
            self._finish(request)
        for entry in plan.scheduled:
            live = self.requests.get(entry.request_id)
            if live is None:
                continue  # it failed
            if live.is_finished:
                self._finish(live)  # aborted in flight
            else:
                finished += self._advance(live, entry, tokens)
        return finished

    def _roll_back(self, plan: BatchPlan, tokens: Mapping[str, Sequence[int]]) -> None:
        """Gives back the blocks of rejected drafts; the latest first, so that the free list is as it was before."""
        for entry in reversed(plan.scheduled):
            if entry.num_drafts and not self.policy.reserves:
                kept = entry.num_kept(len(tokens.get(entry.request_id, ())))
                self.memory.shrink(self.requests[entry.request_id], entry.start + kept)

    def _advance(self, request: Request, entry: ScheduledTokens, tokens: Mapping[str, Sequence[int]]) -> list[Request]:
        """Counts what was computed and accepted, publishes it, splits forks off, appends the newest token."""
        was_prefilling = not request.is_decoding
        answer = tokens.get(request.request_id, ())
        stop = entry.start + entry.num_kept(len(answer))
        for token in answer[:-1]:
            request.append(token)  # accepted drafts
        request.num_steps += 1
        request.num_recomputed_tokens += max(0, min(stop, request.furthest_computed) - entry.start)
        request.furthest_computed = max(request.furthest_computed, stop)
        request.num_computed_tokens = stop
        self.prefix_cache.publish(request, entry.start)
        self.memory.release_unseen(request)
        if not entry.samples:
            self._num_prefilling += (not request.is_decoding) - was_prefilling
            return []
        forks, request.forks = [fork for fork in request.forks if not fork.is_finished], []
        for fork in forks:
            self._split_off(request, fork)
        request.append(answer[-1])
        self._num_prefilling += (not request.is_decoding) - was_prefilling
        finished = []
        for fork in forks:
            fork.append(tokens[fork.request_id][0])
            self._num_prefilling -= fork.status is Status.RUNNING  # it took the prompt over, and decodes now
        for sample in (request, *forks):
            if sample.finish_reason is not None:
                self._finish(sample)
                finished.append(sample)
        return finished

    def _split_off(self, parent: Request, child: Request) -> bool:
        """The child goes on from the parent's place, sharing its blocks; or it waits and is computed on its own."""
        if not self.memory.split(parent, child, self.policy.reserves, self._pending):
            self._queue(child)
            return False
        child.awaits_split = False
        child.status = Status.RUNNING
        self._num_prefilling += not child.is_decoding
        insort(self.running, child, key=self.policy.key)
        return True

    def _require_no_plan(self, call: str) -> None:
        if self._plan is not None:
            raise PlanError(f"{call} while step {self._plan.step} is in flight: call update() first")

    @property
    def in_flight(self) -> BatchPlan | None:
        """The plan between schedule() and update()."""
        return self._plan

    def awaits_moves(self, request: Request) -> bool:
        """Whether it was split off since the last step: its state is copied before the next one."""
        return any(move.kind == "copy_state" and move.destination == request.slot for move in self._pending)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def _finish(self, request: Request) -> None:
        """Releases everything, or leaves that to update() while the request is in flight."""
        if is_queued(request):
            del self.waiting[bisect_left(self.waiting, self.policy.key(request), key=self.policy.key)]
        request.status = Status.FINISHED
        if request.request_id in self._in_flight:
            return
        if request.slot is not None:
            self._leave_running(request)
        for fork in request.forks:  # they lose the one that would have computed their prompt
            if not fork.is_finished:
                self._queue(fork)
        request.forks = []
        del self.requests[request.request_id]

    def _queue(self, request: Request) -> None:
        request.awaits_split = False
        insort(self.waiting, request, key=self.policy.key)

    def _leave_running(self, request: Request) -> None:
        del self.running[bisect_left(self.running, self.policy.key(request), key=self.policy.key)]
        self._num_prefilling -= not request.is_decoding
        self.memory.release(request)
