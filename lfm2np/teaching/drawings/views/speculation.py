"""Speculation: what was proposed, accepted, rejected and rolled back."""

from __future__ import annotations

from itertools import takewhile

from lfm2np.oracle.report.markup import Markup, details, element, joined, scrolled, table, visible
from lfm2np.teaching.drawings.page.svg import figure, line, rectangle, words
from lfm2np.teaching.drawings.page.view import (
    View,
    by_step,
    cell,
    columns,
    legend,
    step_numbers,
    step_text,
    view_of_run,
    view_without_steps,
)
from lfm2np.teaching.drawings.runs.derive import colours
from lfm2np.teaching.drawings.runs.recorded_run import Entry, Run, Step

SIDE, LEFT, TOP = 22.0, 120.0, 16.0
ROUTE_TOP, ROUTE_TALL, WIDE, BOX = 20.0, 62.0, 110.0, 84.0
LESSON = "Guesses are checked in one pass and change how long it takes, never what comes out."


def speculation(run: Run) -> View:
    about = element(
        "p",
        "A drafter proposes tokens; one step computes them all as if they were right, and keeps those that are. A "
        "rejected draft leaves nothing: its keys, values and state are not written, so there is nothing to undo.",
    )
    if not any(entry.num_drafts for step in run.steps for entry in step.entries):
        none = element(
            "p",
            "This run was made without a drafter: set Drafts in the laboratory, or try "
            "lfm2np generate --speculative ngram.",
        )
        return view_without_steps("speculation", "Speculation", LESSON, "", about, none)
    return view_of_run(
        run,
        "speculation",
        "Speculation",
        LESSON,
        [
            legend(
                ("a step's own token", cell(1, 1, 16, 16, 0, "1", "decode")),
                ("3 drafts, 2 of them accepted", cell(1, 1, 16, 16, 0, "2/3", "accepted")),
                ("drafts, none accepted", cell(1, 1, 16, 16, 0, "0/2", "rejected")),
            ),
            scrolled(chart(run), "Drafts by step"),
            by_step(run, lambda step: [routes_of(run, step), now(run, step)]),
        ],
        about,
        details("The numbers of the figure", totals(run)),
    )


def accepted(step: Step, entry: Entry) -> int:
    """How many drafts are what the network says, one after the other: also the one that ends the request."""
    pairs = zip(entry.drafts, step.tokens.get(entry.request_id, ()), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def fate_of(index: int, step: Step, entry: Entry) -> str:
    """Of a draft: those behind the first wrong one are not looked at."""
    taken, said = accepted(step, entry), len(step.tokens.get(entry.request_id, ()))
    return "accepted" if index < taken else "rejected" if index == taken < said else "not looked at"


def chart(run: Run) -> Markup:
    numbers = colours(run)
    names = [name for name in run.requests if any(name == e.request_id for step in run.steps for e in step.entries)]
    bottom = TOP + SIDE * len(names)
    shapes: list[object] = [columns(len(run.steps), SIDE, LEFT, TOP - 4, bottom + 4)]
    for row, name in enumerate(names):
        shapes.append(words(LEFT - 8, TOP + (row + 0.5) * SIDE, visible(name), "end", class_="label"))
    for step in run.steps:
        for entry in step.entries:
            if entry.num_drafts == 0 and not entry.samples:
                continue
            taken = accepted(step, entry)
            letter = f"{taken}/{entry.num_drafts}" if entry.num_drafts else "1"
            kind = "decode" if not entry.num_drafts else "accepted" if taken else "rejected"
            x, y = LEFT + step.number * SIDE + 1, TOP + names.index(entry.request_id) * SIDE + 1
            title = f"step {step.number}, {visible(entry.request_id)}: {entry.num_drafts} drafts, {taken} accepted"
            shapes.append(cell(x, y, SIDE - 2, SIDE - 2, numbers[entry.request_id], letter, kind, title))
    shapes += step_numbers(len(run.steps), SIDE, LEFT, bottom + 12)
    width = LEFT + SIDE * len(run.steps) + 10
    return figure("Drafts by step", "Accepted of proposed drafts, by request and step.", width, bottom + 24, shapes)


def now(run: Run, step: Step) -> Markup:
    """Each draft token of this step, the token that the network chose, and whether it was accepted."""
    rows = []
    for entry in step.entries:
        answer = step.tokens.get(entry.request_id, ())
        for index, draft in enumerate(entry.drafts):
            said = visible(run.word(answer[index])) if index < len(answer) else "(nothing)"
            guess = visible(run.word(draft))
            rows.append([visible(entry.request_id), index + 1, guess, said, fate_of(index, step, entry)])
    if not rows:
        return step_text(step, "No drafts.")
    head = ["request", "draft", "the guess", "the network says", "what becomes of it"]
    return table(f"Drafts of step {step.number}", head, rows)


def totals(run: Run) -> Markup:
    rows = []
    for name in run.requests:
        mine = [(step, entry) for step in run.steps for entry in step.entries if entry.request_id == name]
        proposed = sum(entry.num_drafts for _, entry in mine)
        taken = sum(accepted(step, entry) for step, entry in mine)
        if proposed:
            rows.append([visible(name), proposed, taken, proposed - taken])
    return table("Drafts by request", ["request", "proposed", "accepted", "rejected"], rows)


def routes_of(run: Run, step: Step) -> Markup:
    """Each request's guesses as a line that goes on while the network agrees, and branches off where it does not."""
    drafting = [entry for entry in step.entries if entry.num_drafts]
    if not drafting:
        return joined()
    most = max(entry.num_drafts for entry in drafting)
    shapes: list[object] = []
    for row, entry in enumerate(drafting):
        shapes += route(run, step, entry, ROUTE_TOP + row * ROUTE_TALL)
    width, height = LEFT + (most + 2) * WIDE, ROUTE_TOP + len(drafting) * ROUTE_TALL
    text = "A line for each request: accepted guesses stay on it; the first wrong one leaves it, and the network's own "
    drawn = figure(f"Routes of step {step.number}", text + "token goes on.", width, height, shapes)
    return scrolled(drawn, f"Routes of step {step.number}")


def route(run: Run, step: Step, entry: Entry, y: float) -> list[object]:
    answer, taken = step.tokens.get(entry.request_id, ()), accepted(step, entry)
    last = entry.token_ids[len(entry.token_ids) - entry.num_drafts - 1]
    shapes: list[object] = [
        words(LEFT - 12, y, visible(entry.request_id), "end", class_="label"),
        station(run, LEFT, y, last, "none", "the last token"),
    ]
    for index, draft in enumerate(entry.drafts):
        x = LEFT + (index + 1) * WIDE
        if index < taken:
            shapes.append(line(x - WIDE + BOX, y, x, y, class_="route"))
            shapes.append(station(run, x, y, draft, "accepted", "a guess, accepted"))
        else:
            off = y + 26
            shapes.append(line(x - WIDE + BOX, y if index == taken else off, x, off, class_="route off"))
            shapes.append(station(run, x, off, draft, "rejected", f"a guess, {fate_of(index, step, entry)}"))
    if len(answer) > taken:
        x = LEFT + (taken + 1) * WIDE
        shapes.append(line(x - WIDE + BOX, y, x, y, class_="route"))
        shapes.append(station(run, x, y, answer[-1], "own", "the network's own token"))
    return shapes


def station(run: Run, x: float, y: float, token: int, kind: str, what: str) -> Markup:
    text = visible(run.word(token))
    return element(
        "g",
        element("title", f"{what}: {text}"),
        rectangle(x, y - 10, BOX, 20, class_=f"cell none {kind}", rx=10 if kind == "own" else 2),
        words(x + BOX / 2, y, text[:9], "middle", class_="letter"),
    )
