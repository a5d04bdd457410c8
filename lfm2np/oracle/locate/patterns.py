"""Which rows, channels and steps of a tensor are wrong, in words: the shape of an error often names its cause.

Rows from a chunk's border on point to state between steps, wrong single heads to grouping or strides, a channel
together with the one half a head further to the rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]
MOST_RUNS = 6  # of indices that are listed
TOKEN, STEP = "token", "step"  # what a row of a tensor belongs to


@dataclass(frozen=True)
class Context:
    """A row for each position that a step sees: of a layer with a window, from its first row's window on."""

    window: int | None = None


Per = str | Context


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

    def seen(self, window: int | None = None) -> list[slice]:
        """The positions that each step's rows attend to, from the first row's window on if there is one."""
        back = self.tokens if window is None else window - 1
        return [slice(max(0, start - back), end) for start, end in zip(self.starts, self.ends, strict=True)]

    def spans(self) -> list[slice]:
        """The rows of each step."""
        return self.seen(1)

    def step_of(self, per: Per) -> Indices:
        """The step of each row; -1 for rows before the first step, which contexts also have first."""
        if per == STEP:
            return np.arange(len(self.sizes))
        seen = self.seen(per.window if isinstance(per, Context) else 1)
        counts = [self.first, *(rows.stop - rows.start for rows in seen)]
        return np.repeat(np.arange(-1, len(self.sizes)), counts)

    def count(self, per: Per) -> int:
        """Rows of a tensor with one per token, per step, or, of the steps alone, per position that each sees."""
        steps = self.step_of(per)
        return int((steps >= 0).sum()) if isinstance(per, Context) else len(steps)

    def place(self, per: Per, row: int) -> str:
        if not isinstance(per, Context):
            return f"{'row' if per == TOKEN else per} {row}"
        step_of = self.step_of(per)
        step = int(step_of[row])
        position = self.seen(per.window)[step].start + row - int(np.searchsorted(step_of, step))
        return f"position {position} as step {step} read it"


def describe_rows(wrong: Mask, first: int = 0, noun: str = "row") -> str:
    """Rows [T], at least one wrong, in words; those before `first` were not dumped. A row may be a step's."""
    noun = "row" if noun == TOKEN else noun
    rows, total = np.flatnonzero(wrong), len(wrong)
    if len(rows) == total - first:
        if first == total - 1:
            return f"the only {noun}" if total == 1 else f"the last {noun}, {total - 1}"
        return f"all {total} {noun}s" if first == 0 else f"all that are there, {noun}s {first} to {total - 1}"
    if len(rows) == 1:
        place = {0: f"the first {noun}, ", total - 1: f"the last {noun}, "}.get(int(rows[0]), f"{noun} ")
        return f"only {place}{rows[0]}"
    right = f"right for {listed(np.arange(first, rows[0]), noun)}" if rows[0] > first else ""
    is_run = rows[-1] - rows[0] == len(rows) - 1
    if is_run and rows[-1] == total - 1:
        return f"from {noun} {rows[0]} on, {right}"
    if is_run:
        return f"{noun}s {rows[0]} to {rows[-1]} of {total}"
    if (again := repeated(rows)) is not None:
        length, period = again
        each = noun if length == 1 else f"{length} {noun}s"
        where = f"multiples of {period}" if rows[0] % period == 0 else f"every {ordinal(period)} {noun}"
        return f"the {each} at {where}, {rows[0]} to {rows[-1]} of {total}"
    if right and 2 * len(rows) >= total - rows[0]:
        return f"from {noun} {rows[0]} on ({len(rows)} of {total - rows[0]}), {right}"
    return f"{listed(rows, noun)} ({len(rows)} of {total})"


def repeated(rows: Indices) -> tuple[int, int] | None:
    """(length, period) if wrong rows come `length` at a time, every `period` rows.

    At least three times, or twice if they begin at the first multiple of the period: any two have some period.
    """
    starts = rows[np.diff(rows, prepend=-2) > 1]
    if len(starts) < 2:
        return None
    period = int(starts[1] - starts[0])
    length = int(np.flatnonzero(np.diff(rows) > 1)[0]) + 1
    if len(starts) < 3 and starts[0] != period:
        return None
    reached = np.arange(starts[0], starts[-1] + length)
    return (length, period) if np.array_equal(rows, reached[(reached - starts[0]) % period < length]) else None


def describe_channels(wrong: Mask, heads: int, parts: Sequence[str], noun: str = "channel") -> str:
    """Channels of a mask [T, width] in words: by heads or named parts, if there are any."""
    columns = np.asarray(wrong.any(axis=0))
    if heads:
        return describe_heads(columns.reshape(heads, -1))
    if parts and not columns.all():
        named = zip(parts, np.split(columns, len(parts)), strict=True)
        return "; ".join(f"{name}: {described(part, 'channel')}" for name, part in named if part.any())
    return described(columns, noun)


def describe_heads(wrong: Mask) -> str:
    """Of a mask [heads, E]."""
    channels = np.asarray(wrong.any(axis=0))  # channels of any head
    text, half = described(np.asarray(wrong.any(axis=1)), "head"), wrong.shape[1] // 2
    if channels.all():
        return text
    if np.array_equal(channels[:half], channels[half:]):
        pairs = listed(np.flatnonzero(channels[:half]), "channel")
        return f"{text}: {pairs} and those {half} further, which are rotated together"
    return f"{text}: {described(channels, 'channel')}"


def described(wrong: Mask, noun: str) -> str:
    indices, total = np.flatnonzero(wrong), len(wrong)
    if len(indices) == total:
        return f"the only {noun}" if total == 1 else f"all {total} {noun}s"
    steps = np.unique(np.diff(indices))
    if len(indices) > 2 and len(steps) == 1 and steps[0] > 1:
        return f"every {ordinal(int(steps[0]))} {noun} from {indices[0]} on ({len(indices)} of {total})"
    return f"{listed(indices, noun)} of {total}"


def listed(indices: Any, noun: str) -> str:
    """ "row 3", "rows 0 to 4, 7", or how many if they are scattered."""
    runs = np.split(np.asarray(indices), np.flatnonzero(np.diff(indices) > 1) + 1)
    if len(runs) > MOST_RUNS:
        return f"{len(indices)} scattered {noun}s"
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"{noun}{'s' if len(indices) > 1 else ''} {', '.join(texts)}"


def ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def describe_place(wrong: Mask, first: int, steps: Steps, per: Per) -> tuple[str, str]:
    """Wrong rows of a mask, whose first row is number `first`, and the wrong steps, in words."""
    rows = np.concatenate([np.zeros(first, bool), wrong])
    in_steps = describe_steps(rows, steps, per)
    if isinstance(per, Context):
        return describe_reads(rows, steps, per), in_steps
    return (in_steps if per == STEP and in_steps else describe_rows(rows, first, per)), in_steps


def describe_steps(wrong: Mask, steps: Steps, per: Per) -> str:
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


def describe_reads(wrong: Mask, steps: Steps, context: Context) -> str:
    """The positions that the first wrong step read wrongly."""
    step_of, seen = steps.step_of(context), steps.seen(context.window)
    first = int(step_of[wrong][0])
    positions = seen[first].start + np.flatnonzero(wrong[step_of == first])
    return f"{listed(positions, 'position')} of {seen[first].stop}, as step {first} read them"
