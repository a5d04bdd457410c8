"""Ragged batch: a step's flat array, how far each row sees by attention and convolution, and what a leak does."""

from __future__ import annotations

import numpy as np

from lfm2np.oracle.report.markup import Markup, counted, element, joined, number, scrolled, table, visible
from lfm2np.teaching.drawings.page.svg import figure, line, rectangle, words
from lfm2np.teaching.drawings.page.view import View, by_step, cell, legend, short_names, step_text, view_of_run
from lfm2np.teaching.drawings.runs.derive import colours
from lfm2np.teaching.drawings.runs.detail import EXPERT, PRODUCT, REQUEST, ROW
from lfm2np.teaching.drawings.runs.leaks import ATTENTION, BROKEN, CONVOLUTION, SOUND, Leak
from lfm2np.teaching.drawings.runs.recorded_run import Entry, Run, Step
from scheduler import FREED

TALL, WIDE, MARGIN = 22.0, 720.0, 220.0  # of a row of the flat array, of all positions, of the labels
SIDE, LEFT, TOP = 14.0, 74.0, 20.0  # of a square of a mask, and where the squares begin
CHOICES = (SOUND, *BROKEN)
MOST_ROWS = 64  # of a step that is drawn
CLASSES = {
    PRODUCT: "weights meet all tokens of all requests at once: one large product",
    EXPERT: "its weights meet the step's tokens that chose it, whichever request they are of: a product for each",
    ROW: "each token by itself: it does not matter whose it is",
    REQUEST: "each request looks at its own past only: its blocks, its state, its random numbers",
}
LESSON = (
    "The usual picture says that only attention lets tokens meet, so a mask keeps requests apart. In LFM2 "
    "that is false: the convolution mixes neighbours too."
)


def ragged(run: Run, leak: Leak | None, of: str = "A step of the trained fixture", fault: str = "") -> View:
    """`leak` is of a step of whose words say `of`; first shown is how an engine with the fault does it."""
    taps, known = taps_of(run), {operation["class"] for step in run.steps for operation in step.operations}
    return view_of_run(
        run,
        "ragged",
        "Ragged batch and the reach of the convolution",
        LESSON,
        [
            legend(
                ("attention sees these positions of the row's own request", cell(1, 1, 16, 16, 0, "")),
                ("the convolution takes in these", rectangle(2, 2, 14, 14, class_="cell none written")),
                *(
                    [("beyond the window", cell(1, 1, 16, 16, None, "", "idle"))]
                    if "sliding_window" in run.config
                    else []
                ),
            ),
            by_step(run, lambda step: of_step(run, step, taps)),
        ],
        element("dl", [[element("dt", name), element("dd", text)] for name, text in CLASSES.items() if name in known]),
        element(
            "section", element("h3", "Where requests leak into each other"), broken(leak, of, fault), class_="leaks"
        ),
    )


def taps_of(run: Run) -> int:
    """Of the convolutions; 0 of a run without detail."""
    operations = (each for step in run.steps for each in step.operations if each["operation"] == "convolve")
    return next((1 + int(each["inputs"]["history"]["shape"][0]) for each in operations), 0)


# --- the flat array of each step


def of_step(run: Run, step: Step, taps: int) -> Markup:
    text = f"{counted(step.num_tokens, 'token')} of {counted(len(step.entries), 'request')} in one flat array."
    if step.num_tokens > MOST_ROWS:
        drawn = element("p", "This step has too many rows to draw.")
    else:
        drawn = scrolled(flat_array(run, step, taps), f"Flat array of step {step.number}")
    return joined(step_text(step, text), drawn, classes(step))


def flat_array(run: Run, step: Step, taps: int) -> Markup:
    """A line a row: as far back as attention sees, with the last positions outlined, which the convolution takes in."""
    window, shown = run.config.get("sliding_window"), short_names(run.requests)
    longest = max((entry.stop for entry in step.entries), default=1)
    wide = min(24.0, WIDE / longest)
    shapes: list[object] = [words(MARGIN, 8, "positions of the row's own request", class_="tick")]
    for row, (entry, position, token) in enumerate(step.rows):
        y, label = TOP + row * TALL, f"{shown[entry.request_id]} at {position}: {visible(run.word(token))}"
        shapes.append(words(MARGIN - 8, y + TALL / 2, f"row {row}, {label}", "end", class_="label"))
        first = 0 if window is None else max(0, position - window + 1)
        if first:
            text, title = beyond(run, entry, first)
            shapes.append(cell(MARGIN, y + 2, first * wide, TALL - 4, None, text, "idle", f"{label} {title}"))
        x, title = MARGIN + first * wide, f"{label} sees positions {first} to {position}"
        own = colours(run)[entry.request_id]
        shapes.append(cell(x, y + 2, (position + 1 - first) * wide, TALL - 4, own, "", "", title))
        if taps:
            reach = min(taps, position + 1)
            title = element("title", f"{label}: the convolution takes in the last {reach}")
            x = MARGIN + (position + 1 - reach) * wide
            shapes.append(rectangle(x, y + 2, reach * wide, TALL - 4, title, class_="cell written"))
    description = (
        "A line for each row of the flat array: the positions that it attends to, and outlined those within the reach "
        "of the convolution. No row sees a position of another request."
    )
    title, width = f"How far each row of step {step.number} sees", MARGIN + wide * longest + 8
    return figure(title, description, width, TOP + TALL * step.num_tokens + 8, shapes)


def beyond(run: Run, entry: Entry, first: int) -> tuple[str, str]:
    """What a row's windowed layers do not see: how many of these positions lie in blocks that were given back."""
    size = int(run.config["block_size"])
    freed = sum(entry.window_table[at // size] == FREED for at in range(first))
    title = f"sees positions 0 to {first - 1} in full layers only"
    return ("\u00d7", f"{title}, and windowed ones gave {freed} of them back") if freed else ("", title)


def classes(step: Step) -> Markup | None:
    """The step's operations by what they need to know of the requests. None without detail."""
    rows = []
    for name in CLASSES:
        mine = [operation for operation in step.operations if operation["class"] == name]
        kinds = ", ".join(dict.fromkeys(operation["operation"] for operation in mine))
        if mine:
            rows.append([name, kinds, len(mine), sum(each["output"]["shape"][0] for each in mine)])
    head = ["class", "operations", "calls", "rows in all"]
    return table(f"What step {step.number} batches, and what not", head, rows, words=(1,)) if rows else None


# --- one step, sound and broken


def broken(leak: Leak | None, of: str, fault: str) -> Markup:
    if leak is None:
        none = "In no step of these requests does one begin behind another, so nobody could see anybody."
        return element("p", none)
    shown = next((index for index, what in enumerate(CHOICES) if fault and BROKEN.get(what) == fault), 0)
    buttons = []
    for index, what in enumerate(CHOICES):
        button = element("input", type="radio", name="leak", value=index, checked=index == shown)
        buttons.append(element("label", button, f" {what if what != SOUND else 'sound: each request by itself'}"))
    return joined(
        element("p", requests_text(leak, of)),
        element("fieldset", element("legend", "As it was computed"), buttons, class_="choices needs-script"),
        legend(
            ("sees a token of this step", rectangle(2, 2, 14, 14, class_="sees")),
            ("sees what is kept of an earlier step: keys and values, or the state", square(1, 1, 4, "", "sees")),
            ("sees a token of another request: a leak", rectangle(2, 2, 14, 14, class_="sees leak")),
        ),
        [choice(leak, index, what) for index, what in enumerate(CHOICES)],
        element(
            "p",
            f"A convolution of {leak.taps} taps reaches {leak.taps - 1} rows back. Packed without a state of "
            f"its own, the first {leak.taps - 1} rows of a prompt take in the last rows of the request before "
            "it, and every block above spreads that further; no mask of attention can mend it. To break a "
            "run of your own so: ",
            element("code", "lfm2np lab"),
            ".",
        ),
    )


def requests_text(leak: Leak, of: str) -> str:
    parts = []
    for share in leak.shares:
        rows = counted(share.stop - share.start, "row")
        kind = "a whole prompt" if share.start == 0 else f"after {counted(share.start, 'position')} in its cache"
        parts.append(f"{visible(share.name)} has {rows}, {kind}")
    return f"{of}: " + "; ".join(parts) + "."


def choice(leak: Leak, index: int, what: str) -> Markup:
    """Both pictures and the logits of one choice; without the script all stand below each other."""
    if sum(share.stop - share.start for share in leak.shares) > MOST_ROWS:
        drawn = element("p", "This step has too many rows to draw.")
    else:
        masks = picture(leak, "Attention: its mask", what, "looks at", None, what == ATTENTION)
        reach = picture(leak, "Convolution: its reach", what, "takes in", leak.taps, what == CONVOLUTION)
        drawn = element("div", masks, reach, class_="pair")
    return element(
        "div",
        element("h3", "Sound" if what == SOUND else f"Broken: {what}"),
        drawn,
        changed_text(leak, what),
        logits_table(leak, what),
        class_="choice",
        data_choice=index,
    )


def picture(leak: Leak, title: str, what: str, verb: str, reach: int | None, is_broken: bool) -> Markup:
    """Rows of the step against the positions of every request: causal squares, or the band of the convolution."""
    lefts = offsets([share.stop for share in leak.shares])
    tops = offsets([share.stop - share.start for share in leak.shares])
    width, height = lefts[-1] * SIDE, tops[-1] * SIDE
    shapes: list[object] = []
    for index, share in enumerate(leak.shares):
        for position in range(share.start, share.stop):
            y = TOP + (tops[index] + position - share.start) * SIDE
            first = 0 if reach is None else max(0, position - reach + 1)
            row = f"{visible(share.name)} at position {position} {verb}"
            for seen in range(first, position + 1):
                inset, where = (1.0, "") if seen >= share.start else (4.0, ", from before this step")
                text = f"{row} its {seen}{where}"
                shapes.append(square(LEFT + (lefts[index] + seen) * SIDE, y, inset, text, "sees"))
            for other, seen in leaked(leak, what, index, position) if is_broken else ():
                text = f"LEAKS: {row} position {seen} of {visible(leak.shares[other].name)}"
                shapes.append(square(LEFT + (lefts[other] + seen) * SIDE, y, 1.0, text, "sees leak"))
    for index, share in enumerate(leak.shares):
        rows, columns = (tops[index] + tops[index + 1]) / 2, (lefts[index] + lefts[index + 1]) / 2
        shapes.append(words(LEFT - 6, TOP + rows * SIDE, f"rows of {visible(share.name)}", "end", class_="label"))
        shapes.append(words(LEFT + columns * SIDE, 10, f"positions of {visible(share.name)}", "middle", class_="tick"))
        down, across = TOP + tops[index + 1] * SIDE, LEFT + lefts[index + 1] * SIDE
        shapes.append(line(LEFT, down, LEFT + width, down, class_="wire"))
        shapes.append(line(across, TOP, across, TOP + height, class_="wire"))
    shapes.append(rectangle(LEFT, TOP, width, height, class_="wire"))
    description = f"Each of the {tops[-1]} rows of the step {verb} the marked positions, of {lefts[-1]} in all."
    drawn = figure(f"{title} ({what})", description, LEFT + width + 8, TOP + height + 8, shapes)
    return element("div", element("h4", title), scrolled(drawn, f"{title} ({what})"))


def offsets(sizes: list[int]) -> list[int]:
    """Where each of some neighbours begins, and where the last one ends."""
    return [sum(sizes[:count]) for count in range(len(sizes) + 1)]


def square(x: float, y: float, inset: float, title: str, class_: str) -> Markup:
    side = SIDE - 2 * inset
    return rectangle(x + inset, y + inset, side, side, element("title", title), class_=class_)


def leaked(leak: Leak, what: str, index: int, position: int) -> list[tuple[int, int]]:
    """Request and position of the rows that a request's row must not see, and sees by the fault of that name."""
    before = [(other, at) for other, share in enumerate(leak.shares[:index]) for at in range(share.start, share.stop)]
    if what == ATTENTION:
        return before
    missing = 0 if leak.shares[index].start else leak.taps - 1 - position
    return before[-missing:] if missing > 0 else []


def changed_text(leak: Leak, what: str) -> Markup:
    if what == SOUND:
        return element("p", "Each request's logits are those that it has alone, bit for bit.")
    parts = []
    for share in leak.shares:
        rows = leak.changed(what, share.name)
        parts.append(f"{visible(share.name)}: {sum(rows)} of {counted(len(rows), 'row')}")
    return element("p", element("strong", "Rows with other logits: ", class_="changed"), "; ".join(parts) + ".")


def logits_table(leak: Leak, what: str) -> Markup:
    """The three largest logits of each request's last row, and what they should be."""
    rows = []
    for name in (share.name for share in leak.shares):
        row, truth = leak.logits[what][name][-1], leak.logits[SOUND][name][-1]
        top = np.argsort(-row, kind="stable")[:3]
        said = [f"{visible(leak.words.get(int(token), str(token)))} {number(float(row[token]), 5)}" for token in top]
        right = int(np.argmax(truth))
        wrong = f"WRONG: it should be {visible(leak.words.get(right, str(right)))}"
        verdict = "the right token" if int(top[0]) == right else wrong
        rows.append([visible(name), *said, number(float(np.max(np.abs(row - truth))), 3), verdict])
    head = ["request", "largest logit", "second", "third", "largest difference of all logits", ""]
    return table("Logits of the next token", head, rows)
