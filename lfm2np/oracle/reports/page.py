"""The builder of HTML pages: escaped text, tables that scroll by themselves, sections with headings, the document.

A page loads nothing: its content security policy forbids every request and every script, and allows one style sheet, by
its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence

from lfm2np.oracle.reports.parts import MOST_COMMAND, visible

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1b1d21; --quiet: #50555d; --edge: #767c86;
  --panel: #f2f3f5; --exact: #0072b2; --tie: #007a5a; --drift: #e69f00; --bug: #c04a00; --unsure: #50555d; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --text: #eceef1; --quiet: #b4bac3; --edge: #868d98;
  --panel: #22252a; --exact: #56b4e9; --tie: #2fc294; --drift: #e69f00; --bug: #ff8a4c; --unsure: #b4bac3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p, ul, ol { max-width: 45rem; }
a { color: inherit; }
a:focus-visible, summary:focus-visible, .scroll:focus-visible { outline: 3px solid var(--exact); outline-offset: 2px; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1rem; list-style: none; padding: 0; }
nav a { display: inline-block; padding: .25rem 0; }
code, pre, td { font-variant-numeric: tabular-nums; }
code { font-family: ui-monospace, monospace; }
pre { background: var(--panel); padding: .75rem; white-space: pre-wrap; }
.verdict { border: 2px solid var(--edge); border-left-width: .75rem; padding: .25rem 1rem; background: var(--panel); }
.verdict.exact { border-color: var(--exact); } .verdict.tie { border-color: var(--tie); }
.verdict.drift { border-color: var(--drift); } .verdict.bug { border-color: var(--bug); }
.note { color: var(--quiet); }
figure { margin: 0; }
svg { display: block; width: 100%; max-width: 45rem; height: auto; }
svg text { fill: var(--text); font: 13px system-ui, sans-serif; paint-order: stroke; stroke: var(--page);
  stroke-width: 3px; }
.axis, .line { fill: none; stroke: var(--edge); } .line { stroke: var(--text); }
.noise { stroke-dasharray: 2 4; stroke-width: 1.5; } .limit { stroke-dasharray: 9 4; stroke-width: 1.5; }
.mark { stroke: var(--text); stroke-width: .7; }
.mark.exact { fill: var(--exact); stroke: none; } .mark.tie { fill: var(--tie); }
.mark.drift { fill: var(--drift); } .mark.inconclusive { fill: none; stroke: var(--unsure); stroke-width: 1.5; }
.mark.bug { fill: none; stroke: var(--bug); stroke-width: 2; }
.prefill { fill: var(--panel); stroke: var(--edge); } .decode { fill: var(--exact); fill-opacity: .3; }
.decode { stroke: var(--exact); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: .25rem 0; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--edge); text-align: right; white-space: nowrap; }
th { text-align: right; } .word { text-align: left; white-space: normal; min-width: 6rem; }
tbody th { font-weight: 400; }
tr.heads th { font-weight: 600; text-align: left; padding-top: .8rem; }
summary { cursor: pointer; padding: .4rem 0; }
@media print { nav { display: none; } body { max-width: none; padding: 0; } .scroll { overflow: visible; }
  details::details-content { content-visibility: visible; block-size: auto; } table { font-size: .75rem; }
  h2, caption { break-after: avoid; } tr, figure { break-inside: avoid; } }
"""
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


def page(title: str, header: str, sections: Sequence[tuple[str, str, str]], footer: str) -> str:
    """A whole document; sections are (name, heading, content), all escaped except the title."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    links = bullets([f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(visible(title, 200))}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<header>\n{header}</header>\n<nav aria-label="Sections">\n{links}</nav>\n<main>\n'
        + "".join(section(*fields) for fields in sections)
        + f"</main>\n<footer>\n{footer}</footer>\n</body>\n</html>\n"
    )
