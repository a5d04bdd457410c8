"""The house as an SVG: a box a room, in layers, with an arrow to each room that it imports; and the same as a table."""

from __future__ import annotations

from functools import cache
from html import escape
from itertools import chain

from rooms import Arrows

ANYWHERE = ("lfm2np.errors", "lfm2np.system", "lfm2np.values")  # every room may use them: boxes, no arrows
WIDTH, BOX, ROW, MARGIN = 860, 36, 82, 12  # in units of the drawing; a row is a box and the room for arrows below it
LETTER = 8.2


def drawn(arrows: Arrows) -> Arrows:
    """Without what only opens the door (`__main__`), what every room may use, and what another arrow implies."""
    used = set(chain.from_iterable(arrows.values()))
    doors = {box for box, others in arrows.items() if box not in used and len(others) == 1}
    kept = {
        box: {other: names for other, names in others.items() if other not in ANYWHERE}
        for box, others in arrows.items()
        if box not in {*doors, *ANYWHERE}
    }

    @cache
    def below(box: str) -> frozenset[str]:
        return frozenset(kept[box]).union(*map(below, kept[box]))

    return {
        box: {node: names for node, names in others.items() if not any(node in below(two) for two in others)}
        for box, others in kept.items()
    }


Stop = str | tuple[str, str, int]  # a box, or where the arrow (from, to) passes that row


def rows_of(arrows: Arrows) -> list[list[Stop]]:
    """From the top: a box stands right below the lowest that imports it; a long arrow has a place in each row between.

    Each row is in the order that bends arrows least, seen from the row above.
    """
    users = {box: [node for node, others in arrows.items() if box in others] for box in arrows}

    @cache
    def depth(box: str) -> int:
        return 1 + max(map(depth, users[box]), default=-1)

    rows: list[list[Stop]] = [[] for _ in range(1 + max(map(depth, arrows)))]
    above: dict[Stop, list[Stop]] = {}
    for box in sorted(arrows):
        rows[depth(box)].append(box)
        above[box] = []
        for user in users[box]:
            last: Stop = user
            for row in range(depth(user) + 1, depth(box)):
                rows[row].append((user, box, row))
                above[user, box, row] = [last]
                last = (user, box, row)
            above[box].append(last)
    place: dict[Stop, float] = {}
    for row in rows:
        pull = {node: sum(place[two] for two in above[node]) / len(above[node]) if above[node] else 0.5 for node in row}
        row.sort(key=lambda node: (pull[node], str(node)))
        place |= zip(row, centres(row), strict=True)
    return rows


def width(stop: Stop) -> float:
    return LETTER * len(label(stop)) + 26 if isinstance(stop, str) else 14


def centres(row: list[Stop]) -> list[float]:
    """From 0 to 1: boxes side by side with the same gap between all."""
    gap = (WIDTH - sum(map(width, row))) / (len(row) + 1)
    return [(gap * (i + 1) + sum(map(width, row[:i])) + width(node) / 2) / WIDTH for i, node in enumerate(row)]


def label(box: str) -> str:
    """As the source's folders and files are called, without lfm2np: engine/, reference.py."""
    return "lfm2np" if box == "lfm2np" else box.removeprefix("lfm2np.").replace(".", "/")


def picture(arrows: Arrows, links: dict[str, str]) -> str:
    """`links`: box -> address of its page, where it has one."""
    kept = drawn(arrows)
    rows = [*rows_of(kept), [box for box in ANYWHERE if box in arrows]]
    middle: dict[Stop, tuple[float, float]] = {}
    for i, row in enumerate(rows):
        for node, x in zip(row, centres(row), strict=True):
            middle[node] = (x * WIDTH, MARGIN + BOX / 2 + i * ROW)
    parts = []
    for box, others in kept.items():
        for other in others:
            stops = [middle[node] for row in rows for node in row if node == box or node[:2] == (box, other)]
            title = escape(f"{label(box)} imports {label(other)}")
            curve = arrow([*stops, middle[other]])
            parts.append(f'<path class="arrow" d="{curve}" marker-end="url(#tip)"><title>{title}</title></path>')
    boxes = {node: place for node, place in middle.items() if isinstance(node, str)}
    for box, (x, y) in boxes.items():
        kind = "box anywhere" if box in ANYWHERE else "box"
        rect = (
            f'<rect x="{x - width(box) / 2:.0f}" y="{y - BOX / 2:.0f}" width="{width(box):.0f}" height="{BOX}" rx="6"/>'
        )
        drawing = f'<g class="{kind}">{rect}<text x="{x:.0f}" y="{y + 5:.0f}">{escape(label(box))}</text></g>'
        parts.append(f'<a href="{escape(links[box])}">{drawing}</a>' if box in links else drawing)
    height = 2 * MARGIN + BOX + (len(rows) - 1) * ROW
    note = f'<text class="note" x="{MARGIN}" y="{height - BOX - 2 * MARGIN - 8}">any room may use:</text>'
    return (
        f'<div class="house"><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="house-title house-desc">'
        f'<title id="house-title">The rooms of the house and what they import</title>'
        f'<desc id="house-desc">{len(boxes)} boxes in {len(rows)} rows. An arrow goes from a room down to each room '
        "that it imports, unless it reaches that through another. The table below has every import.</desc>"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z"/></marker></defs>{note}{"".join(parts)}</svg></div>'
    )


def arrow(stops: list[tuple[float, float]]) -> str:
    """A path down from the first box, upright through the middle of each row that it passes, to the last box's top."""
    (x, y), *way, (to_x, to_y) = stops
    path = f"M{x:.0f} {y + BOX / 2:.0f}"
    y += BOX / 2
    for x_next, y_next in [*way, (to_x, to_y)]:
        end = y_next - BOX / 2 - (7 if (x_next, y_next) == (to_x, to_y) else 0)
        bend = (end - y) / 2
        path += f"C{x:.0f} {y + bend:.0f} {x_next:.0f} {end - bend:.0f} {x_next:.0f} {end:.0f}"
        x, y = x_next, y_next + BOX / 2
        if (x_next, y_next) != (to_x, to_y):
            path += f"V{y:.0f}"
    return path


def table(arrows: Arrows) -> list[tuple[str, str, str]]:
    """(room, what it imports, who imports it), from the top; the boxes of the picture and the others."""
    rows = [node for row in rows_of(drawn(arrows)) for node in row if isinstance(node, str)]
    rows = [*(box for box in sorted(arrows) if box not in {*rows, *ANYWHERE}), *rows, *ANYWHERE]
    users = {box: [other for other in rows if box in arrows.get(other, ())] for box in rows}
    return [
        (label(box), ", ".join(label(node) for node in rows if node in arrows[box]), ", ".join(map(label, users[box])))
        for box in rows
        if box in arrows
    ]
