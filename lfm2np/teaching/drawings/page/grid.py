"""Matrices: of a picture, whose numbers can be followed to what they are made of; and of a recorded operation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.oracle.report.markup import Markup, element, number

Row = Sequence[float | None]  # None is a number that there is not: an empty cell
MOST_SIGNS = 6  # of a number in its cell
TINTS = ("", "1", "2", "3")


def grid(
    key: str,
    name: str,
    rows: Sequence[Row],
    how: str = "",
    of: str = "",
    *,
    labels: Sequence[str] = (),
    head: Sequence[tuple[str, int]] = (),
    class_: str = "",
    kept: int = 0,
    best: bool = False,
    bare: bool = False,
    **data: object,
) -> Markup:
    """A table of numbers, tinted by sign and size.

    key     its name within the picture, by which others say that they are made of it
    how     the kind of its making, one of HOW in page.js, whose script knows each; empty for weights
    of      the keys of what it is made of, each with `:offset` of a column where it is only a part
    head    names of groups of columns, and how many each has
    kept    that many of the first rows are of an earlier step
    best    the largest number of each row is marked
    bare    the groups' names are left out: they stand above the weights already
    data    further numbers that its kind needs, as data attributes
    """
    sizes = [abs(value) for row in rows for value in row if value is not None]
    largest = max(sizes, default=0.0)
    borders = {sum(count for _, count in head[:index]) for index in range(1, len(head))}
    body = []
    for index, row in enumerate(rows):
        label = element("th", labels[index], scope="row") if labels else None
        top = max((value for value in row if value is not None), default=None) if best else None
        cells = []
        for column, value in enumerate(row):
            marks = {"part": column in borders, "kept": index < kept, "top": value == top}
            cells.append(cell(value, largest, [name for name, is_marked in marks.items() if is_marked]))
        body.append(element("tr", label, cells))
    heads = [element("th", text, colspan=count, scope="colgroup") for text, count in head]
    corner = element("td") if labels else None
    shape = shape_text([len(rows), len(rows[0]) if rows else 0])
    attributes = {"data_" + name: value for name, value in data.items()}
    drawn = element(
        "table",
        element("caption", f"{name} ", element("small", shape)),
        element("thead", element("tr", corner, heads)) if head and not bare else None,
        element("tbody", body),
        data_m=key,
        data_name=name,
        data_how=how or None,
        data_of=of or None,
        class_="best" if best else None,
        **attributes,
    )
    return element("div", drawn, class_=f"m {class_}".strip())


def cell(value: float | None, largest: float, classes: list[str]) -> Markup:
    """Three digits, or two where that is long; the whole number for the pointer and the script where it is more."""
    if value is None:
        return element("td", class_=" ".join(classes) or None)
    short = number(value, 3)
    short = short if len(short) <= MOST_SIGNS else number(value, 2)
    class_ = f"{tint_of(value, largest)} {' '.join(classes)}".strip() or None
    return element("td", short, title=whole_number(value, short) if value else None, class_=class_)


def whole_number(value: float, short: str) -> str | None:
    """For the pointer; None where the short one is all of it."""
    return None if repr(value) in (short, f"{short}.0") else repr(value)


def tint_of(value: float, largest: float) -> str:
    """p for numbers above zero and n for those below, 1 to 3 by size; nothing for what is nearly zero."""
    if not largest or not math.isfinite(largest) or not abs(value) <= largest:
        return ""
    level = TINTS[min(3, int(abs(value) / largest * 3.999))]
    return ("p" if value > 0 else "n") + level if level else ""


def across(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """The transposed matrix: weights as they stand above a product, a column for each of its columns."""
    return [list(column) for column in zip(*values, strict=True)]


def shape_text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def matrix(name: str, tensor: Mapping[str, Any], labels: Sequence[str] = ()) -> Markup:
    """A tensor's numbers, at most those that were kept; rows are named by `labels` where there are as many."""
    shape, values = tensor["shape"], tensor["values"]
    width = math.prod(shape[1:])
    whole = len(values) == shape[0] and (not values or len(values[0]) == width)
    caption = f"{name}  [{shape_text(shape)}]" + ("" if whole else ", its first rows and columns")
    rows = []
    for index, row in enumerate(values):
        label = labels[index] if len(labels) == shape[0] else str(index)
        shown = [(value, number(value, 3)) for value in row]
        cells = [element("td", short, title=whole_number(value, short)) for value, short in shown]
        rows.append(element("tr", element("th", label, scope="row"), cells))
    return element("table", element("caption", caption), element("tbody", rows), class_="matrix")


def operation_body(operation: Mapping[str, Any], labels: Sequence[str] = ()) -> Markup:
    """Inputs, output and the line of code of one operation."""
    file, line, text = operation["source"]
    parts = [matrix(name, tensor, labels) for name, tensor in operation["inputs"].items()]
    arrow = element("span", "→", class_="arrow", aria_hidden="true")
    return element(
        "div",
        element("div", parts, arrow, matrix("result", operation["output"], labels), class_="matrices"),
        element("p", element("code", text), f" ({file}, line {line})", class_="source"),
    )
