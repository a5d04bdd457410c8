"""The one builder of pages. HTML and SVG as text: every value is escaped where it enters, so text from prompts or
engines can't become markup. A page is one file that loads nothing: its content security policy forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Container, Iterable

VISIBLE = {"\t": "\u2409", "\n": "\u240a", "\r": "\u240d", "\0": "\u2400", " ": "\u2423"}


class Markup(str):
    """Text that is markup already, made by the functions here."""

    __slots__ = ()


def escaped(value: object) -> Markup:
    """Markup as it is; anything else as text that no browser takes for markup."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(harmless(number(value) if isinstance(value, float) else str(value)), quote=True))


def raw(text: str) -> Markup:
    """The value of a field of a form: also what can't be seen stays what it was."""
    return Markup(html.escape(text, quote=True))


def harmless(text: str) -> str:
    """Characters that reorder, hide or end text (bidirectional marks, zero widths, controls) written as U+...."""
    if text.isprintable():  # nearly all are, and a page has a hundred thousand
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else f"\u27e8U+{ord(character):04X}\u27e9"
        for character in text
    )


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """`element("p", "a < b", class_="x", data_step=3)`; None and False leave an attribute out, True is bare."""
    parts = [name]
    for key, value in attributes.items():
        written = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(written)
        elif value is not None and value is not False:
            parts.append(f'{written}="{escaped(value)}"')
    opened = " ".join(parts)
    if name in ("input", "br", "meta", "link", "hr", "col"):
        return Markup(f"<{opened}>")
    return Markup(f"<{opened}>{joined(*children)}</{name}>")


def joined(*children: object) -> Markup:
    """One after another; lists are opened, None is nothing."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, list | tuple):
            parts.append(joined(*child))
        elif child is not None:
            parts.append(escaped(child))
    return Markup("".join(parts))


def number(value: float, digits: int = 4) -> str:
    """As few characters as show it: whole numbers without a point, others with so many significant digits."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.{digits}g}"


def counted(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def visible(text: str) -> str:
    """A token's text as something that can be seen: blanks and common controls by their symbols."""
    return harmless("".join(VISIBLE.get(character, character) for character in text))


def table(
    caption: object,
    head: Iterable[object],
    rows: Iterable[Iterable[object]],
    class_: str | None = None,
    words: Container[int] = (),
) -> Markup:
    """A row's first cell is its header. Cells of the columns in `words` have the class "word"."""

    def word(column: int) -> str | None:
        return "word" if column in words else None

    body = []
    for row in rows:
        first, *rest = list(row)
        cells = [element("td", cell, class_=word(column)) for column, cell in enumerate(rest, 1)]
        body.append(element("tr", element("th", first, scope="row", class_=word(0)), cells))
    head_row = element("tr", [element("th", cell, scope="col", class_=word(i)) for i, cell in enumerate(head)])
    named = element("caption", caption) if caption else None
    whole = element("table", named, element("thead", head_row), element("tbody", body))
    return scrolled(whole, caption or "table", f"scroll {class_}" if class_ else "scroll")


def scrolled(drawn: Markup, label: object, class_: str = "scroll") -> Markup:
    """Something that may be wider than the page, to be moved by pointer or keys."""
    return element("div", drawn, class_=class_, tabindex=0, role="region", aria_label=label)


def details(summary: object, *children: object, **attributes: object) -> Markup:
    return element("details", element("summary", summary), children, **attributes)


def document(
    title: str,
    style: str,
    *content: object,
    script: str = "",
    allowed: str = "form-action 'none'",
    **attributes: object,
) -> str:
    """A whole file: what is shown, its style and, where there is one, its script, which alone may run.

    allowed     further directives of the content security policy
    attributes  of the body
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    scripts = f" script-src 'sha256-{digest}';" if script else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline';{scripts} base-uri 'none'; {allowed}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,") if "connect-src" in allowed else None,
        element("title", title),
        element("style", Markup(style)),
    )
    body = element("body", content, element("script", Markup(script)) if script else None, **attributes)
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"
