"""Figures: SVG of escaped markup."""

from __future__ import annotations

from lfm2np.oracle.report.markup import Markup, element, number


def figure(title: str, description: str, width: float, height: float, *shapes: object) -> Markup:
    """An SVG with a title and a description, as wide as there is room, never wider than drawn."""
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        shapes,
        viewBox=f"0 0 {number(width)} {number(height)}",
        style=f"width:{number(width / 16)}rem",
        role="img",
        aria_label=title,
        aria_description=description,
    )


def rectangle(x: float, y: float, width: float, height: float, *children: object, **attributes: object) -> Markup:
    sizes = {"x": number(x), "y": number(y), "width": number(width), "height": number(height)}
    return element("rect", children, **sizes, **attributes)


def words(x: float, y: float, text: object, anchor: str | None = None, **attributes: object) -> Markup:
    return element("text", text, x=number(x), y=number(y), text_anchor=anchor, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> Markup:
    return element("line", x1=number(x1), y1=number(y1), x2=number(x2), y2=number(y2), **attributes)
