"""A single request: prefill, then one token at a time, with every matrix of every block and the cache that grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lfm2np.drawings.page.markup import Markup, details, element, joined, number, table, visible
from lfm2np.drawings.page.numbers import matrix, opened
from lfm2np.drawings.page.view import View, at_step
from lfm2np.drawings.runs.run import Run, Step

Weights = Mapping[str, Any]  # by name in the checkpoint, NumPy arrays


def single(run: Run, weights: Weights) -> View:
    """`run` has one request, and the detail of every step."""
    last = len(run.steps) - 1
    return View(
        id="single",
        title="A single request",
        lesson="First the whole prompt in one pass; then one token a pass, since the cache keeps what the others left: "
        "keys and values of attention, and the last columns of the convolution.",
        body=joined(
            [
                element(
                    "p",
                    f"This model fits on paper: {len(layers_of(run))} blocks, hidden size 4, two heads, whole numbers "
                    "as weights, ten words. Open a block to see its numbers.",
                ),
                [at_step(step.number, last, of_step(run, step)) for step in run.steps],
                details("All weights", [matrix(name, stored(values)) for name, values in weights.items()]),
            ]
        ),
        player="single",
        num_steps=len(run.steps),
    )


def stored(values: Any) -> dict[str, Any]:
    rows = np.asarray(values, np.float64).reshape(len(values), -1)
    return {"shape": list(np.shape(values)), "values": rows.tolist()}


def layers_of(run: Run) -> dict[int, str]:
    """Layer -> convolution or attention."""
    kinds: dict[int, str] = {}
    for one in run.steps[0].operations:
        if one["operation"] in ("convolve", "attend"):
            kinds[one["layer"]] = "convolution" if one["operation"] == "convolve" else "attention"
    return kinds


def of_step(run: Run, step: Step) -> Markup:
    (entry,) = step.entries
    labels = [f"{entry.start + index} {visible(run.word(token))}" for index, token in enumerate(entry.token_ids)]
    phase = "Prefill" if entry.start == 0 else "Decode"
    said = ", ".join(visible(run.word(one)) for one in step.tokens.get(entry.request_id, ()))
    kinds = layers_of(run)
    parts: list[object] = [
        element(
            "p",
            element("strong", f"Step {step.number}: {phase}. "),
            f"{len(entry.token_ids)} tokens go in at positions {entry.start} to {entry.stop - 1}: {', '.join(labels)}. "
            f"Out comes: {said}.",
        ),
        [opened(one, labels) for one in step.operations if one["operation"] == "embed"],
    ]
    for layer, kind in kinds.items():
        mine = [one for one in step.operations if one["layer"] == layer]
        parts.append(details(f"Block {layer}: {kind}", [opened(one, labels) for one in mine], class_="block"))
    parts.append(
        [opened(one, labels) for one in step.operations if one["layer"] is None and one["operation"] != "embed"]
    )
    parts.append(logits_table(run, step))
    parts.append(cache_of(run, step, kinds))
    return joined(parts)


def logits_table(run: Run, step: Step) -> Markup:
    """The last row of logits, largest first."""
    head = [one for one in step.operations if one["name"] == "lm_head"][-1]
    row = head["output"]["values"][-1]
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    rows = [[visible(run.word(token)), number(row[token], 4)] for token in ranked]
    return details("Logits of the next token, largest first", table("Logits", ["token", "logit"], rows))


def cache_of(run: Run, step: Step, kinds: Mapping[int, str]) -> Markup:
    """What is kept after this step: keys and values of all positions so far, and each convolution's last columns."""
    parts: list[object] = []
    for layer, kind in kinds.items():
        if kind == "attention":
            parts.append(
                joined(
                    [matrix(f"block {layer}: {what}", kept_rows(run, step, layer, what)) for what in ("keys", "values")]
                )
            )
        else:
            parts.append(matrix(f"block {layer}: state, the last columns of u", state_after(step, layer)))
    held = f"{step.entries[0].stop} positions of keys and values; the state has as many columns as before."
    return joined(
        [element("h3", "The cache after this step"), element("p", held), element("div", parts, class_="matrices")]
    )


def kept_rows(run: Run, step: Step, layer: int, what: str) -> dict[str, Any]:
    values: list[Sequence[float]] = []
    for earlier in run.steps[: step.number + 1]:
        for one in earlier.operations:
            if one["operation"] == "cache_entries" and one["layer"] == layer:
                values += one["inputs"][what]["values"]
    return {"shape": [len(values), len(values[0])], "values": values}


def state_after(step: Step, layer: int) -> dict[str, Any]:
    (one,) = [one for one in step.operations if one["operation"] == "convolve" and one["layer"] == layer]
    rows = [*one["inputs"]["history"]["values"], *one["inputs"]["u"]["values"]]
    kept = rows[len(rows) - len(one["inputs"]["history"]["values"]) :]
    return {"shape": [len(kept), len(kept[0])], "values": kept}
