"""What a trace implies and does not say: who stands where in each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lfm2np.drawings.runs.run import Entry, Run, Step

ABSENT, QUEUED, PREFILL, RECOMPUTED = "absent", "queued", "prefill", "recomputed"
DECODE, IDLE, PREEMPTED, ENDED = "decode", "idle", "preempted", "ended"
LETTERS = {QUEUED: "q", PREFILL: "P", RECOMPUTED: "R", DECODE: "d", IDLE: "·", PREEMPTED: "x", ABSENT: "", ENDED: ""}


@dataclass(frozen=True)
class Moment:
    """One request in one step."""

    state: str
    tokens: int = 0  # scheduled
    kept: int = 0  # of these, what stays: not rejected drafts
    recomputed: int = 0  # of these, what was computed before


def moments(run: Run) -> dict[str, list[Moment]]:
    """For each request, in order of arrival, one moment a step."""
    furthest = dict.fromkeys(run.requests, 0)
    state = dict.fromkeys(run.requests, ABSENT)
    outputs = dict.fromkeys(run.requests, 0)
    found: dict[str, list[Moment]] = {name: [] for name in run.requests}
    ended_between = {(steps, name) for steps, what, name in run.events if what in ("abort", "stop", "error")}
    for step in run.steps:
        entries = {entry.request_id: entry for entry in step.entries}
        for name, asked in run.requests.items():
            before = state[name]
            if before == ABSENT and asked.arrival <= step.number:
                before = QUEUED
            if (step.number, name) in ended_between:
                before = ENDED
            if name in step.preempted:
                before = PREEMPTED
            elif name in step.admitted:
                before = IDLE
            now, after = moment(step, entries.get(name), before, furthest[name], outputs[name])
            furthest[name] = max(furthest[name], entries[name].start + now.kept) if name in entries else furthest[name]
            outputs[name] += len(step.tokens.get(name, ()))
            found[name].append(now)
            state[name] = ENDED if name in step.finished else after
        if step.abandoned:
            for name in entries:
                state[name] = PREEMPTED
    return found


def moment(step: Step, entry: Entry | None, before: str, furthest: int, outputs: int) -> tuple[Moment, str]:
    """The moment, and the state that follows it."""
    if entry is None:
        return Moment(before), before
    kept = num_kept(step, entry)
    again = max(0, min(entry.start + kept, furthest) - entry.start)
    if again and again >= len(entry.token_ids) - 1:
        kind = RECOMPUTED
    else:
        kind = DECODE if outputs and entry.start + len(entry.token_ids) - entry.num_drafts > furthest else PREFILL
    return Moment(kind, len(entry.token_ids), kept, again), IDLE


def num_kept(step: Step, entry: Entry) -> int:
    """Of the scheduled tokens those that are no rejected drafts."""
    accepted = max(0, len(step.tokens.get(entry.request_id, ())) - 1)
    return len(entry.token_ids) - entry.num_drafts + min(accepted, entry.num_drafts)


def cached(run: Run) -> list[int]:
    """How many prompt tokens each step's admissions found in the prefix cache."""
    return [
        sum(entry.start for entry in step.entries if entry.request_id in step.admitted and not loads(step, entry))
        for step in run.steps
    ]


def loads(step: Step, entry: Entry) -> bool:
    return any(kind == "load_state" and destination == entry.slot for kind, _, destination in step.moves)


def colours(run: Run) -> Mapping[str, int]:
    """A number for each request, by arrival; its samples and forks have the same."""
    numbers: dict[str, int] = {}
    for name, asked in run.requests.items():
        numbers[name] = numbers[asked.parent] if asked.parent in numbers else len(set(numbers.values()))
    return numbers
