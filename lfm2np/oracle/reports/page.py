"""The builder of HTML pages: escaped text, tables that scroll by themselves, sections with headings, the document.

A page loads nothing: its content security policy forbids every request and every script, and allows one style sheet, by
its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources

from lfm2np.oracle.reports.report_parts import MOST_COMMAND, visible

STYLE = "\n" + (resources.files("lfm2np.oracle.report") / "report.css").read_text(encoding="utf-8")
Row = Sequence[object]


def foreign(text: str, most: int = 1000) -> str:
    """Text from outside, escaped: control characters show as numbers, right-to-left text stays in its place."""
    return f"<bdi>{html.escape(visible(text, most))}</bdi>"


def table(caption: str, header: Sequence[str], bodies: Mapping[str, Sequence[Row]], words: Sequence[int] = (0,)) -> str:
    """A table of escaped cells, its rows under headings ("": none). A row's first cell is its header; `words` are
    left-aligned.
    """
    head = "".join(f'<th scope="col"{word(index, words)}>{name}</th>' for index, name in enumerate(header))
    body = "".join(table_body(heading, rows, len(header), words) for heading, rows in bodies.items())
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}">\n'
        f"<table>\n<caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n{body}</table>\n</div>\n"
    )


def table_body(heading: str, rows: Sequence[Row], columns: int, words: Sequence[int]) -> str:
    lines = [f'<tr class="heads"><th scope="rowgroup" colspan="{columns}">{heading}</th></tr>'] if heading else []
    for first, *others in rows:
        cells = "".join(f"<td{word(index, words)}>{cell}</td>" for index, cell in enumerate(others, 1))
        lines.append(f'<tr><th scope="row"{word(0, words)}>{first}</th>{cells}</tr>')
    return "<tbody>\n" + "\n".join(lines) + "\n</tbody>\n"


def word(index: int, words: Sequence[int]) -> str:
    return ' class="word"' if index in words else ""


def bullets(items: Sequence[str]) -> str:
    return "<ul>\n" + "".join(f"<li>{item}</li>\n" for item in items) + "</ul>\n"


def section(name: str, heading: str, content: str) -> str:
    titled = f'<h2 id="{name}-heading">{heading}</h2>\n{content}'
    return f'<section id="{name}" aria-labelledby="{name}-heading">\n{titled}</section>\n'


def details(summary: str, content: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n{content}</details>\n"


def versions(caption: str, facts: Iterable[tuple[str, str]], command: str) -> str:
    """A table of versions, and the command that made the page, if it is known."""
    rows = [[foreign(name), foreign(value)] for name, value in facts]
    content = table(caption, ("what", "version"), {"": rows}, (0, 1))
    if command:
        content += f"<p>The command:</p>\n<pre><code>{foreign(command, MOST_COMMAND)}</code></pre>\n"
    return content


def page(title: str, header: str, sections: Sequence[tuple[str, str, str]], footer: str, more_style: str = "") -> str:
    """A whole document; sections are (name, heading, content), all escaped except the title. `more_style`: CSS."""
    style = STYLE + more_style
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    links = bullets([f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(visible(title, 200))}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<header>\n{header}</header>\n<nav aria-label="Sections">\n{links}</nav>\n<main>\n'
        + "".join(section(*fields) for fields in sections)
        + f"</main>\n<footer>\n{footer}</footer>\n</body>\n</html>\n"
    )
