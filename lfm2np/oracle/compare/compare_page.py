"""The figures of a comparison as one page for any browser: no script, no request, foreign text escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from lfm2np.oracle.compare.compare import Compared
from lfm2np.oracle.compare.comparison_report import HEADER, NOTES, main_rows, names, scored_words, tables
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.reports.figure import HEIGHT, SHAPES, WIDTH, label
from lfm2np.oracle.reports.page import bullets, details, foreign, page, table, versions
from lfm2np.oracle.reports.report_parts import environment, number, plural, visible

LEFT, RIGHT, TOP, BOTTOM = 62.0, 448.0, 58.0, 286.0  # of the plot
MOST_LABELS = 12  # under the axis
MOST_NAME = 16  # characters of a name in the legend: the last, which say the type
SERIES = (Verdict.EXACT, Verdict.DRIFT, Verdict.BUG, Verdict.TIE, Verdict.INCONCLUSIVE)
MARKS = (  # shapes around a centre, and their class in the page's style
    *((SHAPES[verdict], verdict.lower()) for verdict in SERIES),
    (SHAPES[Verdict.ROUTE], "exact"),
)
MOST_SERIES = len(MARKS)


def layer_figure(
    name: str, title: str, places: Sequence[str], series: Sequence[tuple[str, Sequence[float | None]]]
) -> str:
    """Values of each of `series` (escaped names) by place; 0 and None are not drawn. "" if none is left."""
    shown = series[:MOST_SERIES]
    sizes = [value for _, values in shown for value in values if value]
    if not sizes:
        return ""
    low, high = math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)))
    high = max(high, low + 1)

    def x(place: int) -> float:
        return LEFT + 12.0 + (RIGHT - LEFT - 24.0) * place / max(1, len(places) - 1)

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (math.log10(value) - low) / (high - low)

    parts = [f'<path class="axis" d="M{LEFT:g} {TOP:g}V{BOTTOM:g}H{RIGHT:g}"/>\n']
    for decade in range(low, high + 1, 1 + (high - low) // 8):
        parts.append(label(LEFT - 6, y(10.0**decade) + 4, f"1e{decade}", "end"))
    every = 1 + (len(places) - 1) // MOST_LABELS
    for place in range(0, len(places), every):
        parts.append(label(x(place), BOTTOM + 17, short(places[place]), "middle"))
    for series_number, (legend, values) in enumerate(shown):
        shape, colour = MARKS[series_number]
        points = [(x(place), y(value)) for place, value in enumerate(values) if value]
        at = LEFT + 128.0 * (series_number % 3), 14.0 + 18.0 * (series_number // 3)
        drawn = "".join(f"M{left:.1f} {top:.1f}{shape}" for left, top in [at, *points])
        parts += [f'<path class="mark {colour}" d="{drawn}"/>\n', label(at[0] + 9, at[1] + 4, legend, "start")]
    more = f" The first {MOST_SERIES} of {len(series)} checkpoints." if len(series) > MOST_SERIES else ""
    about = f'<desc id="{name}-about">By layer, on a log scale; the numbers stand in the table below.</desc>'
    return (
        f'<figure>\n<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-labelledby="{name}-title {name}-about">\n'
        f'<title id="{name}-title">{title}</title>\n{about}\n{"".join(parts)}</svg>\n'
        f'<figcaption class="note">{title}, log scale.{more}</figcaption>\n</figure>\n'
    )


def short(place: str) -> str:
    """Under the axis: a layer's number, or the first letters of what is none."""
    return place.removeprefix("layer ") if place.startswith("layer ") else place[:5].rstrip()


MOST_ROWS = 100


def as_html(compared: Compared, command: str) -> str:
    sections = [
        ("figures", "Figures", figures(compared)),
        ("parts", "Where it comes from", by_part(compared)),
        ("flips", "Flips", flips(compared)),
        ("weights", "Errors of the weights", weights(compared)),
        ("again", "Versions and command", again(compared, command)),
    ]
    footer = "".join(f'<p class="note">{note}</p>\n' for note in NOTES)
    return page(f"lfm2np compare: {compared.base.path.name}", head(compared), sections, footer)


def head(compared: Compared) -> str:
    lines = [f"Base: {foreign(str(compared.base.path))}", f"Scored: {foreign(scored_words(compared))}"]
    lines += [f"Not computed: {foreign(failure)}" for failure in compared.failed]
    return (
        "<h1>lfm2np compare: what quantising costs</h1>\n"
        f"<p>Both sides are computed in exact arithmetic: whatever differs here comes from the weights.</p>\n"
        f"{bullets(lines)}<p>Digest of all figures: <code>{compared.digest}</code></p>\n"
    )


def figures(compared: Compared) -> str:
    rows = [list(map(foreign, row)) for row in main_rows(compared)]
    return table("Each quantised checkpoint against the base", HEADER, {"": rows})


def by_part(compared: Compared) -> str:
    blocks = drawn(compared)
    for title, header, rows in tables(compared):
        blocks.append(table(title, list(map(foreign, header)), {"": [list(map(foreign, row)) for row in rows]}))
    return "".join(blocks)


def drawn(compared: Compared) -> list[str]:
    """How the residual stream drifts, and the cost of each layer alone, if that was requested."""
    legends = [html.escape(visible(checkpoint.files.path.stem[-MOST_NAME:])) for checkpoint in compared.quantised]
    asked = [("layers", "error", "Relative RMS difference of the residual stream")]
    asked += [("parts", "kl", "Mean KL of one layer alone quantised")] if compared.by == "layer" else []
    figures = []
    for rows, value, title in asked:
        values = [[row[value] for row in figures[rows]] for figures in compared.figures]
        places = max(([row["name"] for row in figures[rows]] for figures in compared.figures), key=len)
        figures.append(layer_figure(rows, title, places, list(zip(legends, values, strict=True))))
    return figures


def flips(compared: Compared) -> str:
    header = ("sequence", "row", "base's token", "quantised", "margin, nats", "KL, nats", "near tie")
    blocks = []
    for name, figures in zip(names(compared), compared.figures, strict=True):
        rows = [
            [
                foreign(f"{entry['source']} {entry['name']}"),
                entry["row"],
                entry["base_token_id"],
                entry["token_id"],
                number(entry["margin"]),
                number(entry["kl"]),
                "yes" if entry["near_tie"] else "no",
            ]
            for entry in figures["listed_flips"][:MOST_ROWS]
        ]
        count = plural(figures["flips"]["count"], "flip")
        title = f"{foreign(name)}: {count}, the widest margins first"
        blocks.append(details(title, table("Other greedy tokens", header, {"": rows})) if rows else f"<p>{title}</p>\n")
    return "".join(blocks)


def weights(compared: Compared) -> str:
    header = ("tensor", "base", "quantised", "weights", "relative RMS error")
    blocks = []
    for name, figures in zip(names(compared), compared.figures, strict=True):
        rows = [
            [foreign(entry["name"]), entry["base_type"], entry["type"], f"{entry['weights']:,}", number(entry["error"])]
            for entry in figures["tensors"]
        ]
        blocks.append(details(foreign(name), table("Errors of the weights, by tensor", header, {"": rows}, (0, 1, 2))))
    return "".join(blocks)


def again(compared: Compared, command: str) -> str:
    facts = [*environment().items(), ("base, SHA-256", compared.base.sha256)]
    facts += [(checkpoint.files.path.name, checkpoint.sha256) for checkpoint in compared.quantised]
    return versions("Versions and checkpoints", facts, command)
