"""A figure by layer as SVG: one mark per value on a log scale, one shape per checkpoint; a table has the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.reports.figure import HEIGHT, SHAPES, WIDTH, label

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
    for number, (legend, values) in enumerate(shown):
        shape, colour = MARKS[number]
        points = [(x(place), y(value)) for place, value in enumerate(values) if value]
        at = LEFT + 128.0 * (number % 3), 14.0 + 18.0 * (number // 3)
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
