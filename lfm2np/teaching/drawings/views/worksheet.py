"""Worksheet: numbers of the hand model's run to work out on paper; the answers are on a page of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.oracle.report.markup import Markup, counted, element, number, visible
from lfm2np.teaching.drawings.page.view import View, row_labels, view_without_steps
from lfm2np.teaching.drawings.runs.expert_choices import routes
from lfm2np.teaching.drawings.runs.other_policies import answers
from lfm2np.teaching.drawings.runs.recorded_run import Operation, Run, Step

Task = tuple[str, Markup | str, str]  # title, question, answer
FEW_TOKENS = 12  # of a step whose choices are listed


def worksheet(paper: Run, weights: Mapping[str, Any], run: Run) -> View:
    """`paper` is of the hand model, which has these weights, with detail. Of `run` are the experts."""
    tasks = [*of_one_token(paper, weights), *of_a_batch(paper), *of_experts(run)]
    questions = [element("li", element("strong", title), " ", question) for title, question, _ in tasks]
    answer_list = [element("li", element("strong", title), f" {answer}") for title, _, answer in tasks]
    return view_without_steps(
        "worksheet",
        "Worksheet",
        "Work these out with a pencil; all numbers are of a real run, to three digits.",
        "",
        element("ol", questions, class_="tasks"),
        element("section", element("h3", "Answers"), element("ol", answer_list), class_="answers"),
    )


def named(step: Step, layer: int, operation: str) -> Operation:
    return next(each for each in step.operations if each["layer"] == layer and each["operation"] == operation)


def listed(values: Sequence[float]) -> str:
    return "[" + ", ".join(number(float(value), 3) for value in values) + "]"


def of_one_token(run: Run, weights: Mapping[str, Any]) -> list[Task]:
    """The first row of the second step through block 0, a convolution."""
    step = run.steps[1]
    word = visible(run.word(step.entries[0].token_ids[0]))
    projected, convolved = named(step, 0, "linear"), named(step, 0, "convolve")
    x, result = projected["inputs"]["x"]["values"][0], projected["output"]["values"][0]
    hidden = len(x)
    rows = weights["model.layers.0.conv.in_proj.weight"].reshape(-1, hidden)
    taps = weights["model.layers.0.conv.conv.weight"].reshape(hidden, -1)
    channel = int(max(range(hidden), key=lambda index: abs(taps[index]).sum() + (abs(result[index]) > 0)))
    history = [row[channel] for row in convolved["inputs"]["history"]["values"]]
    u, mixed = convolved["inputs"]["u"]["values"][0], convolved["output"]["values"][0]
    logits = next(each for each in step.operations if each["name"] == "lm_head")["output"]["values"][0]
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
        ("The next token.", f"The logits are {', '.join(candidates)}. Which token is next?", visible(run.word(best))),
    ]


def of_a_batch(run: Run) -> list[Task]:
    size = int(run.config["block_size"])
    step = max(run.steps, key=lambda step: (len(step.entries), step.num_tokens))
    entry = max(step.entries, key=lambda entry: entry.stop)
    position = entry.stop - 1
    known = answers(run)
    prompt = max(len(run.requests[name].prompt) for name in known)
    answer = max(len(ids) for ids in known.values())
    needed = sum(len(run.requests[name].prompt) + len(ids) for name, ids in known.items())
    lengths = "; ".join(
        f"{visible(name)}: {len(run.requests[name].prompt)} and {len(ids)}" for name, ids in known.items()
    )
    shares = ", ".join(f"{visible(each.request_id)} {len(each.token_ids)}" for each in step.entries)
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
            f"{step.num_tokens} rows; {len(step.entries) * max(len(each.token_ids) for each in step.entries)} cells",
        ),
        (
            "Padding.",
            f"Prompt and answer tokens are {lengths}. All in one rectangle, prompts padded on the left: how many "
            "cells, and how many of them are padding?",
            f"{len(known) * (prompt + answer)} cells, {len(known) * (prompt + answer) - needed} of them padding",
        ),
    ]


def of_experts(run: Run) -> list[Task]:
    """Of the step with the most requests that has few tokens; nothing for a dense model."""
    few = [step for step in run.steps if step.num_tokens <= FEW_TOKENS and routes(step)]
    if not few:
        return []
    step = max(few, key=lambda step: (len(step.entries), step.num_tokens))
    layer = routes(step)[0]
    shown = zip(row_labels(run, step), layer.chosen, strict=True)
    text = "; ".join(f"\u201c{token}\u201d {', '.join(map(str, sorted(experts)))}" for token, experts in shown)
    rows = {expert: count for expert, count in enumerate(layer.rows) if count}
    return [
        (
            "Products of experts.",
            f"In step {step.number}, block {layer.layer}, the tokens (request, position, text) go to these experts: "
            f"{text}. How many experts compute, and over how many rows each?",
            f"{len(rows)}: " + ", ".join(f"expert {expert} over {counted(rows[expert], 'row')}" for expert in rows),
        ),
        (
            "Weights that are read.",
            f"How often would experts' weights be read there if each of the {counted(step.num_tokens, 'token')} were "
            "computed by itself, and how often together?",
            f"{layer.num_choices} times, and {layer.num_read} times",
        ),
    ]
