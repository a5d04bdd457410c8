"""What a trace implies and does not say: who stands where in each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lfm2np.teaching.drawings.runs.recorded_run import Entry, Run, Step
from scheduler import FREED, BlockPool, Scheduler, Status, TraceError, replay

ABSENT, QUEUED, PREFILL, RECOMPUTED = "absent", "queued", "prefill", "recomputed"
DECODE, IDLE, PREEMPTED, ENDED = "decode", "idle", "preempted", "ended"
STATES = {Status.WAITING: QUEUED, Status.PREEMPTED: PREEMPTED, Status.RUNNING: IDLE}
LETTERS = {QUEUED: "q", PREFILL: "P", RECOMPUTED: "R", DECODE: "d", IDLE: "·", PREEMPTED: "x", ABSENT: "", ENDED: ""}


@dataclass(frozen=True)
class Moment:
    state: str
    tokens: int = 0  # scheduled
    kept: int = 0  # of these, what stays: not rejected drafts
    recomputed: int = 0  # of these, what was computed before


def moments(run: Run) -> dict[str, list[Moment]]:
    """For each request, in order of arrival, one moment a step: by the scheduler once more, else by the plans."""
    timeline: dict[str, list[Moment]] = {name: [] for name in run.requests}

    def planned(scheduler: Scheduler) -> None:
        step = run.steps[scheduler.step]
        entries = {entry.request_id: entry for entry in step.entries}
        for name, row in timeline.items():
            request = scheduler.requests.get(name)
            if request is None:
                row.append(Moment(ENDED if run.requests[name].arrival <= step.number else ABSENT))
            elif name in entries:
                row.append(computed(step, entries[name], request.furthest_computed, request.is_decoding))
            else:
                row.append(Moment(STATES[request.status]))

    try:
        replay(run.schedule, planned, is_whole=False)
    except TraceError:
        return moments_by_plans(run)
    return timeline


def moments_by_plans(run: Run) -> dict[str, list[Moment]]:
    """Of a run that the scheduler does not repeat. It has no forks."""
    state = dict.fromkeys(run.requests, ABSENT)
    furthest, outputs = dict.fromkeys(run.requests, 0), dict.fromkeys(run.requests, 0)
    timeline: dict[str, list[Moment]] = {name: [] for name in run.requests}
    for step in run.steps:
        entries = {entry.request_id: entry for entry in step.entries}
        events = {name: what for steps, what, name in run.events if steps == step.number}
        for name, asked in run.requests.items():
            if state[name] == ABSENT and asked.arrival <= step.number:
                state[name] = QUEUED
            if name in step.preempted or name in events:
                state[name] = PREEMPTED if events.get(name, "preempt") == "preempt" else ENDED
            elif name in step.admitted:
                state[name] = IDLE
            now = Moment(state[name])
            if name in entries:
                start, state[name] = entries[name].start, IDLE
                decodes = outputs[name] > 0 and start == len(asked.prompt) + outputs[name] - 1
                now = computed(step, entries[name], furthest[name], decodes)
                furthest[name] = max(furthest[name], start + now.kept)
            outputs[name] += len(step.tokens.get(name, ()))
            timeline[name].append(now)
            state[name] = ENDED if name in step.finished else state[name]
    return timeline


def computed(step: Step, entry: Entry, furthest: int, decodes: bool) -> Moment:
    """`furthest`: of the request's positions, those before it were computed once already."""
    kept = num_kept(step, entry)
    again = max(0, min(entry.start + kept, furthest) - entry.start)
    is_again = again and again >= len(entry.token_ids) - 1
    return Moment(RECOMPUTED if is_again else DECODE if decodes else PREFILL, len(entry.token_ids), kept, again)


def num_kept(step: Step, entry: Entry) -> int:
    """Of the scheduled tokens those that are no rejected drafts."""
    accepted = max(0, len(step.tokens.get(entry.request_id, ())) - 1)
    return len(entry.token_ids) - entry.num_drafts + min(accepted, entry.num_drafts)


def colours(run: Run) -> Mapping[str, int]:
    """A number for each request, by arrival; its samples and forks have the same."""
    numbers: dict[str, int] = {}
    for name, asked in run.requests.items():
        numbers[name] = numbers[asked.parent] if asked.parent in numbers else len(set(numbers.values()))
    return numbers


# --- who owns which block, by the real scheduler once more


@dataclass(frozen=True)
class Pool:
    """One step. Owners and slots are those while it computes."""

    owners: Mapping[int, tuple[str, ...]]  # block -> the requests that hold it, reserved ones too
    slots: Mapping[int, str]  # state slot -> request
    cached: int | None = None  # blocks without an owner that a prefix can find; None where it is not known
    published: frozenset[int] = frozenset()  # blocks that a prefix can find after the step


def pools(run: Run, windowed: Run | None = None) -> list[Pool]:
    """Of each step. Where a scheduler with a fault made the schedule, which can't be repeated, as its plans tell.

    With `windowed`, which is in_windows(run), those of its windowed layers.
    """
    known: list[Pool] = []

    def ended(scheduler: Scheduler) -> None:
        keys = enumerate(pool_of(scheduler, windowed is not None).key_of)
        known[-1] = replace(known[-1], published=frozenset(block for block, key in keys if key is not None))

    def begun(scheduler: Scheduler) -> None:
        known.append(planned(scheduler, windowed is not None))

    try:
        replay(run.schedule, begun, ended, is_whole=False)
    except TraceError:
        return by_plans(windowed or run)
    return known


def pool_of(scheduler: Scheduler, is_windowed: bool) -> BlockPool:
    return scheduler.memory.groups[is_windowed].pool


def planned(scheduler: Scheduler, is_windowed: bool) -> Pool:
    running = scheduler.running
    owners = owners_of((request.request_id, request.tables[is_windowed]) for request in running)
    slots = {request.slot: request.request_id for request in scheduler.running if request.slot is not None}
    keys = enumerate(pool_of(scheduler, is_windowed).key_of)
    return Pool(owners, slots, sum(key is not None and block not in owners for block, key in keys))


def by_plans(run: Run) -> list[Pool]:
    """The requests whose tables name a block, by their last plan."""
    tables: dict[str, tuple[int, ...]] = {}
    of_steps = []
    for step in run.steps:
        gone = {name for steps, what, name in run.events if steps == step.number and not what.startswith("fork")}
        for name in (*step.preempted, *gone):
            tables.pop(name, None)
        tables |= {entry.request_id: entry.block_table for entry in step.entries}
        of_steps.append(Pool(owners_of(tables.items()), {entry.slot: entry.request_id for entry in step.entries}))
        for name in step.finished:
            tables.pop(name, None)
    return of_steps


def owners_of(tables: Iterable[tuple[str, Sequence[int]]]) -> dict[int, tuple[str, ...]]:
    owners: dict[int, list[str]] = {}
    for name, table in tables:
        for block in table:
            if block == FREED:
                continue
            owners.setdefault(block, []).append(name)
    return {block: tuple(names) for block, names in owners.items()}


def prefix_hit_tokens(run: Run) -> int:
    """Tokens that are not computed, as the prefix cache has them, also where a preempted request comes back."""
    return sum(entry.start for step in run.steps for entry in step.entries if entry.request_id in step.admitted)
