"""Error by position as SVG: one mark per judged log-probability, its size in units of the noise on a log scale.

The marks of one verdict are one path, so a page with thousands of them stays small. With very many positions those of
one verdict in one cell of a grid share a mark, at the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict

MOST_MARKS = 2000  # more positions are grouped into cells
CELL = 6.0  # units of the drawing, whose marks are as large
WIDTH, HEIGHT = 460.0, 330.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 448.0, 34.0, 286.0  # of the plot
FLOOR = -2  # decade: errors below 0.01 of the noise are drawn there
HIGHEST = 15  # decade
Point = tuple[float, float]

SHAPES: dict[Verdict, str] = {
    # Relative to a centre. In this order, so that what is wrong is on top.
    Verdict.EXACT: "m-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0z",  # circle
    Verdict.ROUTE: "m-2.5 0a2.5 2.5 0 0 1 5 0z",  # half a circle
    Verdict.TIE: "m0-4.5l4.5 4.5l-4.5 4.5l-4.5-4.5z",  # diamond
    Verdict.INCONCLUSIVE: "m-3-3h6v6h-6z",  # square
    Verdict.DRIFT: "m0-4.5l4.5 8h-9z",  # triangle
    Verdict.BUG: "m-3.5-3.5l7 7m0-7l-7 7",  # cross
}


@dataclass(frozen=True)
class Scale:
    """From a row and an error to a place in the drawing."""

    last_row: int
    top_decade: int

    def x(self, row: int) -> float:
        return LEFT + 8.0 + (RIGHT - LEFT - 16.0) * math.log2(row + 1) / max(1.0, math.log2(self.last_row + 1))

    def y(self, size: float) -> float:
        decade = HIGHEST if math.isnan(size) or size == math.inf else math.log10(max(size, 1e-300))
        share = (min(max(decade, FLOOR), self.top_decade) - FLOOR) / (self.top_decade - FLOOR)
        return BOTTOM - (BOTTOM - TOP) * share


def error_figure(positions: Sequence[Position], summary: str) -> tuple[str, int]:
    """The drawing, described by `summary` (HTML already escaped), and how many marks it has."""
    reported = [position for position in positions if position.error_ratio is not None]
    scale = scale_of(reported)
    marks = marks_of(reported, scale)
    drawn = "".join(path_of(verdict, marks[verdict]) for verdict in SHAPES if verdict in marks)
    text = (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-labelledby="figure-title figure-summary">\n'
        '<title id="figure-title">Error of log-probabilities by position</title>\n'
        f'<desc id="figure-summary">{summary}</desc>\n'
        f"{axes(scale)}{legend([verdict for verdict in SHAPES if verdict in marks])}{drawn}{lines(scale)}</svg>\n"
    )
    return text, sum(map(len, marks.values()))


def scale_of(reported: Sequence[Position]) -> Scale:
    sizes = [abs(position.error_ratio or 0.0) for position in reported]
    largest = math.ceil(math.log10(max(filter(math.isfinite, sizes), default=0.0) or 1.0))
    return Scale(max((position.row for position in reported), default=0), min(HIGHEST, max(2, largest)))


def marks_of(reported: Sequence[Position], scale: Scale) -> Mapping[Verdict, list[Point]]:
    """Places of marks, by verdict, from left to right and from top to bottom."""
    marks: dict[Verdict, dict[Point, Point]] = {}  # by cell
    for position in reported:
        x, y = round(scale.x(position.row), 1), round(scale.y(abs(position.error_ratio or 0.0)), 1)
        cell = (x, y) if len(reported) <= MOST_MARKS else (x // CELL, y // CELL)
        marks.setdefault(position.verdict, {}).setdefault(cell, (x, y))
    return {verdict: sorted(cells.values()) for verdict, cells in marks.items()}


def path_of(verdict: Verdict, points: Sequence[Point]) -> str:
    drawn = "".join(f"M{x:g} {y:g}{SHAPES[verdict]}" for x, y in points)
    return f'<path class="mark {verdict.lower()}" d="{drawn}"/>\n'


def axes(scale: Scale) -> str:
    """Both axes, with their numbers."""
    parts = [f'<path class="axis" d="M{LEFT:g} {TOP:g}V{BOTTOM:g}H{RIGHT:g}"/>\n']
    every = 1 + (scale.top_decade - FLOOR) // 8
    for decade in range(0, scale.top_decade + 1, every):
        parts.append(label(LEFT - 6, scale.y(10.0**decade) + 4, power(decade), "end"))
    parts.append(label(LEFT - 6, BOTTOM + 4, "≤ 0.01", "end"))
    for row in (0, *(2**k for k in range(18))):
        if row <= scale.last_row:
            x = scale.x(row)
            parts.append(f'<path class="axis" d="M{x:.1f} {BOTTOM:g}v4"/>{label(x, BOTTOM + 17, str(row), "middle")}')
    parts.append(label((LEFT + RIGHT) / 2, HEIGHT - 6, "row (row t predicts token t + 1)", "middle"))
    return "".join(parts)


def lines(scale: Scale) -> str:
    """At the noise and at the limit, on top of the marks."""
    parts = []
    for value, words, name in ((1.0, "1: the noise", "noise"), (LIMIT, f"{LIMIT:g}: the limit", "limit")):
        y = scale.y(value)
        parts.append(f'<path class="line {name}" d="M{LEFT:g} {y:.1f}H{RIGHT:g}"/>\n')
        parts.append(label(RIGHT, y - 4, words, "end"))
    return "".join(parts)


def power(decade: int) -> str:
    return f"{10**decade:,}" if decade < 4 else f"1e{decade}"


def legend(verdicts: Sequence[Verdict]) -> str:
    parts = []
    for index, verdict in enumerate(verdicts):
        x = LEFT + 8 + 82 * index
        parts.append(f"{path_of(verdict, [(x, 14.0)])}{label(x + 9, 18, str(verdict), 'start')}")
    return "".join(parts)


def label(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>\n'
