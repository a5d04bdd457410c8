"""Token-level (continuous) batching: the flat array of every step, and beside it the rectangle that it avoids."""

from __future__ import annotations

from lfm2np.drawings.page.markup import (
    Markup,
    element,
    figure,
    joined,
    rectangle,
    scrolled,
    table,
    visible,
    words,
)
from lfm2np.drawings.page.view import View, at_step, cell, fullest, legend, mark, short_names
from lfm2np.drawings.runs.derive import colours
from lfm2np.drawings.runs.policies import answers
from lfm2np.drawings.runs.run import Run, Step

SIDE, LEFT, TOP = 26.0, 64.0, 16.0
MOST_SHOWN = 80  # cells of a row that are drawn


def request_level(run: Run) -> View:
    """The same requests as padded rectangles: a batch is formed once and runs until its longest member ends."""
    known = answers(run)
    names = [name for name in run.requests if name in known]
    size = max((len(step.entries) for step in run.steps), default=1)
    batches = [names[start : start + size] for start in range(0, len(names), size)]
    cells = waste = 0
    figures = []
    for number, batch in enumerate(batches):
        drawn, total, wasted = rectangle_of(run, batch, known, number)
        figures.append(drawn)
        cells, waste = cells + total, waste + wasted
    return View(
        id="request-level",
        title="Request-level batching",
        lesson=f"Padded to a rectangle, {waste} of {cells} cells are computed for nothing: prompts wait for the "
        "longest prompt, finished requests wait for the longest answer, and nobody may join.",
        body=joined(
            [
                legend(
                    [
                        ("a token", cell(1, 1, 16, 16, 0, "a")),
                        ("a generated token", cell(1, 1, 16, 16, 0, "a", "decode")),
                        ("padding: computed, and thrown away", cell(1, 1, 16, 16, None, "", "waste")),
                    ]
                ),
                figures,
                element(
                    "p",
                    "Where a prompt of n tokens joins B - 1 requests that decode one token each, a rectangle pads "
                    "(n - 1)(B - 1) cells; the flat array none.",
                ),
            ]
        ),
    )


def rectangle_of(run: Run, batch: list[str], known: dict[str, list[int]], number: int) -> tuple[Markup, int, int]:
    """Left-padded prompts, then answers: the drawing, its cells, and how many of them are padding."""
    numbers, shown = colours(run), short_names(run.requests)
    prompt = max(len(run.requests[name].prompt) for name in batch)
    answer = max(len(known[name]) for name in batch)
    shapes: list[object] = []
    waste = 0
    for row, name in enumerate(batch):
        y = TOP + row * SIDE
        ids = (*run.requests[name].prompt, *known[name])
        pad = prompt - len(run.requests[name].prompt)
        shapes.append(words(LEFT - 6, y + SIDE / 2, shown[name], "end", class_="label"))
        for column in range(prompt + answer):
            at = column - pad
            x = LEFT + column * SIDE
            if not 0 <= at < len(ids):
                waste += 1
                shapes.append(cell(x + 1, y + 1, SIDE - 2, SIDE - 2, None, "", "waste", f"{visible(name)}: padding"))
                continue
            kind = "decode" if at >= len(run.requests[name].prompt) else "prefill"
            title = f"{visible(name)}, position {at}: {visible(run.word(ids[at]))}"
            shapes.append(cell(x + 1, y + 1, SIDE - 2, SIDE - 2, numbers[name], shown[name], kind, title))
    width, height = LEFT + SIDE * (prompt + answer) + 8, TOP + SIDE * len(batch) + 8
    total = len(batch) * (prompt + answer)
    description = (
        f"{len(batch)} requests, {prompt} columns of prompts and {answer} of answers; {waste} cells are padding."
    )
    drawn = figure(f"Batch {number + 1} as a rectangle", description, width, height, shapes)
    text = element("p", element("strong", f"Batch {number + 1}. "), description)
    return (
        joined([text, scrolled(drawn, f"Batch {number + 1}")]),
        total,
        waste,
    )


def token_level(run: Run) -> View:
    last = len(run.steps) - 1
    tokens = sum(step.num_tokens for step in run.steps)
    longest = [max((len(entry.token_ids) for entry in step.entries), default=0) for step in run.steps]
    avoided = sum(len(step.entries) * most for step, most in zip(run.steps, longest, strict=True)) - tokens
    return View(
        id="token-level",
        title="Token-level batching",
        lesson=f"A step is one flat array: {tokens} cells in {len(run.steps)} steps, every one a token that was "
        f"needed. Requests join and leave at any step. Rectangles of the same steps would add {avoided}.",
        body=joined(
            [
                scrolled(chart(run), "Flat batches"),
                [at_step(step.number, last, rows_of(run, step)) for step in run.steps],
            ]
        ),
        player="hand",
        num_steps=len(run.steps),
        start=fullest(run),
    )


def chart(run: Run) -> Markup:
    """A row a step; each cell is a token of the flat array, under it nothing but the next step."""
    numbers, shown = colours(run), short_names(run.requests)
    widest = max((step.num_tokens for step in run.steps), default=1)
    width = LEFT + SIDE * min(widest, MOST_SHOWN) + 8
    shapes: list[object] = []
    for step in run.steps:
        y = TOP + step.number * SIDE
        row: list[object] = [
            rectangle(0, y, width, SIDE, class_="band"),
            words(LEFT - 6, y + SIDE / 2, f"step {step.number}", "end", class_="tick"),
        ]
        column = 0
        for entry in step.entries:
            decoding = len(entry.token_ids) == 1 and entry.start >= len(run.requests[entry.request_id].prompt)
            for index, token in enumerate(entry.token_ids):
                if column < MOST_SHOWN:
                    place = f"{visible(entry.request_id)}, position {entry.start + index}"
                    title = f"row {column}: {place}, {visible(run.word(token))}"
                    kind = "decode" if decoding else "prefill"
                    x = LEFT + column * SIDE
                    row.append(
                        cell(
                            x + 1,
                            y + 1,
                            SIDE - 2,
                            SIDE - 2,
                            numbers[entry.request_id],
                            shown[entry.request_id],
                            kind,
                            title,
                        )
                    )
                column += 1
        shapes.append(mark(step.number, row))
    description = "A row for each step; its cells are the tokens of the flat array, named by their request."
    return figure("The flat batch of every step", description, width, TOP + SIDE * len(run.steps) + 8, shapes)


def rows_of(run: Run, step: Step) -> Markup:
    rows = []
    index = 0
    for entry in step.entries:
        for offset, token in enumerate(entry.token_ids):
            answer = ""
            if offset == len(entry.token_ids) - 1 and entry.request_id in step.tokens:
                answer = " ".join(visible(run.word(one)) for one in step.tokens[entry.request_id])
            rows.append([index, visible(entry.request_id), entry.start + offset, visible(run.word(token)), answer])
            index += 1
    head = ["row", "request", "position", "token", "what comes of it"]
    return table(f"Step {step.number}: the flat array", head, rows)
