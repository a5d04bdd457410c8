"""Experts: which rows of the flat array each expert computes, and how many experts' weights a step reads for them."""

from __future__ import annotations

from lfm2np.oracle.report.markup import Markup, counted, element, joined, number, scrolled, table, visible
from lfm2np.teaching.drawings.page.svg import figure, rectangle, words
from lfm2np.teaching.drawings.page.view import View, by_step, cell, legend, short_names, step_text, view_of_run
from lfm2np.teaching.drawings.runs.derive import DECODE, Moment, colours, moments
from lfm2np.teaching.drawings.runs.expert_choices import Routes, read_evenly, routes
from lfm2np.teaching.drawings.runs.recorded_run import Run, Step

SIDE, LEFT, TOP = 22.0, 84.0, 16.0
MOST_SHOWN = 64  # tokens of a step that are drawn
MOST_DRAWN = 64  # steps with a figure; a longer run has one for every so many


def experts(run: Run) -> View:
    """`run` is of a model with a mixture of experts, with detail."""
    states = moments(run)
    every = -(-len(run.steps) // MOST_DRAWN)
    first = next(layers[0] for layers in map(routes, run.steps) if layers)
    per_token = len(first.chosen[0])
    return view_of_run(
        run,
        "experts",
        "Which expert computes which token",
        f"Every token goes to {per_token} of {first.num_experts} experts, by its own row alone. An expert is "
        "one product over the tokens of the step that chose it, whichever request they are of: a prompt gives it many "
        "rows, a decode of few requests one or two, and its weights are read all the same.",
        [
            legend(
                ("a token of the flat array; a row of the expert that it chose", cell(1, 1, 16, 16, 0, "a")),
                ("a decode", cell(1, 1, 16, 16, 0, "a", "decode")),
            ),
            by_step(run, lambda step: of_step(run, step, states, step.number % every == 0)),
        ],
        element("p", f"Every {every}. step is drawn; the tables have all.") if every > 1 else None,
        element("h3", "How many experts a step reads"),
        element("p", why(first, per_token)),
        steps_table(run),
    )


def why(first: Routes, per_token: int) -> str:
    size = first.num_experts
    counts = ", ".join(f"{number(read_evenly(size, per_token, count), 3)} for {count}" for count in (1, 4, 16, 64))
    return (
        f"T tokens make T × {per_token} choices. While these are few they seldom meet, so nearly every choice reads "
        f"another expert's weights: if all experts were as likely, {size} × (1 - (1 - {per_token}/{size})^T) of a "
        f"layer's {size} would be read: {counts} tokens. Batching saves reading weights only once choices meet."
    )


def of_step(run: Run, step: Step, states: dict[str, list[Moment]], with_figure: bool) -> Markup:
    layers = routes(step)
    if not layers:
        return element("p", f"Step {step.number} computed nothing.")
    return joined(
        step_text(
            step,
            f"{counted(step.num_tokens, 'token')} of {counted(len(step.entries), 'request')}; block "
            f"{layers[0].layer} reads {counted(layers[0].num_read, 'expert')} for {layers[0].num_choices} choices.",
        ),
        scrolled(chart(run, step, states, layers[0]), f"Experts of block {layers[0].layer}") if with_figure else None,
        rows_table(step, layers),
    )


def chart(run: Run, step: Step, states: dict[str, list[Moment]], layer: Routes) -> Markup:
    """A column a token of the flat array; below it a row an expert, with a square where the token chose it."""
    numbers, shown = colours(run), short_names(run.requests)
    rows = step.rows
    drawn = min(len(rows), MOST_SHOWN)
    right = LEFT + SIDE * drawn
    shapes: list[object] = [words(LEFT - 8, TOP + SIDE / 2, "tokens", "end", class_="label")]

    def square(column: int, y: float, place: str) -> Markup:
        entry, position, token = rows[column]
        name = entry.request_id
        title = f"row {column}: {visible(name)}, position {position}, {visible(run.word(token))}{place}"
        kind = "decode" if states[name][step.number].state == DECODE else "prefill"
        x = LEFT + column * SIDE
        return cell(x + 1, y + 1, SIDE - 2, SIDE - 2, numbers[name], shown[name], kind, title)

    shapes += [square(column, TOP, "") for column in range(drawn)]
    for expert, count in enumerate(layer.rows):
        y = TOP + (expert + 1.5) * SIDE
        shapes.append(words(LEFT - 8, y + SIDE / 2, f"expert {expert}", "end", class_="label" if count else "tick"))
        shapes.append(rectangle(LEFT, y + SIDE / 2, SIDE * drawn, 0.5, class_="wire"))
        shapes += [square(column, y, f": expert {expert}") for column in layer.tokens_of(expert) if column < MOST_SHOWN]
        count_text = counted(count, "row") if count else "not read"
        shapes.append(words(right + 8, y + SIDE / 2, count_text, class_="label" if count else "tick"))
    description = (
        f"A column for each token of the flat array, a row for each expert of block {layer.layer}; a square where the "
        "token chose the expert, so that the squares of a row are the rows of one product."
    )
    height = TOP + (layer.num_experts + 1.5) * SIDE + 8
    title = f"Step {step.number}, block {layer.layer}: the rows of each expert"
    return figure(title, description, right + 80, height, shapes)


def rows_table(step: Step, layers: list[Routes]) -> Markup:
    head = ["block", *range(layers[0].num_experts), "choices", "experts read"]
    rows = [
        [f"block {layer.layer}", *(count or "" for count in layer.rows), layer.num_choices, layer.num_read]
        for layer in layers
    ]
    return table(f"Step {step.number}: rows of each expert", head, rows, class_="rows")


def steps_table(run: Run) -> Markup:
    """The first sparse block of each step."""
    rows = []
    for step in run.steps:
        for layer in routes(step)[:1]:
            evenly = number(read_evenly(layer.num_experts, len(layer.chosen[0]), step.num_tokens), 3)
            rows.append([step.number, step.num_tokens, layer.num_choices, layer.num_read, evenly, max(layer.rows)])
    head = ["step", "tokens", "choices", "experts read", "if all were as likely", "the most rows of one"]
    return table("Experts of the first sparse block", head, rows, class_="reads")
