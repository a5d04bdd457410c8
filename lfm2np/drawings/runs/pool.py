"""The pool in every step: the trace's schedule on a real scheduler once more, which knows who owns what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lfm2np.drawings.runs.run import Run
from scheduler import FinishReason, Request, Scheduler, SchedulerConfig
from scheduler.trace import plan_as_json, request_from_json


@dataclass(frozen=True)
class Pool:
    """One step. Owners and slots are those while it computes."""

    owners: Mapping[int, tuple[str, ...]]  # block -> the requests that hold it, reserved ones too
    slots: Mapping[int, str]  # state slot -> request
    free: int  # blocks that nobody holds
    cached: int  # of these, blocks that a prefix can find
    published: frozenset[int]  # blocks that a prefix can find after the step


class OtherSchedule(Exception):
    """The trace is of a scheduler that does otherwise, as one with a fault."""


def pools(run: Run) -> list[Pool] | None:
    """Of each step; None where a sound scheduler does not plan what the trace says."""
    scheduler, found = Scheduler(SchedulerConfig(**run.config)), []
    try:
        for line in run.schedule[1:]:
            if line["kind"] in ("step", "abandon"):
                found.append(step_of(scheduler, line))
            else:
                between_steps(scheduler, line)
    except Exception:  # a scheduler that was broken may have planned anything
        return None
    return found


def step_of(scheduler: Scheduler, line: Mapping[str, Any]) -> Pool:
    plan = scheduler.add_drafts(scheduler.schedule(), line["drafts"])
    if plan_as_json(plan) != line["plan"]:
        raise OtherSchedule
    owners: dict[int, list[str]] = {}
    for request in scheduler.running:
        for block in request.block_table:
            owners.setdefault(block, []).append(request.request_id)
    slots = {request.slot: request.request_id for request in scheduler.running if request.slot is not None}
    keys = scheduler.pool.key_of
    free = [block for block in range(scheduler.config.num_blocks) if block not in owners]
    cached = sum(keys[block] is not None for block in free)
    if line["kind"] == "abandon":
        scheduler.abandon(plan)
    else:
        scheduler.update(plan, line["tokens"], line["errors"])
    published = frozenset(block for block, key in enumerate(scheduler.pool.key_of) if key is not None)
    return Pool({block: tuple(names) for block, names in owners.items()}, slots, len(free), cached, published)


def between_steps(scheduler: Scheduler, line: Mapping[str, Any]) -> None:
    kind = line["kind"]
    if kind == "add":
        scheduler.add(asked(line["request"]), [asked(one) for one in line["forks"]])
    elif kind == "fork":
        scheduler.fork(line["parent"], asked(line["child"]))
    elif kind == "preempt":
        scheduler.preempt(line["request_id"])
    else:
        scheduler.finish(line["request_id"], FinishReason(line["reason"]))


def asked(raw: Mapping[str, Any]) -> Request:
    return request_from_json(raw)
