"""What a view is made of, and the marks that all views share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lfm2np.oracle.report.markup import Markup, element, joined, number, visible
from lfm2np.teaching.drawings.page.svg import rectangle, words
from lfm2np.teaching.drawings.runs.recorded_run import Run, Step

NUM_COLOURS = 8


@dataclass(frozen=True)
class View:
    """A section of the page. `player` names what its steps are of: see PLAYERS in run_page.py; none: no steps."""

    id: str
    title: str
    lesson: str  # one sentence
    picture: Markup  # with its legend; empty where there is nothing to draw
    text: Markup  # what a reader needs besides, below the picture
    player: str = "none"
    num_steps: int = 0
    start: int = 0  # the step that the script shows first; without it the last one stands


def fullest(run: Run) -> int:
    """The step with the most requests, of these the one with the most tokens: where there is most to see."""
    return max(run.steps, key=lambda step: (len(step.entries), step.num_tokens, -step.number)).number


def view_without_steps(id: str, title: str, lesson: str, picture: object, *text: object) -> View:
    return View(id, title, lesson, joined(picture), joined(*text))


def view_of_run(run: Run, id: str, title: str, lesson: str, picture: object, *text: object) -> View:
    """The view of a run's steps, which first shows the fullest of them."""
    return View(id, title, lesson, joined(picture), joined(*text), "main", len(run.steps), fullest(run))


def by_step(run: Run, drawn: Callable[[Step], object]) -> list[Markup]:
    """What is drawn of each step, shown only at that step; without the script, at the last one."""
    return by_number(len(run.steps), lambda number: drawn(run.steps[number]))


def by_number(count: int, drawn: Callable[[int], object]) -> list[Markup]:
    return [
        element(
            "div",
            drawn(number),
            class_="at" if number < count - 1 else "at end",
            data_step=number,
            hidden=number < count - 1,
        )
        for number in range(count)
    ]


def steps_between(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def events_of(step: Step) -> list[str]:
    """Whom the scheduler let in, took out and saw end."""
    names = {"admitted": step.admitted, "preempted": step.preempted, "finished": step.finished}
    return [f"{what}: {', '.join(map(visible, requests))}" for what, requests in names.items() if requests]


def step_text(step: Step, *text: object) -> Markup:
    """One sentence, which is also spoken to who steps by hand."""
    return element("p", element("strong", f"Step {step.number}. "), text, class_="says")


def row_labels(run: Run, step: Step) -> list[str]:
    """The rows of a step's flat array: request, position and token."""
    return [f"{visible(entry.request_id)} {place} {visible(run.word(token))}" for entry, place, token in step.rows]


def mark(step: int, *children: object) -> Markup:
    """Always shown, and brought out at this step."""
    return element("g", children, class_="mark", data_step=step)


def cell(
    x: float, y: float, width: float, height: float, colour: int | None, letter: str, kind: str = "", title: str = ""
) -> Markup:
    """A square of an owner's colour with a letter, so that no colour stands alone; a title for the pointer."""
    owner = "none" if colour is None else f"o{colour % NUM_COLOURS}"
    rounding = number(width / 2) if kind == "decode" else None
    shapes: list[object] = [rectangle(x, y, width, height, class_=f"cell {owner} {kind}".strip(), rx=rounding)]
    if letter:
        shapes.append(words(x + width / 2, y + height / 2, letter, "middle", class_="letter"))
    if title:
        shapes.append(element("title", title))
    return element("g", shapes)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Something for a small square: the name (of a sample without its #) where it is short, else its number from 1."""
    chosen = list(names)
    short = {name: visible(name.replace("#", "")) for name in chosen}
    if all(len(text) <= 2 for text in short.values()) and len(set(short.values())) == len(chosen):
        return short
    return {name: str(index) for index, name in enumerate(chosen, start=1)}


def legend(*entries: tuple[str, Markup]) -> Markup:
    size = {"width": 18, "height": 18, "viewBox": "0 0 18 18"}
    items = [element("li", element("svg", sample, **size, aria_hidden="true"), text) for text, sample in entries]
    return element("ul", items, class_="legend")


def columns(count: int, width: float, left: float, top: float, bottom: float) -> Markup:
    bands = (rectangle(left + step * width, top, width, bottom - top, class_="band") for step in range(count))
    return joined(*(mark(step, band) for step, band in enumerate(bands)))


def step_numbers(count: int, width: float, left: float, y: float) -> list[Markup]:
    """Below the columns, for at most some twenty of them."""
    steps = range(0, count, max(1, count // 20))
    return [words(left + (step + 0.5) * width, y, step, "middle", class_="tick") for step in steps]
