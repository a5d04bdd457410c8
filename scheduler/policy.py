"""Who goes first: the order of requests, and which work each step takes in which order. A policy is one class.

`key` orders requests, waiting and running alike, and never changes for a request: the smallest key is admitted first
and gets tokens first, the largest is preempted first. `plan` adds work to a step. No policy starves a request, as long
as every running request is finite:

fcfs            the oldest request always progresses: it may preempt all others. A request waits at most for the work
                of those that arrived before it.
priority        key = arrival step + priority * patience: only requests that arrive less than `patience` steps later
                for each level of priority can overtake. After that it is the oldest.
prefill-first   prompts before decodes, but after `max_prefill_steps` steps in which decodes were left out, a step
                serves decodes first: the oldest decode gets a token at least every max_prefill_steps + 1 steps.
waiting-served  after at most `max_waiting_tokens` decode steps the queue is let in, as far as slots and blocks allow;
                these are reserved whole, in order of arrival, so the head waits at most until those before it ended.
static          the next batch begins when the last one ended; requests enter in order of arrival.
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

from scheduler.plan import UnfinishedPlan
from scheduler.request import Request


class Step:
    """The step that is being planned, as a policy sees it. `scheduler`: a Scheduler, whose module imports this one.

    num_running     requests that were running before this step
    num_prefilling  those of them that do not decode yet
    """

    def __init__(self, scheduler: Any, plan: UnfinishedPlan) -> None:
        self._scheduler, self._plan = scheduler, plan
        self.num_running, self.num_prefilling = len(scheduler.running), scheduler._num_prefilling

    def run(self, decodes: bool = True, prompts: bool = True) -> None:
        """Tokens for running requests, in order; the last ones are preempted if blocks run out."""
        self._scheduler._continue(self._plan, decodes, prompts)

    def admit(self, least: int = 1, whole_prompts: bool = False, beyond_budget: bool = False) -> bool:
        """Waiting requests, in order, until the first that does not fit; whether there were any.

        least          admit that many or none
        whole_prompts  only prompts that fit into what is left of the budget (or the first one)
        beyond_budget  also when the budget is spent: they run from the next step on
        """
        self._scheduler._admit(self._plan, least, whole_prompts, beyond_budget)
        return bool(self._plan.admitted)

    @property
    def has_decodes(self) -> bool:
        """Whether a request that decodes has tokens in this step."""
        return any(self._scheduler.requests[name].is_decoding for name in self._plan.scheduled)


class Settings(Protocol):
    """Those of SchedulerConfig that policies read."""

    @property
    def waiting_served_ratio(self) -> float: ...
    @property
    def max_waiting_tokens(self) -> int: ...


class FirstComeFirstServed:
    name = "fcfs"
    reserves = False  # a request is admitted only with the blocks for its whole length, so it is never preempted
    admits_beside_running = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def key(self, request: Request) -> tuple[int, int]:
        return (request.arrival, 0)

    def plan(self, step: Step) -> None:
        step.run()
        step.admit()

    def skip(self, count: int) -> None:
        """So many steps passed in which all that ran decoded, and nobody was let in."""


class Priority(FirstComeFirstServed):
    """Lower `priority` first; one level is worth `patience` steps of waiting."""

    name = "priority"
    patience = 1000

    def key(self, request: Request) -> tuple[int, int]:
        return (request.arrival_step + request.priority * self.patience, request.arrival)


class PrefillFirst(FirstComeFirstServed):
    name = "prefill-first"
    max_prefill_steps = 8
    _without_decodes = 0

    def plan(self, step: Step) -> None:
        owed = self._without_decodes >= self.max_prefill_steps
        if owed:
            step.run(prompts=False)
        step.run(decodes=False)
        step.admit()
        if not owed:
            step.run(prompts=False)  # what is left
        self._without_decodes = 0 if step.has_decodes else self._without_decodes + 1

    def skip(self, count: int) -> None:
        self._without_decodes = 0


class WaitingServed(FirstComeFirstServed):
    """TGI's rule, not chunked: backends/v3/src/backend.rs, batching_task, and queue.rs, next_batch.

    A new batch is taken from the queue if it has at least floor(running * waiting_served_ratio) requests, in float32,
    or any at all once `max_waiting_tokens` decode steps have passed. Its prefill pauses decoding; after that one decode
    step always follows. A prompt longer than the token budget, which TGI refuses, is computed in several steps.
    """

    name = "waiting-served"
    reserves = True
    _waiting_tokens = 1
    _must_decode = False

    def plan(self, step: Step) -> None:
        if step.num_prefilling:
            step.run(decodes=False)
        elif step.num_running == 0:
            if step.admit(whole_prompts=True):
                self._waiting_tokens, self._must_decode = 1, False
        elif not self._must_decode and step.admit(self._least(step.num_running), whole_prompts=True):
            self._waiting_tokens, self._must_decode = 1, True
        else:
            step.run()
            self._waiting_tokens, self._must_decode = self._waiting_tokens + 1, False

    def skip(self, count: int) -> None:
        self._waiting_tokens, self._must_decode = self._waiting_tokens + count, False

    def _least(self, num_running: int) -> int:
        """Requests that the queue must hold to be let in."""
        if self._waiting_tokens >= self.settings.max_waiting_tokens:
            return 1
        return int(float32(float32(num_running) * float32(self.settings.waiting_served_ratio)))


class Static(FirstComeFirstServed):
    """Request-level batching: a batch is formed once and runs until its longest member ends."""

    name = "static"
    reserves = True
    admits_beside_running = False

    def plan(self, step: Step) -> None:
        if step.num_running == 0:
            step.admit(beyond_budget=True)
        else:
            step.run(decodes=step.num_prefilling == 0)


def float32(value: float) -> float:
    """The nearest float32."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


POLICIES: dict[str, type[FirstComeFirstServed]] = {
    policy.name: policy for policy in (FirstComeFirstServed, Priority, PrefillFirst, WaitingServed, Static)
}
