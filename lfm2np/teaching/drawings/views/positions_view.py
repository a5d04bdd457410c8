"""Decoding at different positions: each row of the step has its own position, angle and row of the mask."""

from __future__ import annotations

from lfm2np.oracle.report.markup import Markup, joined, number, scrolled, table, visible
from lfm2np.teaching.drawings.page.svg import figure, words
from lfm2np.teaching.drawings.page.view import View, by_step, cell, short_names, view_of_run
from lfm2np.teaching.drawings.runs.derive import colours
from lfm2np.teaching.drawings.runs.recorded_run import Run, Step
from scheduler import FREED

SIDE, LEFT, TOP = 24.0, 150.0, 18.0


def positions(run: Run, player: str = "hand") -> View:
    return view_of_run(
        run,
        "positions",
        "Decoding at different positions",
        "Requests of one step stand at different positions. The flat array carries each row's own position: it "
        "gives the angle of its rotation and how far back it may look.",
        by_step(run, lambda step: of_step(run, step)),
        player=player,
    )


def of_step(run: Run, step: Step) -> Markup:
    rotations = [operation for operation in step.operations if operation["operation"] == "rotate"]
    cosines = rotations[0]["inputs"]["cos"]["values"] if rotations else []
    sines = rotations[0]["inputs"]["sin"]["values"] if rotations else []
    rows = []
    for index, (entry, position, token) in enumerate(step.rows):
        angle = [number(cosines[index][0], 4), number(sines[index][0], 4)] if index < len(cosines) else ["", ""]
        word = visible(run.word(token))
        rows.append([index, visible(entry.request_id), word, position, *angle, f"0 to {position}"])
    head = ["row", "request", "token", "position = angle of the first pair", "its cosine", "its sine", "may look at"]
    return joined(
        scrolled(chart(run, step), f"Mask rows of step {step.number}"),
        table(f"Step {step.number}: positions and angles (in radians)", head, rows),
    )


def chart(run: Run, step: Step) -> Markup:
    """A line a row of the step: what it may look at, in its own request; dashed what windowed layers don't see."""
    window, size = run.config.get("sliding_window"), int(run.config["block_size"])
    numbers, shown = colours(run), short_names(run.requests)
    longest = max((entry.stop for entry in step.entries), default=1)
    shapes: list[object] = [words(LEFT, 8, "positions of the row's own request", class_="tick")]
    for row, (entry, position, token) in enumerate(step.rows):
        y, label = TOP + row * SIDE, f"{shown[entry.request_id]} at {position}: {visible(run.word(token))}"
        shapes.append(words(LEFT - 8, y + SIDE / 2, label, "end", class_="label"))
        for at in range(longest):
            sees = at <= position
            kind = "decode" if at == position else "" if sees else "unseen"
            title, text = f"{label} {'looks at' if sees else 'does not look at'} position {at}", str(at)
            if window is not None and at <= position - window:
                kind = "idle"
                is_freed = entry.window_table[at // size] == FREED
                text = "\u00d7" if is_freed else text
                title += " in full layers only" + (", and windowed ones gave its block back" if is_freed else "")
            x, colour = LEFT + at * SIDE + 1, numbers[entry.request_id] if sees else None
            shapes.append(cell(x, y + 1, SIDE - 2, SIDE - 2, colour, text if sees else "", kind, title))
    description = "A line for each row of the flat array; filled squares are the positions that it attends to."
    if window is not None:
        description += (
            f" Dashed ones with text are beyond the window of {window}: only layers with full attention see them."
        )
    title, width = f"Who looks how far back in step {step.number}", LEFT + SIDE * max(longest, 8) + 8
    return figure(title, description, width, TOP + SIDE * step.num_tokens + 8, shapes)
