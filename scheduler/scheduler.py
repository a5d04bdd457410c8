"""schedule() says what the next step computes, update() what came of it; between the two the plan is in flight.

add_drafts() may put guesses at the next tokens behind the known ones; update() takes those that were accepted.
Progress is made in update() only: nothing is published before it, so the caller writes before that call.
A request that is aborted in flight keeps its blocks and its slot until update().
Who continues, who is preempted and who is admitted, step.py says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.config import SchedulerConfig
from scheduler.errors import PlanError, RequestRefused
from scheduler.memory import Memory
from scheduler.plan import BatchPlan, Move, ScheduledTokens
from scheduler.policy import POLICIES
from scheduler.queues import Queues
from scheduler.refusals import require_answers, require_fork, require_new, require_room
from scheduler.request import FinishReason, Request, Status
from scheduler.step import Step, scheduled_tokens


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = POLICIES[config.policy](config)
        self.memory = Memory(config, self.policy.reserves)
        self.pool = self.memory.pool
        self.prefix_cache = self.memory.prefix_cache
        self.queues = Queues(self.policy.key, self.memory)
        self.waiting, self.running = self.queues.waiting, self.queues.running
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.step = 0
        self._arrivals = 0
        self._pending: list[Move] = []  # of forks: done before the next step
        self.in_flight: BatchPlan | None = None  # the plan between schedule() and update()
        self._computing: frozenset[str] = frozenset()  # its requests

    # --- requests come and go

    def add(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Queues a request; `forks` are samples of the same prompt, split off once it is computed.

        RequestRefused for an id that is in use, or a request that could never fit into the pool, even alone.
        """
        require_new(self.requests, (request, *forks))
        for sample in (request, *forks):
            require_room(self.memory, sample, self.config.max_num_batched_tokens)
            require_fork(request, sample)
        for sample in (request, *forks):
            self._register(sample)
            sample.awaits_split = sample is not request
        request.forks = list(forks)
        self.queues.wait(request)

    def _register(self, request: Request) -> None:
        request.arrival, request.arrival_step = self._arrivals, self.step
        self._arrivals += 1
        self.requests[request.request_id] = request

    def abort(self, request_id: str) -> Request:
        """Ends a request at any moment, also in flight. RequestRefused for an id that is not known."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> Request:
        """Ends a request for a reason that the scheduler can't see: a stop string, an error, an abort."""
        request = self._known(request_id)
        request.finish_reason = reason
        self._finish(request)
        return request

    def fork(self, parent_id: str, child: Request) -> bool:
        """A new request that goes on from where `parent_id` stands, sharing its blocks; not while a plan is in flight.

        True if it shares, False if it waits and is computed on its own: no slot or no block was free.
        """
        parent = self._known(parent_id)
        self._require_no_plan("fork()")
        require_new(self.requests, (child,))
        require_room(self.memory, child, self.config.max_num_batched_tokens)
        require_fork(parent, child)
        self._register(child)
        child.token_ids = list(parent.token_ids)
        return self._split_off(parent, child)

    def preempt(self, request_id: str) -> None:
        """Takes slot and blocks of a running request away, between steps; readmitted, it computes what is not cached.

        RequestRefused for one that does not run; PlanError while a plan is in flight.
        """
        request = self._known(request_id)
        self._require_no_plan("preempt()")
        if request.status is not Status.RUNNING:
            raise RequestRefused(f"request {request_id!r}: {request.status}, can't be preempted")
        self.queues.preempt(request)

    def _known(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None or request.is_finished:
            raise RequestRefused(f"request {request_id!r}: not known, or finished")
        return request

    def _require_no_plan(self, call: str) -> None:
        if self.in_flight is not None:
            raise PlanError(f"{call} while step {self.in_flight.step} is in flight: call update() first")

    def _finish(self, request: Request) -> None:
        """Releases everything; while the request is computed only notes that it has ended: update() does the rest."""
        if request.request_id not in self._computing:
            self.queues.remove(request)
            for fork in request.forks:  # they lose the one that would have computed their prompt
                if not fork.is_finished:
                    self.queues.wait(fork)
            request.forks = []
            del self.requests[request.request_id]
        request.status = Status.FINISHED

    # --- one step

    def schedule(self) -> BatchPlan:
        """The next step; empty if there is nothing to do. PlanError while the last plan is in flight."""
        self._require_no_plan("schedule()")
        step = Step(self.queues, self.config, self._pending)
        self._pending = []
        self.policy.plan(step)
        self.in_flight, self._computing = step.plan(self.step), frozenset(step.scheduled)
        return self.in_flight

    def add_drafts(self, plan: BatchPlan, drafts: Mapping[str, Sequence[int]]) -> BatchPlan:
        """The plan in flight, with as many drafts, by request id, as it leaves room for, in the order of service.

        A draft gets a token of the budget, and a block, only if nothing else wants it: no request gets less, none is
        preempted, no cached block is evicted for a guess. So when all drafts are rejected, the next plan is, block for
        block, the one that would have been made without them. PlanError for drafts of a request that samples nothing
        in this step, whose samples are yet to be split off, or that has drafts already.
        """
        if plan is not self.in_flight:
            raise PlanError(f"add_drafts() for step {plan.step}, which is not in flight")
        without = [entry for entry in plan.scheduled if not entry.num_drafts]
        takers = {entry.request_id for entry in without if entry.samples == (entry.request_id,)}
        for name in drafts:
            if name not in takers:
                raise PlanError(f"step {plan.step}: drafts for {name!r}, which can't take any")
        budget = self.config.max_num_batched_tokens - plan.num_tokens
        entries = []
        for entry in plan.scheduled:
            request = self.requests[entry.request_id]
            fitting = min(len(drafts.get(entry.request_id, ())), budget, most_drafts(request))
            if fitting > 0 and not request.is_finished:
                fitting = self.memory.grow_from_unused(request, entry.stop + fitting) - entry.stop
                guesses = tuple(drafts[entry.request_id][:fitting])
                entry = scheduled_tokens(request, self.memory, entry.token_ids, guesses)
                budget -= fitting
            entries.append(entry)
        self.in_flight = replace(plan, scheduled=tuple(entries))
        return self.in_flight

    # --- what came of it

    def update(self, plan: BatchPlan, tokens: Mapping[str, Sequence[int]], errors: Sequence[str] = ()) -> list[Request]:
        """Takes the tokens that came of a plan, and the ids of requests whose computation failed; who finished by it.

        Each request that samples gets its accepted drafts and one token more, which is not computed yet.
        PlanError, and no change, for another plan than the one in flight, tokens that are missing or not asked for, or
        errors of what it does not compute.
        """
        if plan is not self.in_flight:
            raise PlanError(f"update() for step {plan.step}, which is not in flight")
        require_answers(plan, self.requests, tokens, errors)
        self._roll_back(plan, tokens)
        self.in_flight, self._computing = None, frozenset()
        self.step += 1
        finished = [self.requests[name] for name in dict.fromkeys(errors) if name in self.requests]
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
            if entry.num_drafts and not self.memory.reserves:
                kept = entry.num_kept(len(tokens.get(entry.request_id, ())))
                self.memory.shrink(self.requests[entry.request_id], entry.start + kept)

    def _advance(self, request: Request, entry: ScheduledTokens, tokens: Mapping[str, Sequence[int]]) -> list[Request]:
        """Counts what was computed and accepted, publishes it, splits forks off, appends the newest token."""
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
            return []
        forks, request.forks = [fork for fork in request.forks if not fork.is_finished], []
        for fork in forks:
            self._split_off(request, fork)
        request.append(answer[-1])
        for fork in forks:
            fork.append(tokens[fork.request_id][0])
        finished = [sample for sample in (request, *forks) if sample.finish_reason is not None]
        for sample in finished:
            self._finish(sample)
        return finished

    def _split_off(self, parent: Request, child: Request) -> bool:
        """The child goes on from the parent's place, sharing its blocks; or it waits and is computed on its own."""
        shares = self.memory.split(parent, child, self._pending)
        if shares:
            self.queues.run(child)
        else:
            self.queues.wait(child)
        return shares

    def awaits_moves(self, request: Request) -> bool:
        """Whether it was split off since the last step: its state is copied before the next one."""
        return any(move.kind == "copy_state" and move.destination == request.slot for move in self._pending)

    @property
    def num_preemptions(self) -> int:
        return self.queues.num_preemptions

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)


def most_drafts(request: Request) -> int:
    """How many make sense: one token comes without any, and the last one needs no place in the cache."""
    return request.max_tokens - request.num_output_tokens - 1
