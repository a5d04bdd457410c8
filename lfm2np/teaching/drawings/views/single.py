"""The whole network on one step of a model that fits on paper: every matrix, and what each number is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lfm2np.oracle.report.markup import Markup, counted, element, joined, visible
from lfm2np.teaching.drawings.page.view import View, by_step, step_text
from lfm2np.teaching.drawings.runs.derive import Moment, moments
from lfm2np.teaching.drawings.runs.paged import before_steps
from lfm2np.teaching.drawings.runs.recorded_run import Run, Step
from lfm2np.teaching.drawings.views.picture import MOST_ROWS, Stage, Weights, block, tokens_in, tokens_out

__all__ = ["Weights", "single"]

KINDS = {"convolve": "convolution", "attend": "attention"}
KEYS = (("c0", "one product over all tokens"), ("c1", "row by row"), ("c2", "per request"))


def single(run: Run, weights: Weights, player: str = "single") -> View:
    """`run` is of the hand model, with the detail of every step."""
    kinds, cells, states = layers_of(run), before_steps(run), moments(run)
    drawn = by_step(run, lambda step: of_step(Stage(run, step, weights, next(cells)), kinds, states))
    alone = len(run.requests) == 1
    return View(
        id="single",
        title="Inside a block" if not alone else "A single request",
        lesson="First the whole prompt in one pass, then a token a pass: the cache keeps what is needed of the others."
        if alone
        else "All tokens of a step are the rows of one matrix. Only the convolution and attention ask whose they are.",
        picture=joined(
            chooser(kinds),
            element(
                "p",
                "Point at a number, tap it, or go to it by Tab and arrow keys: what it is made of lights up, and "
                "its sum stands here.",
                class_="readout needs-script",
                role="status",
            ),
            drawn,
            element("p", [element("span", text, class_=f"key {class_}") for class_, text in KEYS], class_="legend"),
        ),
        text=element(
            "p",
            f"This model fits on paper: {counted(len(kinds), 'block')}, hidden size 4, two heads, whole "
            "numbers as weights, ten words. A product has its weights above it and its rows at the left; "
            "dashed cells were there before the step.",
        ),
        player=player,
        num_steps=len(run.steps),
    )


def layers_of(run: Run) -> dict[int, str]:
    """Layer -> convolution or attention."""
    operations = (operation for step in run.steps for operation in step.operations)
    return {
        operation["layer"]: KINDS[operation["operation"]] for operation in operations if operation["operation"] in KINDS
    }


def chooser(kinds: Mapping[int, str]) -> Markup:
    """The network as a row of buttons: tokens, its blocks, the next token."""
    names = {"in": "tokens", **{str(layer): f"{layer} {kind}" for layer, kind in kinds.items()}, "out": "next token"}
    arrow = element("span", "\u2192", class_="to", aria_hidden="true")
    parts: list[object] = []
    for value, name in names.items():
        parts += [arrow if parts else None, element("button", name, type="button", value=value, aria_pressed="false")]
    more = {"role": "group", "aria_label": "Parts of the network", "data_first": "0"}
    return element("div", parts, class_="parts needs-script", **more)


def of_step(stage: Stage, kinds: Mapping[int, str], states: Mapping[str, Sequence[Moment]]) -> Markup:
    step = stage.step
    if not step.entries:
        return element("p", element("strong", f"Step {step.number} "), "computed nothing.")
    if step.num_tokens > MOST_ROWS:
        many = f"{step.num_tokens} rows are too many for a picture, which has at most {MOST_ROWS}: a smaller budget of "
        return joined(sentence(stage.run, step, states), element("p", f"{many}tokens cuts the prompts."))
    parts = {"in": ("Tokens", tokens_in(stage))}
    parts |= {str(layer): (f"Block {layer}: {kind}", block(stage, layer)) for layer, kind in kinds.items()}
    parts["out"] = ("The next token", tokens_out(stage))
    pictures = [
        element("div", element("h3", title), element("div", drawn, class_="picture"), class_="part", data_part=name)
        for name, (title, drawn) in parts.items()
    ]
    return joined(sentence(stage.run, step, states), *pictures)


def sentence(run: Run, step: Step, states: Mapping[str, Sequence[Moment]]) -> Markup:
    sentences = []
    for entry in step.entries:
        going = " ".join(visible(run.word(token_id)) for token_id in entry.token_ids)
        said = " ".join(visible(run.word(token)) for token in step.tokens.get(entry.request_id, ()))
        several = len(entry.token_ids) > 1
        positions = f"positions {entry.start} to {entry.stop - 1}" if several else f"position {entry.start}"
        name = f"{visible(entry.request_id)}: " if len(run.requests) > 1 else ""
        phase = states[entry.request_id][step.number].state
        out = f", out comes \u201c{said}\u201d" if said else ""
        sentences.append(f"{name}{phase} of \u201c{going}\u201d at {positions}{out}")
    return step_text(step, "; ".join(sentences) + ".")
