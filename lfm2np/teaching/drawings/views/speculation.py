"""Speculation: what was proposed, accepted, rejected and rolled back."""

from __future__ import annotations

from itertools import takewhile

from lfm2np.oracle.report.markup import Markup, element, joined, scrolled, table, visible
from lfm2np.teaching.drawings.page.svg import figure, line, rectangle, words
from lfm2np.teaching.drawings.page.view import View, by_step, step_text, view_of_run, view_without_steps
from lfm2np.teaching.drawings.runs.recorded_run import Entry, Run, Step

LEFT, TOP, TALL, WIDE, BOX = 120.0, 20.0, 62.0, 110.0, 84.0
LESSON = "Guesses are checked in one pass and change how long it takes, never what comes out."


def speculation(run: Run) -> View:
    about = element(
        "p",
        "A drafter proposes tokens; one step computes them all as if they were right, and keeps those that are. A "
        "rejected draft leaves nothing: its keys, values and state are not written, so there is nothing to undo.",
    )
    drafted = [(step, entry) for step in run.steps for entry in step.entries if entry.num_drafts]
    if not drafted:
        none = element(
            "p",
            "This run was made without a drafter: set Drafts in the laboratory, or try "
            "lfm2np generate --speculative ngram.",
        )
        return view_without_steps("speculation", "Speculation", LESSON, "", about, none)
    proposed = sum(entry.num_drafts for _, entry in drafted)
    where = f"steps {', '.join(map(str, dict.fromkeys(step.number for step, _ in drafted)))}"
    return view_of_run(
        run,
        "speculation",
        "Speculation",
        LESSON,
        by_step(run, lambda step: [routes_of(run, step), now(run, step)]),
        about,
        element("p", f"Accepted in all: {sum(accepted(*each) for each in drafted)} of {proposed} drafts, in {where}."),
    )


def accepted(step: Step, entry: Entry) -> int:
    """How many drafts are what the network says, one after the other: also the one that ends the request."""
    pairs = zip(entry.drafts, step.tokens.get(entry.request_id, ()), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def fate_of(index: int, step: Step, entry: Entry) -> str:
    """Of a draft: those behind the first wrong one are not looked at."""
    taken, said = accepted(step, entry), len(step.tokens.get(entry.request_id, ()))
    return "accepted" if index < taken else "rejected" if index == taken < said else "not looked at"


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


def routes_of(run: Run, step: Step) -> Markup:
    """Each request's guesses as a line that goes on while the network agrees, and branches off where it does not."""
    drafting = [entry for entry in step.entries if entry.num_drafts]
    if not drafting:
        return joined()
    most = max(entry.num_drafts for entry in drafting)
    shapes: list[object] = []
    for row, entry in enumerate(drafting):
        shapes += route(run, step, entry, TOP + row * TALL)
    width, height = LEFT + (most + 2) * WIDE, TOP + len(drafting) * TALL
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
