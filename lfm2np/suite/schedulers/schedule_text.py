"""A schedule that broke a demand, in a terminal: each step, what every place held, and the place that was wrong.

The file is what `pytest --pyargs lfm2np.suite --scheduler ... --schedules DIR` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.values import plain

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Schedule:
    """A file's fields; steps as schedulers/program_run.py records them."""

    scheduler: str
    block_size: int
    calls: list[str]
    message: str
    place: tuple[str, int] | None
    steps: list[dict[str, Any]]
    requests: dict[str, int]  # name -> its number, in the order of appearance
    num_blocks: int  # as many as were used


def read_schedule(text: str) -> Schedule | None:
    """Of a file; None for one that is something else. RequestError for a schedule with fields missing."""
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return schedule_of(fields) if isinstance(fields, dict) and fields.get("kind") == "schedule" else None


def schedule_of(fields: Mapping[str, Any]) -> Schedule:
    """RequestError for fields missing."""
    try:
        steps = list(fields["steps"])
        names = dict.fromkeys(entry["request_id"] for step in steps for entry in step["entries"])
        blocks = [int(block) for step in steps for block in step["cells"]]
        size = int(fields["block_size"])
        blocks += [place // size for step in steps for entry in step["entries"] for place in entry["reads"]]
        place = fields["place"]
        return Schedule(
            fields["scheduler"],
            size,
            list(fields["calls"]),
            fields["message"],
            None if place is None else (place[0], int(place[1])),
            steps,
            {name: number for number, name in enumerate(names)},
            1 + max(blocks, default=0),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise RequestError(f"a schedule without what it must have: {problem!r}") from None


def is_wrong(schedule: Schedule, number: int, place: int) -> bool:
    return number == len(schedule.steps) - 1 and schedule.place == ("block", place)


def held(step: dict[str, Any], schedule: Schedule, block: int) -> list[Any]:
    return list(step["cells"].get(str(block), [None] * schedule.block_size))


def letter(schedule: Schedule, name: str) -> str:
    return LETTERS[schedule.requests.get(name, 25) % 26]


def entry_text(entry: dict[str, Any]) -> str:
    first, last = entry["start"], entry["start"] + len(entry["token_ids"]) - 1
    places = f"{first}" if first == last else f"{first}-{last}"
    return f"{plain(entry['request_id'])} {places}"


def schedule_text(schedule: Schedule) -> str:
    """A line a step: each place by the letter of whose token it holds, a capital where this step wrote it."""
    key = ", ".join(f"{letter(schedule, name)} {plain(name)}" for name in schedule.requests)
    labels = [", ".join(map(entry_text, step["entries"])) or "nothing" for step in schedule.steps]
    width = max(map(len, labels), default=0)
    lines = [f"blocks of {schedule.block_size}: {key}; capitals were written in that step, . nothing, ! wrong"]
    for number, (step, label) in enumerate(zip(schedule.steps, labels, strict=True)):
        lines += [f"  {call if call.isprintable() else repr(call)}" for call in calls_before(step)]
        blocks = "|".join(signs(schedule, number, block) for block in range(schedule.num_blocks))
        extra = "".join(f"  {text}" for text in moved(step))
        lines.append(f"  step {number:>2}  {label:<{width}}  {blocks}{extra}")
    return "\n".join([*lines, schedule.message])


def calls_before(step: dict[str, Any]) -> list[str]:
    """What changed between the step before and this one: not the calls that only take steps."""
    return [call for call in step["calls"] if not call.startswith(("step(", "drain("))]


def moved(step: dict[str, Any]) -> list[str]:
    """Who was preempted, and what was copied before the step."""
    copies = [f"{'zeros' if source is None else text_of(source)} to {text_of(end)}" for source, end in step["copies"]]
    texts = [f"preempted: {', '.join(map(plain, step['preempted']))}"] if step["preempted"] else []
    return [*texts, f"copied: {', '.join(copies)}"] if copies else texts


def text_of(end: Sequence[Any]) -> str:
    return f"{end[0]} {end[1]}"


def signs(schedule: Schedule, number: int, block: int) -> str:
    cells = enumerate(held(schedule.steps[number], schedule, block), start=block * schedule.block_size)
    return "".join(sign(schedule, number, place, what) for place, what in cells)


def sign(schedule: Schedule, number: int, place: int, what: Sequence[Any] | None) -> str:
    if is_wrong(schedule, number, place):
        return "!"
    if what is None:
        return "."
    name, _, step = what
    return letter(schedule, name).upper() if step == schedule.steps[number]["step"] else letter(schedule, name)
