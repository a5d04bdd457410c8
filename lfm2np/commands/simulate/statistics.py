"""What came of a simulation, counted as it goes: nothing is kept of a request that has ended.

Every number is a whole one (nanoseconds, tokens, blocks times nanoseconds), so a leap over many steps counts exactly as
the steps would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lfm2np.commands.simulate.histogram import Course, Histogram
from lfm2np.commands.simulate.traffic import Arrival

MOST_GROUPS = 64  # of neighbouring requests, for the bootstrap


@dataclass
class Group:
    """Requests that arrived one after another."""

    ttft: Histogram = field(default_factory=Histogram)  # arrival to first token
    tpot: Histogram = field(default_factory=Histogram)  # mean time from token to token, of a request
    e2e: Histogram = field(default_factory=Histogram)  # arrival to last token

    def merge(self, other: Group) -> None:
        self.ttft.merge(other.ttft)
        self.tpot.merge(other.tpot)
        self.e2e.merge(other.e2e)


@dataclass
class Padding:
    """Request-level batches of the same requests, `size` neighbours each, as a padded engine computes them: prompts as
    long as the longest, outputs until the longest ends."""

    size: int
    used: int = 0  # tokens
    padded: int = 0
    _count: int = 0
    _prompt: int = 0
    _output: int = 0

    def add(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self.used += num_prompt_tokens + num_output_tokens
        self._count += 1
        self._prompt = max(self._prompt, num_prompt_tokens)
        self._output = max(self._output, num_output_tokens)
        if self._count == self.size:
            self.close()

    def close(self) -> None:
        """The last batch may be smaller."""
        self.padded += self._count * (self._prompt + self._output)
        self._count = self._prompt = self._output = 0


@dataclass
class Statistics:
    padding: Padding
    requests: int = 0  # that arrived and were taken in
    finished: int = 0
    aborted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # why, without the request's name
    groups: list[Group] = field(default_factory=list)
    group_size: int = 1
    itl: Histogram = field(default_factory=Histogram)  # from one output of a request to its next
    queued: Histogram = field(default_factory=Histogram)  # arrival to admission
    ttft_by_priority: dict[int, Histogram] = field(default_factory=dict)
    steps: int = 0
    real_steps: int = 0  # those that were taken one by one
    busy: int = 0  # nanoseconds in steps
    beyond: int = 0  # nanoseconds in steps larger than any that the cost model was fitted to
    end: int = 0  # of the last step
    prompt_tokens: int = 0  # computed, recomputed ones too
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_drafts: int = 0
    preemptions: int = 0
    running: Course = field(default_factory=Course)  # requests times nanoseconds
    waiting: Course = field(default_factory=Course)
    blocks: Course = field(default_factory=Course)  # owned blocks times nanoseconds
    computed: Course = field(default_factory=Course)  # tokens
    most_waiting: int = 0
    most_waiting_at: int = 0
    last_arrival: int = 0
    gap_squares: int = 0  # of the times between two arrivals
    last_empty: int = 0  # when the queue was empty last, up to the last arrival
    arrived_since: int = 0  # requests
    waiting_at_last_arrival: int = 0

    def arrived(self, arrival: Arrival, num_prompt_tokens: int, now: int, waiting: int) -> None:
        """A request came, and joined the queue, in which it is one of `waiting`, at the end of the step, `now`."""
        self.requests += 1
        self.padding.add(num_prompt_tokens, arrival.num_output_tokens)
        self.gap_squares += (arrival.at - self.last_arrival) ** 2
        self.last_arrival = arrival.at
        self.waiting.over(arrival.at, now, 1)
        self.waiting_at_last_arrival = waiting
        self.arrived_since += 1
        if waiting <= 1:
            self.last_empty, self.arrived_since = arrival.at, 0
        if waiting > self.most_waiting:
            self.most_waiting, self.most_waiting_at = waiting, arrival.at

    def group_of(self, number: int) -> Group:
        """The group of the request with that number; neighbouring groups become one when they are too many."""
        while number // self.group_size >= MOST_GROUPS:
            for first, second in zip(self.groups[::2], self.groups[1::2], strict=False):
                first.merge(second)
            self.groups = self.groups[::2]
            self.group_size *= 2
        while number // self.group_size >= len(self.groups):
            self.groups.append(Group())
        return self.groups[number // self.group_size]

    def first_token(self, number: int, arrival: Arrival, now: int) -> None:
        self.group_of(number).ttft.add(now - arrival.at)
        self.ttft_by_priority.setdefault(arrival.priority, Histogram()).add(now - arrival.at)

    def ended(self, number: int, arrival: Arrival, first: int, now: int) -> None:
        group = self.group_of(number)
        self.finished += 1
        group.e2e.add(now - arrival.at)
        if arrival.num_output_tokens > 1:
            group.tpot.add((now - first) // (arrival.num_output_tokens - 1))

    def gaps(self, lasts: Iterable[int], now: int) -> None:
        """From the times of their last tokens to now."""
        for last, times in Counter(lasts).items():
            self.itl.add(now - last, times)

    def spent(self, begin: int, ends: NDArray[np.int64], running: int, waiting: int) -> None:
        """Steps one after another, with as many requests."""
        end = int(ends[-1])
        self.steps += len(ends)
        self.busy += end - begin
        self.end = end
        self.running.over(begin, end, running)
        self.waiting.over(begin, end, waiting)

    def owned(self, begin: int, ends: NDArray[np.int64], owned: int, taken: Sequence[tuple[int, int]]) -> None:
        """Blocks in use in these steps: `owned` before the first, and those that each takes (scheduler.leap)."""
        borders = [begin, *(begin if step == 0 else int(ends[step - 1]) for step, _ in taken), int(ends[-1])]
        levels = list(accumulate((count for _, count in taken), initial=owned))
        self.blocks.over_pieces(borders, levels)

    def whole(self) -> Group:
        """All requests."""
        total = Group()
        for group in self.groups:
            total.merge(group)
        return total
