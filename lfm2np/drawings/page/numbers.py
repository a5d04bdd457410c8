"""Matrices of a recorded operation as small tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.drawings.page.markup import Markup, details, element, number

LETTERS = {1: "one value", 2: "rows × columns", 3: "rows × heads × channels"}


def shape_text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def matrix(name: str, tensor: Mapping[str, Any], labels: Sequence[str] = ()) -> Markup:
    """A tensor's numbers, at most those that were kept; rows are named by `labels` where there are as many."""
    shape, values = tensor["shape"], tensor["values"]
    width = 1
    for size in shape[1:]:
        width *= size
    whole = len(values) == shape[0] and (not values or len(values[0]) == width)
    caption = f"{name}  [{shape_text(shape)}]" + ("" if whole else ", its first rows and columns")
    rows = []
    for index, row in enumerate(values):
        label = labels[index] if len(labels) == shape[0] else str(index)
        cells = [value_cell(value) for value in row]
        rows.append(element("tr", element("th", label, scope="row"), cells))
    return element("table", element("caption", caption), element("tbody", rows), class_="matrix")


def value_cell(value: float) -> Markup:
    """Three digits, and the whole number for the pointer where that is more."""
    short, whole = number(value, 3), repr(value)
    return element("td", short, title=None if whole in (short, f"{short}.0") else whole)


def operation_body(operation: Mapping[str, Any], labels: Sequence[str] = ()) -> Markup:
    """Inputs, output and the line of code of one operation."""
    file, line, text = operation["source"]
    parts = [matrix(name, tensor, labels) for name, tensor in operation["inputs"].items()]
    return element(
        "div",
        element(
            "div",
            parts,
            element("span", "→", class_="arrow", aria_hidden="true"),
            matrix("result", operation["output"], labels),
            class_="matrices",
        ),
        element("p", element("code", text), f" ({file}, line {line})", class_="source"),
    )


def operation_line(operation: Mapping[str, Any]) -> str:
    """What it is and its sizes, in a line."""
    inputs = ", ".join(f"{name} [{shape_text(tensor['shape'])}]" for name, tensor in operation["inputs"].items())
    context = f", over {operation['context']} positions" if "context" in operation else ""
    arrow = f"{inputs} → " if inputs else ""
    return (
        f"{operation['name']}: {operation['operation']}, {arrow}[{shape_text(operation['output']['shape'])}]{context}"
    )


def opened(operation: Mapping[str, Any], labels: Sequence[str] = ()) -> Markup:
    return details(operation_line(operation), operation_body(operation, labels))
