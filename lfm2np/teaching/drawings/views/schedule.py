"""Schedule: who waited, computed and ended when, in which budget; and the same requests under each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lfm2np.oracle.report.markup import Markup, counted, details, element, joined, scrolled, table, visible
from lfm2np.teaching.drawings.page.svg import figure, line, rectangle, words
from lfm2np.teaching.drawings.page.view import (
    View,
    by_step,
    cell,
    columns,
    events_of,
    legend,
    step_numbers,
    step_text,
    view_of_run,
)
from lfm2np.teaching.drawings.runs.derive import (
    DECODE,
    ENDED,
    IDLE,
    LETTERS,
    PREEMPTED,
    PREFILL,
    QUEUED,
    RECOMPUTED,
    Moment,
    colours,
    moments,
)
from lfm2np.teaching.drawings.runs.other_policies import Outcome, one_after_another, under
from lfm2np.teaching.drawings.runs.recorded_run import Run, Step

SIDE, LEFT, TOP = 22.0, 120.0, 24.0
BARS = 80.0  # height of the budget's bars
MEANINGS = {
    QUEUED: "queued: it waits for a slot and blocks",
    PREFILL: "prefill: tokens of its prompt",
    RECOMPUTED: "recomputed: what it had before it was preempted",
    DECODE: "decode: its last token, and drafts",
    IDLE: "it runs, but this step has nothing for it",
    PREEMPTED: "preempted: its memory was taken, it waits",
}
POLICIES = {
    "static": "request-level: a batch runs until its longest member ends",
    "prefill-first": "prompts before decodes, whole or in chunks",
    "waiting-served": "decoding pauses when enough requests can enter",
    "fcfs": "continuous: decodes and chunks of prompts share every step",
}


def schedule(run: Run) -> View:
    states, numbers = moments(run), colours(run)
    return view_of_run(
        run,
        "schedule",
        "Schedule",
        "A step takes what fits: decodes of some requests and chunks of others' prompts, up to one budget.",
        [
            legend(*((text, cell(1, 1, 16, 16, 0, LETTERS[kind], kind)) for kind, text in MEANINGS.items())),
            scrolled(chart(run, states, numbers), "Schedule"),
            by_step(run, lambda step: sentence(run, states, step)),
        ],
        details("The numbers of the figure", numbers_table(run, states)),
        policies(run),
    )


def chart(run: Run, states: dict[str, list[Moment]], numbers: Mapping[str, int]) -> Markup:
    """A row a request, a column a step; below, the tokens of each step against the budget."""
    bottom = TOP + SIDE * len(states)
    width, height = LEFT + SIDE * len(run.steps) + 10, bottom + BARS + 44
    shapes: list[object] = [columns(len(run.steps), SIDE, LEFT, TOP - 4, bottom + BARS + 20)]
    for row, (name, line_) in enumerate(states.items()):
        y = TOP + row * SIDE
        shapes.append(words(LEFT - 8, y + SIDE / 2, visible(name), "end", class_="label"))
        for step, now in enumerate(line_):
            if now.state in LETTERS and now.state not in (ENDED, "absent"):
                letter = str(now.tokens) if now.tokens else LETTERS[now.state]
                title = f"step {step}, {visible(name)}: {now.state}, {now.tokens} tokens"
                x = LEFT + step * SIDE
                shapes.append(cell(x + 1, y + 1, SIDE - 2, SIDE - 2, numbers[name], letter, now.state, title))
    shapes.append(budget(run, bottom + 12))
    shapes += step_numbers(len(run.steps), SIDE, LEFT, height - 6)
    description = "A row for each request and a column for each step; numbers are tokens that the step computed."
    return figure("Schedule of the run", description, width, height, shapes)


def budget(run: Run, top: float) -> Markup:
    most = int(run.config["max_num_batched_tokens"])
    largest = max(most if most < 4096 else 0, *(step.num_tokens for step in run.steps), 1)
    shapes: list[object] = [words(LEFT - 8, top + BARS / 2, "tokens of a step", "end", class_="label")]
    for step in run.steps:
        height = BARS * step.num_tokens / largest
        x = LEFT + step.number * SIDE
        title = element("title", f"step {step.number}: {step.num_tokens} of {most} tokens")
        shapes.append(rectangle(x + 2, top + BARS - height, SIDE - 4, height, title, class_="bar"))
    if most <= largest:
        y = top + BARS - BARS * most / largest
        shapes.append(line(LEFT, y, LEFT + SIDE * len(run.steps), y, class_="limit"))
        shapes.append(words(LEFT - 8, y, f"budget {most}", "end", class_="tick"))
    return joined(*shapes)


def sentence(run: Run, states: dict[str, list[Moment]], step: Step) -> Markup:
    gets = "gets" if len(step.entries) == 1 else "get"
    budget = run.config["max_num_batched_tokens"]
    parts = [f"{counted(len(step.entries), 'request')} {gets} {counted(step.num_tokens, 'token')} of {budget}"]
    parts += events_of(step)
    again = sum(line_[step.number].recomputed for line_ in states.values())
    if again:
        parts.append(f"{counted(again, 'token')} computed again")
    return step_text(step, "; ".join(parts) + ".")


def numbers_table(run: Run, states: dict[str, list[Moment]]) -> Markup:
    head = ["step", "tokens", *map(visible, states), "waiting", "running", "free blocks"]
    rows = []
    for step in run.steps:
        shares = [
            f"{LETTERS[state[step.number].state]}{state[step.number].tokens or ''}"
            if state[step.number].state in LETTERS
            else ""
            for state in states.values()
        ]
        after: list[object] = [step.waiting, step.running, step.free_blocks]
        rows.append([step.number, step.num_tokens, *shares, *after])
    return table("Tokens by step and request: P prefill, R recomputed, d decode, q queued, x preempted", head, rows)


# --- the same requests under each policy


def policies(run: Run) -> Markup:
    """The real scheduler once more, with every sequence by itself and without drafts."""
    outcomes = [under(run, policy) for policy in POLICIES]
    return joined(
        element("h3", "The same requests under each policy"),
        element(
            "p",
            "No policy changes a token. What changes is how many steps it takes (a step reads all weights once, which "
            "with few rows is most of its cost), how much padding a rectangle would need, and how long each request "
            "waits for its first token.",
        ),
        summary(run, outcomes),
        element("dl", [[element("dt", policy), element("dd", text)] for policy, text in POLICIES.items()]),
        details("Steps until the first and the last token, by request", waits(outcomes)),
    )


def summary(run: Run, outcomes: Sequence[Outcome]) -> Markup:
    passes, cached, uncached = one_after_another(run)
    rows: list[Sequence[object]] = [
        ["one after another, no cache", passes, f"{uncached:,}", 0, "", "", ""],
        ["one after another", passes, f"{cached:,}", 0, "", "", ""],
    ]
    for outcome in outcomes:
        first, last = outcome.first.values(), outcome.last.values()
        waiting = [f"{sum(first) / len(first):.1f}", max(first), f"{sum(last) / len(last):.1f}"]
        rows.append([outcome.policy, outcome.steps, f"{outcome.rows:,}", outcome.padding, *waiting])
    work = ["policy", "steps", "rows computed", "cells that padding would add"]
    head = [*work, "mean steps to first token", "longest", "mean steps to the end"]
    return table("Every sequence by itself, without drafts", head, rows)


def waits(outcomes: Sequence[Outcome]) -> Markup:
    head = ["request", *(f"{outcome.policy}: first, last" for outcome in outcomes)]
    rows = [
        [visible(name), *(f"{outcome.first[name]}, {outcome.last[name]}" for outcome in outcomes)]
        for name in outcomes[0].first
    ]
    return table("Steps after the arrival", head, rows)
