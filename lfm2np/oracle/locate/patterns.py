"""Which rows and channels of a tensor are wrong, in words: the shape of an error often names its cause.

Rows from a chunk's border on point to state between steps, wrong single heads to grouping or strides, a channel
together with the one half a head further to the rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]
MOST_RUNS = 6  # of indices that are listed


def describe_rows(wrong: Mask, first: int = 0, noun: str = "row") -> str:
    """Rows [T], at least one wrong, in words; those before `first` were not dumped. A row may be a step's."""
    noun = "row" if noun == "token" else noun
    rows, total = np.flatnonzero(wrong), len(wrong)
    if len(rows) == total - first:
        if first == total - 1:
            return f"the only {noun}" if total == 1 else f"the last {noun}, {total - 1}"
        return f"all {total} {noun}s" if first == 0 else f"all that are there, {noun}s {first} to {total - 1}"
    if len(rows) == 1:
        place = {0: f"the first {noun}, ", total - 1: f"the last {noun}, "}.get(int(rows[0]), f"{noun} ")
        return f"only {place}{rows[0]}"
    before = f"right for {listed(np.arange(first, rows[0]), noun)}" if rows[0] > first else ""
    if is_run(rows) and rows[-1] == total - 1 and before:
        return f"from {noun} {rows[0]} on, {before}"
    if is_run(rows):
        return f"{noun}s {rows[0]} to {rows[-1]} of {total}"
    if (again := repeated(rows)) is not None:
        length, period = again
        each = noun if length == 1 else f"{length} {noun}s"
        where = f"multiples of {period}" if rows[0] % period == 0 else f"every {ordinal(period)} {noun}"
        return f"the {each} at {where}, {rows[0]} to {rows[-1]} of {total}"
    if before and 2 * len(rows) >= total - rows[0]:
        return f"from {noun} {rows[0]} on ({len(rows)} of {total - rows[0]}), {before}"
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
    if parts:
        named = dict(zip(parts, np.split(columns, len(parts)), strict=True))
        if not columns.all():
            return "; ".join(f"{name}: {described(part, 'channel')}" for name, part in named.items() if part.any())
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


def is_run(indices: Indices) -> bool:
    return bool(indices[-1] - indices[0] == len(indices) - 1)


def ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
