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
waiting-served  `max_waiting_tokens` - 1 decode steps after the last admission, at least one, the queue is let in at the
                latest, as far as slots and blocks allow; these are reserved whole, in order of arrival, so the head
                waits at most until those before it ended.
static          the next batch begins when the last one ended; requests enter in order of arrival.
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

from scheduler.request import Request


class Step(Protocol):
    """What a policy sees of the step that it plans, and may call: step.py."""

    @property
    def num_running(self) -> int: ...
    @property
    def has_prompts(self) -> bool: ...
    @property
    def has_decodes(self) -> bool: ...
    @property
    def admitted(self) -> list[str]: ...
    def fill(
        self,
        decodes: bool = True,
        prompts: bool = True,
        admit: bool = True,
        least: int = 1,
        whole_prompts: bool = False,
        beyond_budget: bool = False,
    ) -> None: ...


class FirstComeFirstServed:
    name = "fcfs"
    reserves = False  # True: admitted with the blocks for its whole length, so no step ever preempts it
    admits_beside_running = True

    def __init__(self, settings: Any) -> None:
        self.settings = settings  # a SchedulerConfig, whose module imports this one

    def key(self, request: Request) -> tuple[int, int]:
        return (request.arrival, 0)

    def plan(self, step: Step) -> None:
        step.fill()

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
            step.fill(prompts=False, admit=False)
        step.fill(decodes=False)
        step.fill(prompts=False, admit=False)  # what is left
        self._without_decodes = 0 if step.has_decodes else self._without_decodes + 1

    def skip(self, count: int) -> None:
        self._without_decodes = 0


class WaitingServed(FirstComeFirstServed):
    """TGI's rule, not chunked: backends/v3/src/backend.rs, batching_task, and queue.rs, next_batch.

    A new batch is taken from the queue if at least floor(running * waiting_served_ratio) requests, in float32, fit
    slots, blocks and budget, or any at all once the steps since the last batch are `max_waiting_tokens`: its prefill is
    the first of them, the others decode. A prefill beside running requests pauses their decoding; after that one decode
    step always follows, at any ratio. A prompt longer than the token budget, which TGI refuses, is computed in several
    steps.
    """

    name = "waiting-served"
    reserves = True
    _waiting_tokens = 1
    _must_decode = False

    def plan(self, step: Step) -> None:
        if step.has_prompts:
            step.fill(decodes=False, admit=False)
            return
        if not self._must_decode or not step.num_running:
            step.fill(False, False, least=self._least(step.num_running), whole_prompts=True)
        if step.admitted:
            self._waiting_tokens, self._must_decode = 1, step.num_running > 0
        elif step.num_running:
            step.fill(admit=False)
            self._waiting_tokens, self._must_decode = self._waiting_tokens + 1, False

    def skip(self, count: int) -> None:
        self._waiting_tokens, self._must_decode = self._waiting_tokens + count, False

    def _least(self, num_running: int) -> int:
        """Requests that have to fit for any to be let in."""
        if self._waiting_tokens >= self.settings.max_waiting_tokens:
            return 1
        return int(float32(float32(num_running) * float32(self.settings.waiting_served_ratio)))


class Static(FirstComeFirstServed):
    """Request-level batching: a batch is formed once and runs until its longest member ends."""

    name = "static"
    reserves = True
    admits_beside_running = False

    def plan(self, step: Step) -> None:
        step.fill(decodes=not step.has_prompts, admit=not step.num_running, beyond_budget=True)


def float32(value: float) -> float:
    """The nearest float32."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


POLICIES: dict[str, type[FirstComeFirstServed]] = {
    policy.name: policy for policy in (FirstComeFirstServed, Priority, PrefillFirst, WaitingServed, Static)
}
