"""The scheduler with a clock: requests come at their times, each step takes what the cost model says.

The real `scheduler.Scheduler` decides every step. What arrives during a step is seen after it, as in an
engine that is one loop. Where nothing but decoding can happen, leap.py takes many steps at once; `leaps=False`
takes each by itself, with the same result to the last nanosecond.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat
from operator import itemgetter

import numpy as np

from lfm2np.commands.simulate.cost import CostModel, StepShape, shape_of
from lfm2np.commands.simulate.leap import leap, most_steps
from lfm2np.commands.simulate.traffic import Arrival
from scheduler import Request, RequestRefused, Scheduler, SchedulerConfig

MOST_STEPS = 1024  # of one leap
MOST_WAITING = 20_000  # requests: a queue this long is saturated, and ends the simulation
EVERY = 256  # requests between two reports of progress


def numbers() -> array[int]:
    return array("q")


@dataclass
class Counts:
    """What happened. Times are nanoseconds. Arrays by request, in order of arrival; -1: not yet, or never."""

    arrived: array[int] = field(default_factory=numbers)
    admitted: array[int] = field(default_factory=numbers)
    first: array[int] = field(default_factory=numbers)  # when its first token came
    ended: array[int] = field(default_factory=numbers)
    outputs: array[int] = field(default_factory=numbers)  # tokens that it gets
    waiting: array[int] = field(default_factory=numbers)  # length of the queue when it joined it, itself included
    gaps: array[int] = field(default_factory=numbers)  # from one token of a request to its next
    gap_counts: array[int] = field(default_factory=numbers)  # how often each of `gaps` occurred
    refused: Counter[str] = field(default_factory=Counter)  # requests, by reason
    left: int = 0  # requests that had not ended when the simulation did
    steps: int = 0
    single_steps: int = 0  # those that were taken one by one
    preemptions: int = 0
    busy: int = 0  # in steps
    beyond: int = 0  # in steps larger than any that the cost model was fitted to
    end: int = 0  # of the last step
    tokens: int = 0  # computed, recomputed ones too
    output_tokens: int = 0
    running: int = 0  # requests times nanoseconds
    blocks: int = 0  # owned blocks times nanoseconds


class Simulation:
    """One run."""

    def __init__(self, config: SchedulerConfig, cost: CostModel, leaps: bool = True) -> None:
        self.scheduler = Scheduler(config)
        self.config, self.cost, self.leaps = config, cost, leaps
        self.counts = Counts()
        self.now = 0
        self._live: dict[str, int] = {}  # the token id of the outputs of those that have not ended; names are numbers
        self._reasons: dict[str, str] = {}  # why requests are refused, by the words without their numbers
        self._last: dict[str, int] = {}  # when the last token of a request came

    def run(
        self,
        arrivals: Iterable[Arrival],
        progress: Callable[[int], None] | None = None,
        most_waiting: int = MOST_WAITING,
    ) -> Counts:
        """Until all have ended, or more than `most_waiting` wait. `progress` gets the number of arrivals so far."""
        source = iter(arrivals)
        coming = next(source, None)
        while coming is not None or self.scheduler.has_unfinished:
            while coming is not None and coming.at <= self.now:
                self._add(coming)
                coming = next(source, None)
                if progress and len(self.counts.arrived) % EVERY == 0:
                    progress(len(self.counts.arrived))
            if len(self.scheduler.waiting) > most_waiting:
                break
            if self.scheduler.has_unfinished:
                if not (self.leaps and self._leap(coming)):
                    self._step()
            elif coming is not None:
                self.now = coming.at
        self.counts.left = len(self._live)
        return self.counts

    # --- requests come and go

    def _add(self, arrival: Arrival) -> None:
        counts, name = self.counts, str(len(self.counts.arrived))
        try:
            request = request_of(name, arrival, self.config)
            self.scheduler.add(request)
        except RequestRefused as error:  # for other lengths the same reason: counted as one, with an example
            words = str(error).removeprefix(f"request {name!r}: ")
            counts.refused[self._reasons.setdefault(re.sub(r"\d+", "N", words), words)] += 1
            return
        for column in (counts.admitted, counts.first, counts.ended):
            column.append(-1)
        counts.arrived.append(arrival.at)
        counts.outputs.append(arrival.num_output_tokens)
        counts.waiting.append(len(self.scheduler.waiting))
        self._live[name] = arrival.output_token_id

    def _end(self, finished: Sequence[Request]) -> None:
        for request in finished:
            del self._last[request.request_id], self._live[request.request_id]
            self.counts.ended[int(request.request_id)] = self.now

    # --- time goes on

    def _leap(self, coming: Arrival | None) -> bool:
        """False, and no change, unless several steps are alike."""
        count = min(most_steps(self.scheduler), MOST_STEPS)
        if count < 2:
            return False
        running, counts, begin, owned = self.scheduler.running, self.counts, self.now, self._owned()
        tokens = {request.request_id: self._live[request.request_id] for request in running}
        shapes = decodes_of(running, self.config, count)
        durations = self.cost.nanoseconds(shapes)
        ends = begin + durations.cumsum()
        if coming is not None:  # only steps that begin before a request comes
            count = min(count, int((ends - durations).searchsorted(coming.at)))
        result = leap(self.scheduler, count, tokens)
        if not result.steps:
            return False
        if self.cost.largest:
            counts.beyond += int((durations * self.cost.is_beyond(shapes))[: result.steps].sum())
        ends, durations = ends[: result.steps], durations[: result.steps]
        end = int(ends[-1])
        counts.blocks += owned * (end - begin)
        counts.blocks += sum(number * (end - int(ends[step] - durations[step])) for step, number in result.taken)
        counts.output_tokens += len(tokens) * result.steps
        self._count_gaps(tokens, int(ends[0]))
        counts.gaps.frombytes(durations[1:].tobytes())
        counts.gap_counts.extend(repeat(len(tokens), result.steps - 1))
        self._spend(end, result.steps, len(tokens), len(tokens) * result.steps)
        self._last.update(dict.fromkeys(tokens, end))
        self._end(result.finished)
        return True

    def _step(self) -> None:
        begin, scheduler, counts = self.now, self.scheduler, self.counts
        plan = scheduler.schedule()
        shape = shape_of(plan)
        end = begin + int(self.cost.nanoseconds(shape))
        counts.beyond += int(self.cost.is_beyond(shape)) * (end - begin)
        counts.single_steps += 1
        counts.preemptions += len(plan.preempted)
        counts.blocks += self._owned() * (end - begin)
        for name in plan.admitted:
            if not scheduler.requests[name].num_steps:
                counts.admitted[int(name)] = begin
        self._spend(end, 1, len(scheduler.running), plan.num_tokens)
        tokens = {name: [self._live[name]] for entry in plan.scheduled for name in entry.samples}
        finished = scheduler.update(plan, tokens)
        counts.output_tokens += len(tokens)
        self._count_gaps(tokens, end)
        for name in tokens.keys() - self._last.keys():
            counts.first[int(name)] = end
        self._last.update(dict.fromkeys(tokens, end))
        self._end(finished)

    def _spend(self, end: int, steps: int, running: int, tokens: int) -> None:
        counts = self.counts
        counts.steps += steps
        counts.busy += end - self.now
        counts.running += running * (end - self.now)
        counts.tokens += tokens
        counts.end = self.now = end

    def _count_gaps(self, names: Iterable[str], now: int) -> None:
        """From the times of their last tokens, of those that had one, to now."""
        for last, times in Counter(filter(None, map(self._last.get, names))).items():
            self.counts.gaps.append(now - last)
            self.counts.gap_counts.append(times)

    def _owned(self) -> int:
        return self.config.num_blocks - self.scheduler.pool.num_free


def request_of(name: str, arrival: Arrival, config: SchedulerConfig) -> Request:
    """RequestRefused for one whose prompt alone is larger than the pool, before its tokens are laid out."""
    if arrival.num_prompt_tokens > config.num_blocks * config.block_size:
        raise RequestRefused(f"{arrival.num_prompt_tokens} prompt tokens: the pool has {config.num_blocks} blocks")
    ids = tuple(chain.from_iterable(repeat(token_id, count) for token_id, count in arrival.prompt))
    request = Request(name, ids, arrival.num_output_tokens, priority=arrival.priority)
    if config.prefix_caching:
        request.block_keys = block_keys(arrival, config.block_size)
    return request


def block_keys(arrival: Arrival, size: int) -> list[bytes]:
    """Of all full blocks; equal where all tokens up to a block's end are, as the scheduler's keys, but a hash a run."""
    keys, before, start = list[bytes](), b"", 0
    for token, runs in groupby((*arrival.prompt, (arrival.output_token_id, arrival.num_output_tokens)), itemgetter(0)):
        stop = start + sum(count for _, count in runs)
        keys += [before + b"%d %d" % (token, end) for end in range(start + size - start % size, stop + 1, size)]
        before, start = hashlib.sha256(before + b"%d %d" % (token, stop)).digest(), stop
    return keys


def decodes_of(running: Sequence[Request], config: SchedulerConfig, count: int) -> StepShape:
    """The next `count` steps, in which each of the requests decodes one token."""
    computed = [request.num_computed_tokens for request in running]
    later = np.arange(count)
    size, attended = config.block_size, sum(computed) + len(running) * (1 + later)
    full = np.bincount([(-number - 1) % size for number in computed], minlength=size)[later % size]
    checkpoints = full if config.prefix_caching else 0
    return StepShape(len(running), len(running), attended, attended, len(running), checkpoints, 0)
