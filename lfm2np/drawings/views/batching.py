"""Request-level beside token-level batching: the same requests, step by step, with the cells that are wasted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from lfm2np.drawings.page.markup import Markup, counted, element, scrolled, table, visible
from lfm2np.drawings.page.svg import figure, rectangle, words
from lfm2np.drawings.page.view import View, by_step, cell, legend, mark, short_names, view_of_run
from lfm2np.drawings.runs.derive import colours
from lfm2np.drawings.runs.policies import Outcome, Pass, under
from lfm2np.drawings.runs.run import Run, Step

SIDE, LEFT, TOP, GAP = 20.0, 46.0, 34.0, 6.0
MOST_WIDE = 160  # cells side by side that are drawn


def batching(run: Run, player: str = "hand") -> View:
    """`run` is what the steps below show; both pictures are of its requests, under either way to batch."""
    by_requests = under(run, "request-level", policy="static")
    drafted = any(entry.num_drafts for step in run.steps for entry in step.entries)
    by_tokens = under(run, "token-level", policy="fcfs")
    cells = by_requests.rows + by_requests.padding
    return view_of_run(
        run,
        player,
        "batching",
        "Request-level against token-level batching",
        f"Look at the hatched cells. By requests, {by_requests.padding} of {cells} cells are computed for "
        "nothing: short prompts wait for long ones, finished requests for the longest answer, and nobody may join. By "
        "tokens there is no rectangle.",
        legend(
            ("a token of a prompt", cell(1, 1, 16, 16, 0, "a")),
            ("a generated token goes in", cell(1, 1, 16, 16, 0, "a", "decode")),
            ("computed again", cell(1, 1, 16, 16, 0, "a", "recomputed")),
            ("wasted: computed, and thrown away", wasted(1, 1, 16, "")),
        ),
        element(
            "div",
            way(run, by_requests, "By requests", "static", rectangles=True),
            way(run, by_tokens, "By tokens", "fcfs", rectangles=False),
            class_="pair",
        ),
        summary(by_requests, by_tokens),
        element(
            "p",
            "Both are the real scheduler once more, every sequence by itself"
            + (", without the drafts of the run" if drafted else "")
            + ". A column is a step, a row a slot. Where a prompt of n tokens joins B - 1 requests that decode "
            "one token each, a rectangle pads (n - 1)(B - 1) cells; the flat array none.",
        ),
        by_step(run, lambda step: rows_of(run, step)),
    )


def way(run: Run, outcome: Outcome, title: str, policy: str, rectangles: bool) -> Markup:
    total = outcome.rows + (outcome.padding if rectangles else 0)
    text = f"{counted(outcome.steps, 'step')}, {total} cells, {total - outcome.rows} of them wasted"
    more = len(outcome.passes) - len(fitting(outcome))
    return element(
        "div",
        element("h3", title, " ", element("small", f"(policy {policy}): {text}")),
        scrolled(chart(run, outcome, title, rectangles), title),
        element("p", f"{counted(more, 'step')} more at the right are not drawn.") if more else None,
    )


def fitting(outcome: Outcome) -> Sequence[Pass]:
    ends = accumulate(max(one.longest, 1) for one in outcome.passes)
    return outcome.passes[: sum(end <= MOST_WIDE for end in ends)]


def is_of(run: Run, outcome: Outcome) -> bool:
    """Whether the run itself went so: then its steps can be shown in the picture."""
    of_run = [{entry.request_id: len(entry.token_ids) for entry in step.entries} for step in run.steps]
    return of_run == [{name: count for name, (_, count) in one.shares.items()} for one in outcome.passes]


def chart(run: Run, outcome: Outcome, title: str, rectangles: bool) -> Markup:
    """A column a step, as wide as its longest share; a row a slot; in it the request's tokens, and what is wasted."""
    slots = 1 + max((slot for one in outcome.passes for slot in one.batch.values()), default=0)
    numbers, shown, follows = colours(run), short_names(run.requests), is_of(run, outcome)
    outputs = dict.fromkeys(outcome.first, 0)
    height, x = TOP + SIDE * slots + 8, LEFT
    shapes: list[object] = [
        words(LEFT - 6, TOP + (slot + 0.5) * SIDE, f"slot {slot}", "end", class_="tick") for slot in range(slots)
    ]
    for number, computed in enumerate(fitting(outcome)):
        width = SIDE * max(computed.longest, 1)
        drawn = column(computed, x, (number, numbers, shown, outputs), rectangles)
        band = rectangle(x - GAP / 2, 0, width + GAP, height, class_="band")
        heading = words(x + width / 2, 16, number, "middle", class_="tick")
        parts = (band, heading, drawn)
        shapes.append(mark(number, *parts) if follows else element("g", parts))
        x += width + GAP
        for name in computed.shares:
            outputs[name] += number - run.requests[name].arrival >= outcome.first[name]
    text = "Steps from left to right, slots from top to bottom; hatched cells are wasted."
    return figure(f"{title}: the cells of every step", text, x + 8, height, shapes)


def column(
    computed: Pass,
    x: float,
    known: tuple[int, Mapping[str, int], Mapping[str, str], Mapping[str, int]],
    rectangles: bool,
) -> list[Markup]:
    """One step: in each slot of its batch the tokens of its request, then the cells that a rectangle adds."""
    step, numbers, shown, outputs = known
    shapes = []
    for name, slot in computed.batch.items():
        count = computed.shares.get(name, (slot, 0))[1]
        y = TOP + slot * SIDE + 1
        kind = "prefill" if not outputs[name] else "decode" if count == 1 else "recomputed"
        for index in range(count):
            title = f"step {step}, {visible(name)}: token {index + 1} of {count}"
            shapes.append(cell(x + index * SIDE + 1, y, SIDE - 2, SIDE - 2, numbers[name], shown[name], kind, title))
        for index in range(count, computed.longest if rectangles else 0):
            why = "its slot waits" if not count else "padding"
            shapes.append(wasted(x + index * SIDE + 1, y, SIDE - 2, f"step {step}, {visible(name)}: wasted, {why}"))
    return shapes


def wasted(x: float, y: float, side: float, title: str) -> Markup:
    label = element("title", title) if title else None
    return rectangle(x, y, side, side, label, class_="waste")


def summary(by_requests: Outcome, by_tokens: Outcome) -> Markup:
    def line(one: Outcome, title: str, padding: int) -> list[object]:
        share = f"{100 * padding / max(1, one.rows + padding):.0f} %"
        waits = f"{sum(one.first.values()) / max(1, len(one.first)):.1f}"
        return [title, one.steps, one.rows, padding, share, waits]

    head = ["", "steps", "tokens computed", "cells wasted", "share wasted", "mean steps to first token"]
    rows = [line(by_requests, "by requests", by_requests.padding), line(by_tokens, "by tokens", 0)]
    return table("The same requests, both ways", head, rows)


def rows_of(run: Run, step: Step) -> Markup:
    rows: list[Sequence[object]] = []
    for entry, place, token in step.rows:
        said = step.tokens.get(entry.request_id, ()) if place == entry.stop - 1 else ()
        answer = " ".join(visible(run.word(token)) for token in said)
        rows.append([len(rows), visible(entry.request_id), place, visible(run.word(token)), answer])
    head = ["row", "request", "position", "token", "what comes of it"]
    return table(f"Step {step.number} of the run: its flat array", head, rows)
