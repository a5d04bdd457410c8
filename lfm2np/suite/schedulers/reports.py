"""Is what an adapter returns whole, of its types and in range? Each function ends in `fail` with the method and field.

Sequences are lists, tuples or arrays: what has a length and an order. A generator is none: it can be read only once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from lfm2np.suite.schedulers.named_memory import BLOCKS, STATES
from scheduler.protocol import Copy, Entry, Step

Fail = Callable[[str, str], NoReturn]


def checked_step(step: Any, sizes: Mapping[str, Any], fail: Fail) -> Step:
    """As a Step, with every field of its type and in range."""
    if not isinstance(step, Step):
        fail("reports", f"step() returned {type(step).__name__}, expected a Step")
    for number, entry in enumerate(sequence(step.entries, "step(): entries", fail)):
        if not isinstance(entry, Entry):
            fail("reports", f"step(): entries[{number}]: {type(entry).__name__}, expected an Entry")
        check_entry(entry, f"step(): entries[{number}]", sizes, fail)
    for name in ("preempted", "parted"):
        checked_ids(getattr(step, name), f"step(): {name}", fail)
    checked_copies(step.copies, "step()", fail)
    return step


def check_entry(entry: Entry, where: str, sizes: Mapping[str, Any], fail: Fail) -> None:
    if not isinstance(entry.request_id, str):
        fail("reports", f"{where}.request_id: {type(entry.request_id).__name__}, expected a str")
    count = len(sequence(entry.token_ids, f"{where}.token_ids", fail))
    for name in ("start", "num_drafts"):
        if not is_count(getattr(entry, name)):
            fail("reports", f"{where}.{name}: {getattr(entry, name)!r}, expected an integer of at least 0")
    if not 0 <= entry.num_drafts < max(1, count):
        fail("reports", f"{where}.num_drafts: {entry.num_drafts} of {count} tokens")
    for number, pair in enumerate(sequence(entry.checkpoints, f"{where}.checkpoints", fail)):
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(is_count, pair))):
            fail("reports", f"{where}.checkpoints[{number}]: {pair!r}, expected (tokens, checkpoint)")
    window, stop = entry.window, entry.start + count
    places: list[tuple[str, Any, int, str]] = [
        ("writes", entry.writes, count, "num_blocks"),
        ("reads", entry.reads, stop, "num_blocks"),
    ]
    if window is not None:
        stop -= count if window.is_ring else 0
        if not is_count(window.first) or window.first > stop:
            fail("reports", f"{where}.window.first: {window.first!r}, expected 0 to {stop}")
        places.append(("window.writes", window.writes, count, "num_window_blocks"))
        places.append(("window.reads", window.reads, stop - window.first, "num_window_blocks"))
    for name, some, expected, blocks in places:
        most = None if sizes.get(blocks) is None else sizes[blocks] * (sizes.get("block_size") or 1)
        check_places(some, f"{where}.{name}", expected, most, fail, may_be_none=name == "window.writes")


def check_places(some: Any, where: str, expected: int, most: int | None, fail: Fail, may_be_none: bool) -> None:
    if len(sequence(some, where, fail)) != expected:
        fail("reports", f"{where}: {len(some)} places, expected {expected}")
    for index, place in enumerate(some):
        if not (may_be_none and place is None) and (not is_count(place) or (most is not None and place >= most)):
            limit = "an integer of at least 0" if most is None else f"0 to {most - 1}"
            fail("reports", f"{where}[{index}]: {place!r}, expected {limit}")


def checked_copies(copies: Any, where: str, fail: Fail) -> Sequence[Copy]:
    memories = (*BLOCKS, *STATES)
    for number, each in enumerate(sequence(copies, f"{where}: copies", fail)):
        if not isinstance(each, Copy):
            fail("reports", f"{where}: copies[{number}]: {type(each).__name__}, expected a Copy")
        for end in (each.source, each.destination):
            is_end = isinstance(end, tuple) and len(end) == 2 and end[0] in memories and is_count(end[1])
            if end is not None and not is_end:
                expected = f"expected (memory, number), one of {', '.join(memories)}"
                fail("reports", f"{where}: copies[{number}]: {end!r}, {expected}")
    checked: Sequence[Copy] = copies
    return checked


def checked_ids(names: Any, where: str, fail: Fail) -> list[str]:
    """Request ids, in any collection."""
    if isinstance(names, str) or not hasattr(names, "__len__") or not hasattr(names, "__iter__"):
        fail("reports", f"{where}: {type(names).__name__}, expected request ids")
    for name in names:
        if not isinstance(name, str):
            fail("reports", f"{where}: {name!r}, expected a request id")
    return [str(name) for name in names]


def checked_free(free: Any, method: str, may_be_none: bool, fail: Fail) -> int | list[int] | None:
    """A number, or the numbers of what is free; None, where it may be, for a memory that is not there."""
    if free is None and may_be_none:
        return None
    if is_count(free):
        return operator.index(free)
    if isinstance(free, str) or not hasattr(free, "__len__"):
        shown = repr(free) if isinstance(free, int | str) else type(free).__name__
        fail("reports", f"{method}() returned {shown}, expected block numbers, or how many they are")
    for number in free:
        if not is_count(number):
            fail("reports", f"{method}(): {number!r}, expected a block number")
    return [operator.index(number) for number in free]


def sequence(value: Any, where: str, fail: Fail) -> Sequence[Any]:
    if isinstance(value, str) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        fail("reports", f"{where}: {type(value).__name__}, expected a list or a tuple")
    checked: Sequence[Any] = value
    return checked


def is_count(value: Any) -> bool:
    """A whole number of at least 0, of NumPy too; neither a bool nor an array."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= 0
    except TypeError:
        return False
