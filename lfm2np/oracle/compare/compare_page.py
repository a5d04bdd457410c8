"""The figures of a comparison as one page that any browser opens: no script, no request, all from outside escaped."""

from __future__ import annotations

import html

from lfm2np.oracle.compare.compare import Compared
from lfm2np.oracle.compare.drawing import MOST_NAME, layer_figure
from lfm2np.oracle.compare.shown import HEADER, NOTES, main_rows, names, scored_words, tables
from lfm2np.oracle.reports.page import bullets, details, foreign, page, table
from lfm2np.oracle.reports.parts import environment, number, plural, visible

MOST_ROWS = 100
COMMAND = 4000  # characters


def as_html(compared: Compared, command: str) -> str:
    sections = [
        ("figures", "Figures", figures(compared)),
        ("parts", "Where it comes from", by_part(compared)),
        ("flips", "Flips", flips(compared)),
        ("weights", "Errors of the weights", weights(compared)),
        ("again", "Versions, and how to do it again", again(compared, command)),
    ]
    footer = "".join(f'<p class="note">{one}</p>\n' for one in NOTES)
    return page(f"lfm2np compare: {compared.base.path.name}", head(compared), sections, footer)


def head(compared: Compared) -> str:
    lines = [f"Base: {foreign(str(compared.base.path))}", f"Scored: {foreign(scored_words(compared))}"]
    lines += [f"Not computed: {foreign(one)}" for one in compared.failed]
    return (
        "<h1>lfm2np compare: what quantising costs</h1>\n"
        f"<p>Both sides are computed in exact arithmetic: whatever differs here comes from the weights.</p>\n"
        f"{bullets(lines)}<p>Digest of all figures: <code>{compared.digest}</code></p>\n"
    )


def figures(compared: Compared) -> str:
    rows = [list(map(foreign, row)) for row in main_rows(compared)]
    return table("Each quantised checkpoint against the base", HEADER, {"": rows})


def by_part(compared: Compared) -> str:
    found = drawn(compared)
    for title, header, rows in tables(compared):
        found.append(table(title, list(map(foreign, header)), {"": [list(map(foreign, row)) for row in rows]}))
    return "".join(found)


def drawn(compared: Compared) -> list[str]:
    """How the residual stream drifts, and what each layer alone costs, if that was asked for."""
    legends = [html.escape(visible(one.files.path.stem[-MOST_NAME:])) for one in compared.quantised]
    asked = [("layers", "error", "Relative RMS difference of the residual stream")]
    asked += [("parts", "kl", "Mean KL of one layer alone quantised")] if compared.by == "layer" else []
    found = []
    for rows, value, title in asked:
        values = [[row[value] for row in own[rows]] for own in compared.figures]
        places = max(([row["name"] for row in own[rows]] for own in compared.figures), key=len)
        found.append(layer_figure(rows, title, places, list(zip(legends, values, strict=True))))
    return found


def flips(compared: Compared) -> str:
    header = ("sequence", "row", "base's token", "quantised", "margin, nats", "KL, nats", "near tie")
    found = []
    for name, own in zip(names(compared), compared.figures, strict=True):
        rows = [
            [
                foreign(f"{one['source']} {one['name']}"),
                one["row"],
                one["base_token_id"],
                one["token_id"],
                number(one["margin"]),
                number(one["kl"]),
                "yes" if one["near_tie"] else "no",
            ]
            for one in own["listed_flips"][:MOST_ROWS]
        ]
        count = plural(own["flips"]["count"], "flip")
        title = f"{foreign(name)}: {count}, the widest margins first"
        found.append(details(title, table("Other greedy tokens", header, {"": rows})) if rows else f"<p>{title}</p>\n")
    return "".join(found)


def weights(compared: Compared) -> str:
    header = ("tensor", "base", "quantised", "weights", "relative RMS error")
    found = []
    for name, own in zip(names(compared), compared.figures, strict=True):
        rows = [
            [foreign(one["name"]), one["base_type"], one["type"], f"{one['weights']:,}", number(one["error"])]
            for one in own["tensors"]
        ]
        found.append(details(foreign(name), table("Errors of the weights, by tensor", header, {"": rows}, (0, 1, 2))))
    return "".join(found)


def again(compared: Compared, command: str) -> str:
    rows = [[foreign(name), foreign(value)] for name, value in environment().items()]
    rows += [["base, SHA-256", compared.base.sha256]]
    rows += [[foreign(one.files.path.name), one.sha256] for one in compared.quantised]
    shown = f"<p>The command:</p>\n<pre><code>{foreign(command, COMMAND)}</code></pre>\n" if command else ""
    return table("Versions and checkpoints", ("what", "version"), {"": rows}, (0, 1)) + shown
