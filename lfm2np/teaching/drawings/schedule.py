"""A schedule that broke a demand of the property suite, on a page: schedule_text.py has it in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lfm2np.oracle.report.markup import Markup, element, joined, visible
from lfm2np.suite.schedulers.schedule_text import (
    Schedule,
    calls_before,
    entry_text,
    held,
    is_wrong,
    letter,
    moved,
)
from lfm2np.teaching.drawings.page.run_page import page
from lfm2np.teaching.drawings.page.svg import rectangle, words
from lfm2np.teaching.drawings.page.view import cell, legend, view_without_steps

SIDE, LEFT, GAP, RIGHT = 36, 200, 14, 560  # of a cell, of the labels on the left, between blocks, of those on the right


def schedule_page(schedule: Schedule, source: str, command: str) -> str:
    calls = "\n".join(schedule.calls)
    views = [
        view_without_steps(
            "schedule",
            "What every place held, step by step",
            schedule.message,
            joined(key(schedule), figure(schedule)),
            element(
                "p",
                "A line is a step: the positions that go in on the left, the calls before it on the right. A cell is a "
                "place of the cache, with the letter of the request whose token it holds and the token's position; an "
                "empty one holds nothing.",
            ),
        ),
        view_without_steps("calls", "The calls", "The smallest program that was found.", "", element("pre", calls)),
    ]
    about = element("p", f"{source}: a schedule of {schedule.scheduler}. Made by ", element("code", command), ".")
    return page(f"A schedule of {schedule.scheduler} that breaks a demand", about, views)


def key(schedule: Schedule) -> Markup:
    """Whose letters they are, and what the shapes mean."""
    requests = [
        (f"a token of {visible(name)}", cell(2, 2, 14, 14, number, letter(schedule, name)))
        for name, number in schedule.requests.items()
    ]
    return legend(
        *requests,
        ("written in that step", cell(2, 2, 14, 14, None, "", "decode")),
        ("kept from an earlier step", cell(2, 2, 14, 14, None, "")),
        ("the place that is wrong", rectangle(2, 2, 14, 14, class_="wrong")),
    )


def figure(schedule: Schedule) -> Markup:
    size = schedule.block_size
    width = LEFT + schedule.num_blocks * (size * SIDE + GAP) + RIGHT
    height = SIDE * (len(schedule.steps) + 1) + 4
    parts: list[Markup] = []
    for block in range(schedule.num_blocks):
        name = f"block {block}" if size > 1 else block
        parts.append(words(left(schedule, block * size) + size * SIDE / 2, 12, name, "middle", class_="label"))
    if size == 1:
        parts.append(words(LEFT - 8, 12, "block", "end", class_="label"))
    for number, step in enumerate(schedule.steps):
        top = SIDE * (number + 1)
        label = f"step {number}: " + (", ".join(map(entry_text, step["entries"])) or "nothing")
        parts.append(words(0, top + SIDE / 2, label, "start", class_="label"))
        beside = "; ".join([*calls_before(step), *moved(step)])
        parts.append(words(left(schedule, schedule.num_blocks * size), top + SIDE / 2, beside, "start", class_="label"))
        for block in range(schedule.num_blocks):
            for offset, what in enumerate(held(step, schedule, block)):
                parts.append(drawn_cell(schedule, number, block * size + offset, what, top))
    drawing = element("svg", parts, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img")
    return element("div", drawing, class_="scroll", tabindex=0, role="region", aria_label="The memory, step by step")


def left(schedule: Schedule, place: int) -> float:
    return LEFT + place * SIDE + place // schedule.block_size * GAP


def drawn_cell(schedule: Schedule, number: int, place: int, what: Sequence[Any] | None, top: float) -> Markup:
    x, wrong = left(schedule, place), is_wrong(schedule, number, place)
    if what is None:
        drawn = cell(x, top, SIDE - 2, SIDE - 2, None, "!" if wrong else "", "", f"place {place}: nothing")
    else:
        name, position, step = what
        kind = "decode" if step == schedule.steps[number]["step"] else ""
        text = f"place {place}: position {position} of {name}, written in step {step}"
        mark = f"{letter(schedule, name)}{position}"
        drawn = cell(x, top, SIDE - 2, SIDE - 2, schedule.requests.get(name, 0), mark, kind, text)
    if not wrong:
        return drawn
    frame = rectangle(x - 1.5, top - 1.5, SIDE + 1, SIDE + 1, class_="wrong")
    return element("g", drawn, frame)
