"""Worksheet: numbers of the hand model's run to work out on paper; the answers are on a page of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.drawings.page.markup import element, joined, number, visible
from lfm2np.drawings.page.view import Task, View
from lfm2np.drawings.runs.policies import answers
from lfm2np.drawings.runs.run import Run, Step
from lfm2np.drawings.views.worksheet_experts import of_experts


def worksheet(alone: Run, together: Run, weights: Mapping[str, Any], run: Run) -> View:
    """`alone` has one request, `together` several; both with detail, of the hand model. Of `run` are the experts."""
    tasks = [*of_one_token(alone, weights), *of_a_batch(together), *of_experts(run)]
    return View(
        id="worksheet",
        title="Worksheet",
        lesson="Work these out with a pencil; all numbers are of the runs above, to three digits.",
        body=joined(
            element(
                "ol",
                [element("li", element("strong", title), " ", question) for title, question, _ in tasks],
                class_="tasks",
            ),
            element(
                "section",
                element("h3", "Answers"),
                element("ol", [element("li", element("strong", title), f" {answer}") for title, _, answer in tasks]),
                class_="answers",
            ),
        ),
    )


def named(step: Step, layer: int | None, operation: str, which: int = 0) -> Mapping[str, Any]:
    return [one for one in step.operations if one["layer"] == layer and one["operation"] == operation][which]


def listed(values: Sequence[float]) -> str:
    return "[" + ", ".join(number(float(value), 3) for value in values) + "]"


def of_one_token(run: Run, weights: Mapping[str, Any]) -> list[Task]:
    """The second step's one token through block 0, a convolution."""
    step = run.steps[1]
    word = visible(run.word(step.entries[0].token_ids[0]))
    projected, convolved = named(step, 0, "linear"), named(step, 0, "convolve")
    x, result = projected["inputs"]["x"]["values"][0], projected["output"]["values"][0]
    hidden = len(x)
    rows = weights["model.layers.0.conv.in_proj.weight"].reshape(-1, hidden)
    taps = weights["model.layers.0.conv.conv.weight"].reshape(hidden, -1)
    channel = int(max(range(hidden), key=lambda one: abs(taps[one]).sum() + (abs(result[one]) > 0)))
    history = [row[channel] for row in convolved["inputs"]["history"]["values"]]
    u, mixed = convolved["inputs"]["u"]["values"][0], convolved["output"]["values"][0]
    logits = [operation for operation in step.operations if operation["name"] == "lm_head"][-1]["output"]["values"][-1]
    best = max(range(len(logits)), key=lambda token: (logits[token], -token))
    column = [*history, u[channel]]
    candidates = [f"\u201c{visible(run.word(token))}\u201d {number(value, 3)}" for token, value in enumerate(logits)]
    return [
        (
            "A projection.",
            f"Step 1, token \u201c{word}\u201d, block 0: the normed input is {listed(x)}; row {channel} of in_proj is "
            f"{listed(rows[channel])}. What is gate_in of channel {channel}?",
            number(result[channel], 3),
        ),
        (
            "A gate.",
            f"gate_in is {number(result[channel], 3)} and value, from row {2 * hidden + channel}, is "
            f"{number(result[2 * hidden + channel], 3)}. What is u of channel {channel}?",
            number(u[channel], 3),
        ),
        (
            "The convolution.",
            f"The last {len(column)} columns of u in channel {channel}, the oldest first, are {listed(column)}; the "
            f"taps are {listed(taps[channel])}. What does the convolution give?",
            number(mixed[channel], 3),
        ),
        (
            "The state.",
            f"Which {len(history)} numbers of channel {channel} are kept for the next token?",
            listed(column[1:]),
        ),
        (
            "The next token.",
            f"The logits are {', '.join(candidates)}. Which token is next?",
            visible(run.word(best)),
        ),
    ]


def of_a_batch(run: Run) -> list[Task]:
    """Blocks, masks and padding of the requests that ran together."""
    size = int(run.config["block_size"])
    step = max(run.steps, key=lambda one: (len(one.entries), one.num_tokens))
    entry = max(step.entries, key=lambda one: one.stop)
    position = entry.stop - 1
    known = answers(run)
    prompt = max(len(run.requests[name].prompt) for name in known)
    answer = max(len(ids) for ids in known.values())
    needed = sum(len(run.requests[name].prompt) + len(ids) for name, ids in known.items())
    lengths = "; ".join(
        f"{visible(name)}: {len(run.requests[name].prompt)} and {len(ids)}" for name, ids in known.items()
    )
    shares = ", ".join(f"{visible(one.request_id)} {len(one.token_ids)}" for one in step.entries)
    return [
        (
            "A block table.",
            f"Blocks hold {size} tokens; the block table of {visible(entry.request_id)} is "
            f"{', '.join(map(str, entry.block_table))}. Where are the keys of position {position}?",
            f"block {entry.block_table[position // size]}, place {position % size}",
        ),
        (
            "A row of the mask.",
            f"Of how many positions does the row of {visible(entry.request_id)} at position {position} see keys?",
            str(position + 1),
        ),
        (
            "A flat array.",
            f"In step {step.number} the requests have these tokens: {shares}. How many rows has the flat array, and "
            "how many cells a rectangle?",
            f"{step.num_tokens} rows; {len(step.entries) * max(len(one.token_ids) for one in step.entries)} cells",
        ),
        (
            "Padding.",
            f"Prompt and answer tokens are {lengths}. All in one rectangle, prompts padded on the left: how many "
            "cells, and how many of them are padding?",
            f"{len(known) * (prompt + answer)} cells, {len(known) * (prompt + answer) - needed} of them padding",
        ),
    ]
