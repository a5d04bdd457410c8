"""The scheduler with a clock: requests come at their times, each step takes what the cost model says.

The real `scheduler.Scheduler` decides every step. What arrives, or leaves, during a step is seen after it, as in an
engine that is one loop. Time is in whole nanoseconds. Where nothing but decoding can happen, scheduler.leap takes many
steps at once; `leaps=False` takes each by itself, with the same result to the last nanosecond.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np

from lfm2np.commands.simulate.cost import CostModel, StepShape, shape_of
from lfm2np.commands.simulate.statistics import Padding, Statistics
from lfm2np.commands.simulate.traffic import Arrival
from lfm2np.errors import RequestError
from scheduler import BatchPlan, FinishReason, Request, RequestRefused, Scheduler, SchedulerConfig, TraceWriter, reasons
from scheduler.leap import leap, most_steps

END_ID = -1  # the last token of a request that asked for more: its only stop token
MOST_STEPS = 1024  # of one leap
NUMBERS = re.compile(r"\d+")  # of a reason to refuse: the same reason for other lengths is counted as one

# How many are accepted: of a request (by number), from an output token (counted from 0) on, of so many drafts.
Accepts = Callable[[int, int, int], int]


@dataclass(slots=True)
class Live:
    """A request that has not ended."""

    number: int
    arrival: Arrival
    first: int = -1  # when its first token came


class Simulation:
    """One run. `num_drafts` are proposed for each decoding request in each step, if `accepts` is given."""

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostModel,
        num_drafts: int = 0,
        accepts: Accepts | None = None,
        trace: TraceWriter | None = None,
        leaps: bool = True,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.config, self.cost, self.trace = config, cost, trace
        self.num_drafts = num_drafts if accepts is not None else 0
        self.accepts = accepts
        self.leaps = leaps and not self.num_drafts and trace is None
        self.statistics = Statistics(Padding(config.max_num_seqs))
        self.now = 0
        self.live: dict[str, Live] = {}
        self._last: dict[str, int] = {}  # when the last token of a request came
        self._aborts: list[tuple[int, str]] = []  # a heap
        self._number = 0
        self._empty_plans = 0

    def run(self, arrivals: Iterable[Arrival], most_waiting: int | None = None) -> Statistics:
        """Until all have ended; or until more than `most_waiting` wait. RequestError for arrivals out of order."""
        source = iter(arrivals)
        coming = next(source, None)
        while coming is not None or self.scheduler.has_unfinished:
            while coming is not None and coming.at <= self.now:
                self._add(coming)
                coming = following(source, coming)
                if most_waiting is not None and len(self.scheduler.waiting) > most_waiting:
                    return self._ended()
            self._abort_who_left()
            if self.scheduler.has_unfinished:
                self._advance(coming)
            elif coming is not None:
                self.now = coming.at
        return self._ended()

    def _ended(self) -> Statistics:
        self.statistics.padding.close()
        return self.statistics

    # --- requests come and go

    def _add(self, arrival: Arrival) -> None:
        name = str(self._number)
        self._number += 1
        try:
            request = request_of(name, arrival, self.config)
            self.scheduler.add(request)
        except RequestRefused as error:
            self.statistics.refused[NUMBERS.sub("N", str(error).removeprefix(f"request {name!r}: "))] += 1
            return
        if self.trace:
            self.trace.add(request, ())
        self.statistics.arrived(arrival, request.num_prompt_tokens, self.now, len(self.scheduler.waiting))
        self.live[name] = Live(self._number - 1, arrival)
        if arrival.abort_after is not None:
            heapq.heappush(self._aborts, (arrival.at + arrival.abort_after, name))

    def _abort_who_left(self) -> None:
        while self._aborts and self._aborts[0][0] <= self.now:
            _, name = heapq.heappop(self._aborts)
            if name in self.live:
                self.scheduler.abort(name)
                if self.trace:
                    self.trace.finish(name, FinishReason.ABORT)
                self.statistics.aborted += 1
                self._forget(name)

    def _forget(self, name: str) -> Live:
        self._last.pop(name, None)
        return self.live.pop(name)

    # --- time goes on

    def _advance(self, coming: Arrival | None) -> None:
        """By a leap, if more than a step is alike, or by one step."""
        if self.leaps:
            count = min(most_steps(self.scheduler), MOST_STEPS)
            if count > 1 and self._leap(count, coming):
                return
        self._step()

    def _leap(self, count: int, coming: Arrival | None) -> bool:
        """False, and no change, if it can't take a step."""
        running = self.scheduler.running
        pairs = [(request, self.live[request.request_id]) for request in running]
        count = min(count, *(live.arrival.num_output_tokens - request.num_output_tokens for request, live in pairs))
        shapes = decodes_of(running, self.config, count)
        durations = self.cost.nanoseconds_of(shapes)
        ends = self.now + np.cumsum(durations)
        count = min(count, self._steps_before_event(ends - durations, coming))
        tokens = {
            request.request_id: outputs(live.arrival, request.num_output_tokens, count) for request, live in pairs
        }
        owned = self._owned()
        waiting = len(self.scheduler.waiting)
        result = leap(self.scheduler, count, tokens)
        if not result.steps:
            return False
        ends, durations = ends[: result.steps], durations[: result.steps]
        self.statistics.owned(self.now, ends, owned, result.taken)
        self.statistics.spent(self.now, ends, len(tokens), waiting)
        self.statistics.computed.at_many(ends, len(tokens))
        if self.cost.largest is not None:
            self.statistics.beyond += int(durations[self.cost.is_beyond(shapes)[: result.steps]].sum())
        self.statistics.output_tokens += len(tokens) * result.steps
        self.statistics.gaps(map(self._last.__getitem__, tokens), int(ends[0]))
        self.statistics.itl.add_many(durations[1:], len(tokens))
        self.now = int(ends[-1])
        self._last.update(dict.fromkeys(tokens, self.now))
        self._end(result.finished)
        return True

    def _steps_before_event(self, begins: np.ndarray, coming: Arrival | None) -> int:
        """How many steps begin before a request arrives or leaves."""
        events = [arrival.at for arrival in (coming,) if arrival is not None] + [time for time, _ in self._aborts[:1]]
        return int(np.searchsorted(begins, min(events))) if events else len(begins)

    def _step(self) -> None:
        begin, scheduler = self.now, self.scheduler
        plan = scheduler.schedule()
        offered = self._drafts(plan)
        if offered:
            plan = scheduler.add_drafts(plan, offered)
        self._require_progress(plan)
        self._note_plan(plan, begin)
        tokens = self._answers(plan)
        finished = scheduler.update(plan, tokens)
        if self.trace:
            state = len(scheduler.waiting), len(scheduler.running), scheduler.pool.num_free
            seconds = (self.now - begin) / 1e9
            self.trace.step(plan, offered, tokens, (), reasons(finished), state, seconds)
        self._note_tokens(tokens)
        self._end(finished)

    def _note_plan(self, plan: BatchPlan, begin: int) -> None:
        """Its time, and what is used meanwhile."""
        statistics, scheduler = self.statistics, self.scheduler
        shape = shape_of(plan)
        self.now = begin + self.cost.nanoseconds(shape)
        statistics.beyond += self.cost.is_beyond(shape) * (self.now - begin)
        ends = np.array([self.now])
        statistics.real_steps += 1
        statistics.preemptions += len(plan.preempted)
        statistics.owned(begin, ends, self._owned(), ())
        statistics.spent(begin, ends, len(scheduler.running), len(scheduler.waiting))
        statistics.computed.at(self.now, plan.num_tokens)
        for name in plan.admitted:
            if not scheduler.requests[name].num_steps:
                statistics.queued.add(begin - self.live[name].arrival.at)

    def _answers(self, plan: BatchPlan) -> dict[str, list[int]]:
        """The tokens of each request that samples: accepted drafts, and one more."""
        statistics, answers = self.statistics, {}
        for entry in plan.scheduled:
            statistics.draft_tokens += entry.num_drafts
            if not entry.samples:
                statistics.prompt_tokens += len(entry.token_ids)
                continue
            statistics.prompt_tokens += len(entry.token_ids) - entry.num_drafts - 1
            name = entry.request_id
            live, done = self.live[name], self.scheduler.requests[name].num_output_tokens
            count = 1
            if entry.num_drafts and self.accepts is not None:
                left = live.arrival.num_output_tokens - done
                count = min(left, 1 + self.accepts(live.number, done, entry.num_drafts))
                statistics.accepted_drafts += count - 1
            answers[name] = outputs(live.arrival, done, count)
            statistics.output_tokens += count
        return answers

    def _drafts(self, plan: BatchPlan) -> dict[str, list[int]]:
        """For each request that decodes: its own next tokens, of which `accepts` says how many are right."""
        if not self.num_drafts:
            return {}
        return {
            entry.request_id: [self.live[entry.request_id].arrival.output_token_id] * self.num_drafts
            for entry in plan.scheduled
            if entry.samples and len(entry.token_ids) == 1
        }

    def _note_tokens(self, tokens: dict[str, list[int]]) -> None:
        last = self._last
        self.statistics.gaps((last[name] for name in tokens if name in last), self.now)
        for name in tokens:
            if name not in last:
                live = self.live[name]
                live.first = self.now
                self.statistics.first_token(live.number, live.arrival, self.now)
            last[name] = self.now

    def _end(self, finished: Sequence[Request]) -> None:
        for request in finished:
            live = self._forget(request.request_id)
            self.statistics.ended(live.number, live.arrival, live.first, self.now)

    def _owned(self) -> int:
        return self.config.num_blocks - self.scheduler.pool.num_free

    def _require_progress(self, plan: BatchPlan) -> None:
        self._empty_plans = 0 if plan.scheduled or plan.preempted or plan.admitted else self._empty_plans + 1
        if self._empty_plans > 2:
            raise RequestError(
                f"step {plan.step}: the policy {self.config.policy!r} plans nothing, though "
                f"{len(self.scheduler.waiting)} requests wait and {len(self.scheduler.running)} run"
            )


def following(source: Iterator[Arrival], before: Arrival) -> Arrival | None:
    arrival = next(source, None)
    if arrival is not None and arrival.at < before.at:
        raise RequestError(f"a request at {arrival.at} ns after one at {before.at} ns: expected the order of arrival")
    return arrival


def request_of(name: str, arrival: Arrival, config: SchedulerConfig) -> Request:
    """RequestRefused for one whose prompt alone is larger than the pool, before its tokens are laid out."""
    if arrival.num_prompt_tokens > config.num_blocks * config.block_size:
        raise RequestRefused(f"{arrival.num_prompt_tokens} prompt tokens: the pool has {config.num_blocks} blocks")
    ids = tuple(chain.from_iterable(repeat(token_id, count) for token_id, count in arrival.prompt))
    stops = frozenset({END_ID}) if asked_tokens(arrival) > arrival.num_output_tokens else frozenset()
    return Request(name, ids, asked_tokens(arrival), stops, priority=arrival.priority)


def asked_tokens(arrival: Arrival) -> int:
    return arrival.num_output_tokens if arrival.max_tokens is None else arrival.max_tokens


def outputs(arrival: Arrival, done: int, count: int) -> list[int]:
    """Its next `count` tokens, after `done`."""
    ids = [arrival.output_token_id] * count
    if done + count == arrival.num_output_tokens and asked_tokens(arrival) > arrival.num_output_tokens:
        ids[-1] = END_ID
    return ids


def decodes_of(running: Sequence[Request], config: SchedulerConfig, count: int) -> StepShape:
    """The next `count` steps, in which each of the requests decodes one token."""
    computed = [request.num_computed_tokens for request in running]
    later = np.arange(count)
    attended = sum(computed) + len(running) * (1 + later)
    checkpoints = np.zeros(count, np.int64)
    if config.prefix_caching:
        size = config.block_size
        full = np.bincount([(-number - 1) % size for number in computed], minlength=size)
        checkpoints = full[later % size]
    requests = np.full(count, len(running))
    return StepShape(requests, requests, attended, attended, requests, checkpoints, 0, 0)
