"""The steps in which the rows of a dump were computed, and which steps are wrong, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.locate.patterns import listed

Indices = NDArray[np.int64]
TOKEN, STEP, CONTEXT = "token", "step", "context"  # what a row of a tensor belongs to


@dataclass(frozen=True)
class Steps:
    """Consecutive steps of one sequence up to its last token; earlier tokens were in a cache."""

    tokens: int  # T
    sizes: tuple[int, ...]  # rows of each

    @property
    def first(self) -> int:
        """The first position that a step computed."""
        return self.tokens - sum(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=self.first))[1:]

    @property
    def starts(self) -> tuple[int, ...]:
        return (self.first, *self.ends[:-1])

    def spans(self) -> Iterator[slice]:
        """Rows of each step."""
        return (slice(start, end) for start, end in zip(self.starts, self.ends, strict=True))

    def count(self, per: str) -> int:
        """Rows of a tensor with one per token, per step, or per position that each step sees."""
        return {TOKEN: self.tokens, STEP: len(self.sizes), CONTEXT: sum(self.ends)}[per]

    def step_of(self, per: str) -> Indices:
        """The step of each row; -1 for rows before the first step, which contexts also have first."""
        numbers = np.arange(len(self.sizes))
        if per == STEP:
            return numbers
        counts = self.sizes if per == TOKEN else self.ends
        return np.concatenate([np.full(self.first, -1), np.repeat(numbers, counts)])

    def place(self, per: str, row: int) -> str:
        """A row in words."""
        if per == TOKEN:
            return f"row {row}"
        if per == STEP:
            return f"step {row}"
        step = int(self.step_of(per)[row])
        return f"position {row - self.first - sum(self.ends[:step])} as step {step} read it"


def describe_steps(wrong: NDArray[np.bool_], steps: Steps, per: str) -> str:
    """Steps with wrong rows (`wrong`, as many as `per` says); empty if there is only one step."""
    wrong_steps = np.unique(steps.step_of(per)[wrong])
    wrong_steps, total = wrong_steps[wrong_steps >= 0], len(steps.sizes)
    if total == 1 or not len(wrong_steps):
        return ""
    if len(wrong_steps) == total:
        return f"each of the {total}"
    first = int(wrong_steps[0])
    if first == 0 or len(wrong_steps) < total - first:
        return f"{listed(wrong_steps, 'step')} of {total}"
    rows = f"{steps.sizes[first]} row{'s' if steps.sizes[first] > 1 else ''} from position {steps.starts[first]} on"
    return f"from step {first} on ({rows}), right in {listed(np.arange(first), 'step')}"


def describe_reads(wrong: NDArray[np.bool_], steps: Steps) -> str:
    """For a tensor of contexts: the positions that the first wrong step read wrongly."""
    first = int(steps.step_of(CONTEXT)[wrong][0])
    positions = np.split(wrong[steps.first :], np.cumsum(steps.ends))[first]
    return f"{listed(np.flatnonzero(positions), 'position')} of {len(positions)}, as step {first} read them"
