"""The pool in every step: the trace's schedule on a real scheduler once more, which knows who owns what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lfm2np.drawings.runs.run import Run
from scheduler import Scheduler, TraceError, replay


@dataclass(frozen=True)
class Pool:
    """One step. Owners and slots are those while it computes."""

    owners: Mapping[int, tuple[str, ...]]  # block -> the requests that hold it, reserved ones too
    slots: Mapping[int, str]  # state slot -> request
    cached: int | None = None  # blocks without an owner that a prefix can find; None where it is not known
    published: frozenset[int] = frozenset()  # blocks that a prefix can find after the step


def pools(run: Run) -> list[Pool]:
    """Of each step. Where a scheduler with a fault made the schedule, which can't be repeated, as its plans tell."""
    found: list[Pool] = []

    def ended(scheduler: Scheduler) -> None:
        keys = enumerate(scheduler.pool.key_of)
        found[-1] = replace(found[-1], published=frozenset(block for block, key in keys if key is not None))

    try:
        replay(run.schedule, lambda scheduler: found.append(planned(scheduler)), ended, is_whole=False)
    except TraceError:
        return by_plans(run)
    return found


def planned(scheduler: Scheduler) -> Pool:
    owners = owners_of((request.request_id, request.block_table) for request in scheduler.running)
    slots = {request.slot: request.request_id for request in scheduler.running if request.slot is not None}
    keys = enumerate(scheduler.pool.key_of)
    return Pool(owners, slots, sum(key is not None and block not in owners for block, key in keys))


def by_plans(run: Run) -> list[Pool]:
    """The requests whose tables name a block, by their last plan."""
    tables: dict[str, tuple[int, ...]] = {}
    found = []
    for step in run.steps:
        gone = {name for steps, what, name in run.events if steps == step.number and not what.startswith("fork")}
        for name in (*step.preempted, *gone):
            tables.pop(name, None)
        tables |= {entry.request_id: entry.block_table for entry in step.entries}
        found.append(Pool(owners_of(tables.items()), {entry.slot: entry.request_id for entry in step.entries}))
        for name in step.finished:
            tables.pop(name, None)
    return found


def owners_of(tables: Iterable[tuple[str, Sequence[int]]]) -> dict[int, tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for name, table in tables:
        for block in table:
            found.setdefault(block, []).append(name)
    return {block: tuple(names) for block, names in found.items()}
