"""Who can see whom: the mask of a ragged step beside the reach of the convolution, and what happens where one leaks."""

from __future__ import annotations

import numpy as np

from lfm2np.oracle.report.markup import Markup, counted, element, number, scrolled, table, visible
from lfm2np.teaching.drawings.page.svg import figure, line, rectangle, words
from lfm2np.teaching.drawings.page.view import View, legend, view_without_steps
from lfm2np.teaching.drawings.runs.leaks import ATTENTION, BROKEN, CONVOLUTION, SOUND, Leak

SIDE, LEFT, TOP = 14.0, 74.0, 20.0
CHOICES = (SOUND, *BROKEN)

MOST_ROWS = 64  # of a step that is drawn
LESSON = (
    "The usual picture says that only attention lets tokens meet, so a mask keeps requests apart. In LFM2 "
    "that is false: the convolution mixes neighbours too."
)


def isolation(leak: Leak | None, of: str = "A step of the trained fixture", fault: str = "") -> View:
    """`of` says whose step it is; without one, that there is none. First shown is how an engine with the fault does."""
    if leak is None:
        none = "In no step of these requests does one begin behind another, so nobody could see anybody."
        return view_without_steps("isolation", "Who can see whom", LESSON, "", element("p", none))
    shown = next((index for index, what in enumerate(CHOICES) if fault and BROKEN.get(what) == fault), 0)
    buttons = []
    for index, what in enumerate(CHOICES):
        button = element("input", type="radio", name="leak", value=index, checked=index == shown)
        buttons.append(element("label", button, f" {what if what != SOUND else 'sound: each request by itself'}"))
    return view_without_steps(
        "isolation",
        "Who can see whom",
        LESSON,
        [
            element("fieldset", element("legend", "As it was computed"), buttons, class_="choices needs-script"),
            legend(
                ("sees a token of this step", rectangle(2, 2, 14, 14, class_="sees")),
                (
                    "sees what is kept of an earlier step: keys and values, or the state",
                    rectangle(5, 5, 8, 8, class_="sees"),
                ),
                ("sees a token of another request: a leak", rectangle(2, 2, 14, 14, class_="sees leak")),
            ),
            [choice(leak, index, what) for index, what in enumerate(CHOICES)],
        ],
        element("p", requests_text(leak, of)),
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
