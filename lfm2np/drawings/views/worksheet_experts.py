"""The worksheet's exercises about experts, on the numbers of a recorded run of a model that has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lfm2np.drawings.page.markup import counted, number
from lfm2np.drawings.page.view import Task, row_labels
from lfm2np.drawings.runs.routes import routes
from lfm2np.drawings.runs.run import Operation, Run, Step

FEW_TOKENS = 12  # of a step whose choices are listed


@dataclass(frozen=True)
class Routed:
    """One token's way through a router, all numbers recorded. N experts, K of a token."""

    step: Step
    layer: int
    row: int
    scores: list[float]  # [N]
    preferred: list[float]  # [N], with the bias where there is one
    chosen: tuple[int, ...]  # [K]
    weights: list[float]  # [K]
    rule: Operation  # of the weights

    @property
    def margin(self) -> float:
        """Between the last that is chosen and the first that is not; 0 where all are."""
        ranked = sorted(self.preferred, reverse=True)
        return ranked[len(self.chosen) - 1] - ranked[len(self.chosen)] if len(ranked) > len(self.chosen) else 0.0


def of_experts(run: Run) -> list[Task]:
    """Nothing for a dense model."""
    return [*of_a_router(run), *of_a_step(run)]


def of_a_router(run: Run) -> list[Task]:
    """Of the token whose choice is the clearest to three digits; where none is recorded whole, nothing."""
    found = max(routed(run), key=lambda one: one.margin, default=None)
    if found is None:
        return []
    token = row_labels(run, found.step)[found.row]
    chosen = " and ".join(map(str, found.chosen))
    score_text = ", ".join(number(found.scores[expert], 3) for expert in found.chosen)
    weight_text = ", ".join(number(weight, 3) for weight in found.weights)
    biased = found.scores != found.preferred
    plus, without = (" plus the bias", " (without the bias)") if biased else ("", "")
    rule = "Each is divided by their sum" if found.rule["normalised"] else "They stay as they are"
    factor = f", then multiplied by {number(found.rule['factor'])}" if found.rule["factor"] != 1 else ""
    return [
        (
            "A router.",
            f"Step {found.step.number}, token \u201c{token}\u201d, block {found.layer}: the experts' scores{plus} are "
            f"{', '.join(number(one, 3) for one in found.preferred)}, from expert 0 on. To which "
            f"{counted(len(found.chosen), 'expert')} does it go?",
            chosen,
        ),
        (
            "Their weights.",
            f"The scores of {chosen}{without} are {score_text}. {rule}{factor}. How much does each "
            "expert's output count?",
            weight_text,
        ),
    ]


def of_a_step(run: Run) -> list[Task]:
    """Rows of the products, and weights that are read, of the step with the most requests that has few tokens."""
    few = [step for step in run.steps if step.num_tokens <= FEW_TOKENS and routes(step)]
    if not few:
        return []
    step = max(few, key=lambda one: (len(one.entries), one.num_tokens))
    layer = routes(step)[0]
    shown = zip(row_labels(run, step), layer.chosen, strict=True)
    text = "; ".join(f"\u201c{token}\u201d {', '.join(map(str, sorted(own)))}" for token, own in shown)
    rows = {expert: count for expert, count in enumerate(layer.rows) if count}
    return [
        (
            "Products of experts.",
            f"In step {step.number}, block {layer.layer}, the tokens (request, position, text) go to these experts: "
            f"{text}. How many experts "
            "compute, and over how many rows each?",
            f"{len(rows)}: " + ", ".join(f"expert {expert} over {counted(rows[expert], 'row')}" for expert in rows),
        ),
        (
            "Weights that are read.",
            f"How often would experts' weights be read there if each of the {counted(step.num_tokens, 'token')} were "
            "computed by itself, and how often together?",
            f"{layer.num_choices} times, and {layer.num_read} times",
        ),
    ]


def routed(run: Run) -> Iterator[Routed]:
    """Tokens whose scores are all in the trace."""
    for step in run.steps:
        for layer in routes(step):
            mine = {
                operation["operation"]: operation
                for operation in reversed(step.operations)
                if operation["layer"] == layer.layer
            }
            scores, weights = mine["sigmoid"]["output"]["values"], mine["shares"]["output"]["values"]
            preferred = mine["best"]["inputs"]["preferred"]["values"]
            for row, chosen in enumerate(layer.chosen):
                if row < min(map(len, (scores, weights, preferred))) and len(scores[row]) == layer.num_experts:
                    yield Routed(
                        step, layer.layer, row, scores[row], preferred[row], chosen, weights[row], mine["shares"]
                    )
