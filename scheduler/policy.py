"""Who goes first: the order of requests, and what kinds of work one step takes.

A policy is three small answers. `key` orders requests, waiting and running alike, and never changes for a request: the
smallest key is admitted first and gets tokens first, the largest is preempted first. `phase` says what this step does.
`completed` tells the policy what it did. No policy starves a request, as long as every running request is finite:

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
from dataclasses import dataclass

from scheduler.request import Request


@dataclass(frozen=True)
class Load:
    """What a policy may look at."""

    num_running: int
    num_prefilling: int  # running requests whose known tokens are not all computed but one


@dataclass(frozen=True)
class Phase:
    """What one step takes."""

    decode: bool = True
    prefill: bool = True  # of requests that already run
    admit: bool = True
    prefill_first: bool = False  # prompts and admissions before decodes, instead of after
    decode_first: bool = False  # decodes before prompts and admissions, not in the order of keys
    least_admitted: int = 0  # admit that many or none
    admission_pauses: bool = False  # if any request is admitted, decodes wait
    whole_prompts: bool = False  # admit only prompts that fit into what is left of the budget (or the first one)
    form_batch: bool = False  # admit beyond the token budget: the batch is formed now


class FirstComeFirstServed:
    name = "fcfs"
    reserves = False  # a request is admitted only with the blocks for its whole length, so it is never preempted

    def key(self, request: Request) -> tuple[int, int]:
        return (request.arrival, 0)

    def phase(self, load: Load) -> Phase:
        return Phase()

    def completed(self, phase: Phase, decoded: bool, admitted: bool) -> None:
        """After each plan: whether it had decodes, and whether it admitted requests."""


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

    def phase(self, load: Load) -> Phase:
        owed = self._without_decodes >= self.max_prefill_steps
        return Phase(decode_first=owed, prefill_first=not owed)

    def completed(self, phase: Phase, decoded: bool, admitted: bool) -> None:
        self._without_decodes = 0 if decoded else self._without_decodes + 1


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

    def __init__(self, waiting_served_ratio: float, max_waiting_tokens: int) -> None:
        self.waiting_served_ratio = waiting_served_ratio
        self.max_waiting_tokens = max_waiting_tokens

    def phase(self, load: Load) -> Phase:
        if load.num_prefilling:
            return Phase(decode=False, admit=False)
        if load.num_running == 0:
            return Phase(whole_prompts=True)
        if self._must_decode:
            return Phase(admit=False)
        least = int(float32(float32(load.num_running) * float32(self.waiting_served_ratio)))
        if self._waiting_tokens >= self.max_waiting_tokens:
            least = 1
        return Phase(least_admitted=least, admission_pauses=True, whole_prompts=True)

    def completed(self, phase: Phase, decoded: bool, admitted: bool) -> None:
        if admitted:
            self._waiting_tokens, self._must_decode = 1, phase.admission_pauses
        elif decoded:
            self._waiting_tokens, self._must_decode = self._waiting_tokens + 1, False


class Static(FirstComeFirstServed):
    """Request-level batching: a batch is formed once and runs until its longest member ends."""

    name = "static"
    reserves = True

    def phase(self, load: Load) -> Phase:
        if load.num_running == 0:
            return Phase(form_batch=True)
        return Phase(decode=load.num_prefilling == 0, admit=False)


def float32(value: float) -> float:
    """The nearest float32."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


POLICIES: dict[str, type[FirstComeFirstServed]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "prefill-first": PrefillFirst,
    "waiting-served": WaitingServed,
    "static": Static,
}
