"""A matrix of a picture: numbers whose making can be followed; the script knows each kind of it (page.js, HOW)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lfm2np.drawings.page.markup import Markup, element, number
from lfm2np.drawings.page.numbers import shape_text

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
    how     the kind of its making, one of HOW in page.js; empty for weights
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
        cells = [
            cell(
                value,
                largest,
                [*(["part"] * (column in borders)), *(["kept"] * (index < kept)), *(["top"] * (value == top))],
            )
            for column, value in enumerate(row)
        ]
        body.append(element("tr", label, cells))
    heads = [element("th", text, colspan=count, scope="colgroup") for text, count in head]
    corner = element("td") if labels else None
    shape = shape_text([len(rows), len(rows[0]) if rows else 0])
    attributes = {"data_" + name: value for name, value in data.items()}
    return element(
        "div",
        element(
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
        ),
        class_=f"m {class_}".strip(),
    )


def cell(value: float | None, largest: float, classes: list[str]) -> Markup:
    """Three digits, or two where that is long; the whole number for the pointer and the script where it is more."""
    if value is None:
        return element("td", class_=" ".join(classes) or None)
    short, whole = number(value, 3), repr(value)
    short = short if len(short) <= MOST_SIGNS else number(value, 2)
    tint = tint_of(value, largest)
    return element(
        "td",
        short,
        title=None if value == 0 or whole in (short, f"{short}.0") else whole,
        class_=" ".join([*([tint] if tint else []), *classes]) or None,
    )


def tint_of(value: float, largest: float) -> str:
    """p for numbers above zero and n for those below, 1 to 3 by size; nothing for what is nearly zero."""
    if not largest or not math.isfinite(largest) or not abs(value) <= largest:
        return ""
    level = TINTS[min(3, int(abs(value) / largest * 3.999))]
    return ("p" if value > 0 else "n") + level if level else ""


def across(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """The transposed matrix: weights as they stand above a product, a column for each of its columns."""
    return [list(column) for column in zip(*values, strict=True)]
