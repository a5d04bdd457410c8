"""The same work under each policy: steps, padding, waiting times, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from lfm2np.oracle.report.markup import Markup, details, element, joined, scrolled, table
from lfm2np.teaching.drawings.page.svg import figure, rectangle, words
from lfm2np.teaching.drawings.page.view import View, view_without_steps
from lfm2np.teaching.drawings.runs.other_policies import Outcome, one_after_another, under
from lfm2np.teaching.drawings.runs.recorded_run import Run

SIDE, LEFT, TALL = 9.0, 150.0, 46.0
CHOSEN = (
    ("static", "static", "request-level: a batch runs until its longest member ends"),
    ("prefill first", "prefill-first", "prompts before decodes, whole or in chunks"),
    ("waiting-served", "waiting-served", "decoding pauses when enough requests wait"),
    ("chunked, continuous", "fcfs", "decodes and chunks of prompts share every step"),
)


def policies(run: Run) -> View:
    outcomes = [under(run, title, policy=policy) for title, policy, _ in CHOSEN]
    return view_without_steps(
        "policies",
        "The same work under each policy",
        "No policy changes a token. What changes is how many steps it takes, how much padding a rectangle "
        "would need, and how long each request waits for its first token.",
        [summary(outcomes), scrolled(chart(outcomes), "Steps by policy")],
        element("p", "The real scheduler once more, with every sequence by itself and without drafts."),
        element("dl", [[element("dt", title), element("dd", text)] for title, _, text in CHOSEN]),
        gains(run, outcomes),
        details("Steps until the first and the last token, by request", waits(outcomes)),
    )


def summary(outcomes: Sequence[Outcome]) -> Markup:
    work = ["policy", "steps", "rows computed", "cells that padding would add"]
    head = [*work, "mean steps to first token", "longest", "mean steps to the end"]
    rows = []
    for outcome in outcomes:
        first, last = outcome.first.values(), outcome.last.values()
        waiting = [f"{sum(first) / len(first):.1f}", max(first), f"{sum(last) / len(last):.1f}"]
        rows.append([outcome.name, outcome.steps, outcome.rows, outcome.padding, *waiting])
    return table("The same requests, scheduled by each policy", head, rows)


def chart(outcomes: Sequence[Outcome]) -> Markup:
    most = max((step.rows for outcome in outcomes for step in outcome.passes), default=1)
    longest = max(len(outcome.passes) for outcome in outcomes)
    width, height = LEFT + SIDE * longest + 10, (TALL + 14) * len(outcomes) + 20
    shapes: list[object] = []
    for index, outcome in enumerate(outcomes):
        base = (index + 1) * (TALL + 14)
        shapes.append(words(LEFT - 8, base - TALL / 2, outcome.name, "end", class_="label"))
        for step, computed in enumerate(outcome.passes):
            tall = TALL * computed.rows / most
            text = f"{outcome.name}, step {step}: {computed.rows} rows of {len(computed.batch)} requests"
            title = element("title", text)
            shapes.append(rectangle(LEFT + step * SIDE, base - tall, SIDE - 1.5, tall, title, class_="bar"))
    for step in range(0, longest, 10):
        shapes.append(words(LEFT + (step + 0.5) * SIDE, height - 8, step, "middle", class_="tick"))
    return figure("Rows computed in each step", "A band for each policy, a bar for each step.", width, height, shapes)


def gains(run: Run, outcomes: Sequence[Outcome]) -> Markup:
    """Against one request after another, with a cache and without: in passes of the network and in rows."""
    passes, cached, uncached = one_after_another(run)
    best = outcomes[-1]
    rows = [
        ["one after another, no cache", passes, f"{uncached:,}", "1", "1"],
        ["one after another, with a cache", passes, f"{cached:,}", "1", f"{uncached / cached:.1f}"],
        ["continuous", best.steps, f"{best.rows:,}", f"{passes / best.steps:.1f}", f"{uncached / best.rows:.1f}"],
    ]
    head = ["", "passes of the network", "rows computed", "times fewer passes", "times fewer rows"]
    return joined(
        table("Against one request after another", head, rows),
        element(
            "p",
            "A pass reads all weights once, whatever it computes: with few rows that is most of its cost, so fewer "
            "passes are nearly as many times faster. Without a cache every pass computes the whole sequence again. "
            "A published pipeline for LFM2 claims 16 times for five prompts; it depends on the lengths.",
        ),
    )


def waits(outcomes: Sequence[Outcome]) -> Markup:
    names = list(outcomes[0].first)
    head = ["request", *(f"{outcome.name}: first, last" for outcome in outcomes)]
    rows = [[name, *(f"{outcome.first[name]}, {outcome.last[name]}" for outcome in outcomes)] for name in names]
    return table("Steps after the arrival", head, rows)
