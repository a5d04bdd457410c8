"""What a trace implies and does not say: who stands where in each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lfm2np.teaching.drawings.runs.recorded_run import Entry, Run, Step
from scheduler import FREED, BlockPool, Scheduler, TraceError, replay

ABSENT, QUEUED, PREFILL, RECOMPUTED = "absent", "queued", "prefill", "recomputed"
DECODE, IDLE, PREEMPTED, ENDED = "decode", "idle", "preempted", "ended"
LETTERS = {QUEUED: "q", PREFILL: "P", RECOMPUTED: "R", DECODE: "d", IDLE: "·", PREEMPTED: "x", ABSENT: "", ENDED: ""}


@dataclass(frozen=True)
class Moment:
    state: str
    tokens: int = 0  # scheduled
    kept: int = 0  # of these, what stays: not rejected drafts
    recomputed: int = 0  # of these, what was computed before


def moments(run: Run) -> dict[str, list[Moment]]:
    """For each request, in order of arrival, one moment a step."""
    inherits = inherited(run)
    furthest = {name: inherits[name].computed for name in run.requests}
    outputs = {name: inherits[name].outputs for name in run.requests}
    state = dict.fromkeys(run.requests, ABSENT)
    timeline: dict[str, list[Moment]] = {name: [] for name in run.requests}
    ended_between = between(run, "abort", "stop", "error")
    taken_between = between(run, "preempt")
    for step in run.steps:
        entries = {entry.request_id: entry for entry in step.entries}
        for name, asked in run.requests.items():
            before = state[name]
            if before == ABSENT and asked.arrival <= step.number:
                before = QUEUED
            if step.number == inherits[name].since:
                before = IDLE
            if (step.number, name) in ended_between:
                before = ENDED
            if (step.number, name) in taken_between:
                before = PREEMPTED
            if name in step.preempted:
                before = PREEMPTED
            elif name in step.admitted:
                before = IDLE
            known = len(asked.prompt) + outputs[name]
            decodes = outputs[name] > 0 and name in entries and entries[name].start == known - 1
            now, after = moment(step, entries.get(name), before, furthest[name], decodes)
            furthest[name] = max(furthest[name], entries[name].start + now.kept) if name in entries else furthest[name]
            outputs[name] += len(step.tokens.get(name, ()))
            timeline[name].append(now)
            state[name] = ENDED if name in step.finished else after
    return timeline


def between(run: Run, *kinds: str) -> set[tuple[int, str]]:
    """What happened between steps, of these kinds: how many steps before it, and to which request."""
    return {(steps, name) for steps, what, name in run.events if what.partition(" ")[0] in kinds}


@dataclass(frozen=True)
class Inherited:
    """What a fork or a sample has of its parent when it comes."""

    computed: int = 0  # tokens; none if it found no slot or block, and waits
    outputs: int = 0
    since: int | None = None  # the step before which it took them over; None: it waits


def inherited(run: Run) -> dict[str, Inherited]:
    """Of each request; who shares what its parent computed is never admitted before it is scheduled or preempted.

    What ends before it is any of these counts as one that waits: a trace does not tell.
    """
    inheritance = dict.fromkeys(run.requests, Inherited())
    now = dict.fromkeys(run.requests, Inherited())
    undecided: dict[str, Inherited] = {}
    forks, taken = between(run, "fork"), between(run, "preempt")
    for step in run.steps:
        for name, asked in run.requests.items():
            if asked.parent is not None and (step.number, name) in forks:
                undecided[name] = replace(now[asked.parent], since=step.number)
                inheritance[name] = now[name] = Inherited(outputs=now[asked.parent].outputs)
        for name in step.admitted:
            if name not in step.preempted and (step.number, name) not in taken:
                undecided.pop(name, None)
        here = {*step.preempted, *(entry.request_id for entry in step.entries)}
        for name in [name for name in undecided if name in here or (step.number, name) in taken]:
            inheritance[name] = undecided.pop(name)
        for entry in step.entries:
            computed = entry.start + num_kept(step, entry)
            for name in {entry.request_id, *entry.samples}:
                now[name] = Inherited(computed, now[name].outputs + len(step.tokens.get(name, ())))
                if name != entry.request_id:
                    undecided[name] = Inherited(computed, since=step.number + 1)
    return inheritance


def moment(step: Step, entry: Entry | None, before: str, furthest: int, decodes: bool) -> tuple[Moment, str]:
    if entry is None:
        return Moment(before), before
    kept = num_kept(step, entry)
    again = max(0, min(entry.start + kept, furthest) - entry.start)
    kind = DECODE if decodes else PREFILL
    if again and again >= len(entry.token_ids) - 1:
        kind = RECOMPUTED
    return Moment(kind, len(entry.token_ids), kept, again), IDLE


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
    pool = scheduler.memory.windows.pool if is_windowed else scheduler.pool
    assert pool is not None
    return pool


def planned(scheduler: Scheduler, is_windowed: bool) -> Pool:
    running = scheduler.running
    owners = owners_of(
        (request.request_id, request.window_table if is_windowed else request.block_table) for request in running
    )
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


def behind_windows(windowed: Run, known: Sequence[Pool]) -> list[dict[int, str]]:
    """Of each step the blocks that a request has given back and that nobody took since, while it runs on."""
    tables: dict[str, tuple[int, ...]] = {}
    behind: dict[int, str] = {}
    of_steps = []
    for step, pool in zip(windowed.steps, known, strict=True):
        for entry in step.entries:
            before, now = tables.get(entry.request_id, ()), entry.block_table
            behind |= {old: entry.request_id for old, new in zip(before, now, strict=False) if new == FREED != old}
            tables[entry.request_id] = now
        running = {*tables} & {*pool.slots.values()}
        behind = {block: name for block, name in behind.items() if block not in pool.owners and name in running}
        of_steps.append(dict(behind))
        for name in (*step.preempted, *step.finished):
            tables.pop(name, None)
    return of_steps


def prefix_hit_tokens(run: Run) -> int:
    """Tokens that are not computed, as the prefix cache has them, also where a preempted request comes back."""
    return sum(entry.start for step in run.steps for entry in step.entries if entry.request_id in step.admitted)
