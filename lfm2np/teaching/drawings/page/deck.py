"""Slides: the pictures of views, one on a screen or a sheet of paper, in one HTML file as run_page.py makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lfm2np.oracle.report.markup import Markup, element
from lfm2np.teaching.drawings.page.run_page import PLAYERS, document, drawn, player
from lfm2np.teaching.drawings.page.view import View

KEYS = (
    ("\u2192 \u2190, Space, Page Up and Down, Home, End", "slides"),
    ("P, Shift with \u2192 \u2190", "play or step the picture"),
    ("F", "full screen"),
    ("N", "notes"),
)
BUTTONS = (("back", "\u2039", "Slide before"), ("on", "\u203a", "Next slide"))
TOOLS = (("note", "Notes"), ("full", "Full screen"))


def deck(title: str, about: Markup, views: Sequence[View]) -> str:
    """A slide for the title, and one for each view that has a picture. A slide's id is its number."""
    pictured = [view for view in views if view.picture]
    shown = [replace(view, id=str(number)) for number, view in enumerate(pictured, start=2)]
    count = 1 + len(shown)
    turns = [
        element("button", text, type="button", class_=f"edge {kind}", aria_label=label) for kind, text, label in BUTTONS
    ]
    tools = [element("button", text, type="button", class_=kind, aria_pressed="false") for kind, text in TOOLS]
    return document(
        title,
        Markup(
            element("main", front(title, about, count), [slide(view, count) for view in shown], id="views")
            + element("div", turns, class_="turns needs-script")
            + element("div", [player(name, shown) for name in PLAYERS], tools, class_="desk needs-script")
        ),
        class_="slides",
    )


def front(title: str, about: Markup, count: int) -> Markup:
    keys = [[element("dt", name), element("dd", does)] for name, does in KEYS]
    return element(
        "section",
        element("h1", title, id="1-title"),
        about,
        element("dl", keys, class_="keys needs-script"),
        element("p", f"1/{count}", class_="number"),
        id="1",
        class_="view front",
        aria_labelledby="1-title",
    )


def slide(view: View, count: int) -> Markup:
    return element(
        "section",
        element("h2", view.title, id=f"{view.id}-title"),
        element("p", view.lesson, class_="lesson") if view.lesson else None,
        drawn(view),
        element("aside", view.text, class_="notes", aria_label="Notes") if view.text else None,
        element("p", f"{view.id}/{count}", class_="number"),
        id=view.id,
        class_="view",
        aria_labelledby=f"{view.id}-title",
        data_player=view.player,
    )
