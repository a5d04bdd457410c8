"""Figures as SVG: lines, steps and dots on linear or logarithmic axes with round ticks.

What a line or a group of dots is is said by colour, by dashes and by the shape of the dots. `svg` is a figure for a
report's page; `document` is one for a file of its own, in light or dark as its reader prefers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from lfm2np.oracle.report.as_text import visible
from lfm2np.oracle.report.markup import Markup, element, joined

FOLDER = resources.files("lfm2np.oracle.report")
STYLE, PAGE_STYLE = ((FOLDER / f"{name}.css").read_text(encoding="utf-8") for name in ("charts", "report"))
COLOURS = PAGE_STYLE[: PAGE_STYLE.index("*")]  # of a page, light and dark: its style begins with them
WIDTH, LEFT, RIGHT = 400.0, 60.0, 384.0  # of the drawing, and where its plot is
TITLE, ROW, PLOT, BELOW = 24.0, 17.0, 220.0, 42.0  # heights: title of an axis, row of the legend, plot, what is below
CHARACTER = 7.2  # width of one, about
MOST_NAME = 42  # characters in a legend
MARKS = (  # around a centre
    "m-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0z",  # circle
    "m0-4.5l4.5 4.5l-4.5 4.5l-4.5-4.5z",  # diamond
    "m-3-3h6v6h-6z",  # square
    "m0-4.5l4.5 8h-9z",  # triangle
    "m-3.5-3.5l7 7m0-7l-7 7",  # cross
    "m-3.5 0h7m-3.5-3.5v7",  # plus
    "m0 4.5l4.5-8h-9z",  # triangle on its head
    "m-2.5 0a2.5 2.5 0 0 1 5 0z",  # half a circle
)
MOST_LINES = len(MARKS)
MOST_DOTS = 24  # of a line: one with more has none
CELL = 6.0  # width and height, about a mark's: dots of one group in one cell share one
WIDE = 8.0  # largest over smallest, from which on a logarithmic axis shows more than a linear one
SMALLEST = 1e-290  # range of an axis
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line, whose points are joined, and dots too if they are few; steps, whose value holds until the next; or dots.

    look  a number of MARKS
    """

    name: str
    points: Sequence[Point]
    look: int = 0
    kind: Literal["line", "steps", "dots"] = "dots"

    @property
    def has_dots(self) -> bool:
        return self.kind == "dots" or (self.kind == "line" and len(self.points) <= MOST_DOTS)


@dataclass(frozen=True)
class Drawing:
    """A figure: what it shows in words, and its shapes."""

    name: str  # that no other figure of the page has
    title: str
    about: str
    height: float
    shapes: Markup


def svg(drawing: Drawing, *before: object, **more: object) -> Markup:
    """`before`: what stands under its shapes; `more`: attributes."""
    return element(
        "svg",
        element("title", drawing.title, id=f"{drawing.name}-title"),
        element("desc", drawing.about, id=f"{drawing.name}-about"),
        *before,
        drawing.shapes,
        **more,
        class_="chart",
        viewBox=f"0 0 {WIDTH:g} {drawing.height:g}",
        role="img",
        aria_labelledby=f"{drawing.name}-title {drawing.name}-about",
    )


def document(drawing: Drawing) -> str:
    """A whole file."""
    style = element("style", Markup(f"\n{COLOURS.strip()}\n{STYLE}"))
    ground = element("rect", class_="ground", width=f"{WIDTH:g}", height=f"{drawing.height:g}", rx="6")
    width, height = f"{1.5 * WIDTH:g}", f"{1.5 * drawing.height:g}"
    return svg(drawing, style, ground, xmlns="http://www.w3.org/2000/svg", width=width, height=height)


# --- axes


def tick_words(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"


def seconds_words(value: float) -> str:
    """A round number of seconds, in a unit that keeps it short."""
    if value <= 0:
        return tick_words(value)
    for unit, size in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        if value < 999.5 * size:
            return f"{value / size:.3g} {unit}"
    return f"{tick_words(value)} s"


def is_wide(values: Iterable[float]) -> bool:
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) / min(positive) >= WIDE


@dataclass(frozen=True)
class Axis:
    """`ticks`: several, in order, from the least value to the largest; else round numbers."""

    title: str
    is_log: bool = False
    words: Callable[[float], str] = tick_words
    ticks: Sequence[float] = ()

    def ticks_of(self, values: Iterable[float]) -> Sequence[float]:
        """Around all values: a linear axis begins at 0, a logarithmic one has no room for what is not above 0."""
        if self.ticks:
            return self.ticks
        return log_ticks([value for value in values if value > 0] or [1.0]) if self.is_log else linear_ticks(values)

    def scale(self, ticks: Sequence[float], start: float, stop: float) -> Callable[[float], float]:
        """From values to places: the first tick stands at `start`, the last at `stop`, and so does what is beyond."""
        low, high = ticks[0], ticks[-1]
        turn = math.log10 if self.is_log else float
        return lambda value: (
            start + (stop - start) * (turn(min(max(value, low), high)) - turn(low)) / (turn(high) - turn(low))
        )


def linear_ticks(values: Iterable[float]) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from the last below all values to the first above."""
    shown = [0.0, *values]
    low, high = min(shown), max(shown)
    if high - low < SMALLEST:
        high = low + 1.0
    decade = math.floor(math.log10((high - low) / 5.0))
    step = next(size for size in (float(f"{k}e{decade}") for k in (1, 2, 5, 10, 20)) if (high - low) / size <= 6.0)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{count * step:.12g}") for count in range(first, last + 1)]  # without what rounding adds to 3 * 0.1


def log_ticks(values: Sequence[float]) -> list[float]:
    """Of 1, 2, 5, 10, ... those around the values, at least two; where they are many, powers of ten only."""
    low, high = min(values), max(values)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = 1 + (last - first - 1) // 6
    if last - first > 2:
        return [10.0 ** min(decade, 308) for decade in range(first, last + every, every)]
    steps = [float(f"{factor}e{decade}") for decade in range(first - 1, last + 1) for factor in (1, 2, 5)]
    below, above = [step for step in steps if step <= low], [step for step in [*steps, 10.0**last] if step >= high]
    ticks = [step for step in steps if below[-1] <= step <= above[0]]
    return ticks if len(ticks) > 1 else [*below[-2:-1], *ticks]


# --- figures


def chart(
    name: str,
    title: str,
    about: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    levels: Sequence[tuple[float, str]] = (),
) -> Drawing:
    """The first of the series is on top; levels are horizontal, with their words."""
    is_named = len(series) > 1 or any(each.kind == "dots" for each in series)
    top, legends = legend(series if is_named else [])
    xs, ys = ([point[place] for each in series for point in each.points] for place in (0, 1))
    columns, rows = x.ticks_of(xs), y.ticks_of([*ys, *(level for level, _ in levels)])
    bottom = top + PLOT
    across, up = x.scale(columns, LEFT, RIGHT), y.scale(rows, bottom, top)
    parts = [legends, path("axis", f"M{LEFT:g} {top:g}V{bottom:g}H{RIGHT:g}")]
    for tick in rows:
        parts.append(path("grid", f"M{LEFT:g} {up(tick):.1f}H{RIGHT:g}"))
        parts.append(label(LEFT - 6, up(tick) + 4, y.words(tick), "end"))
    free = -math.inf
    for tick in columns:
        at, words = across(tick), x.words(tick)
        parts.append(path("axis", f"M{at:.1f} {bottom:g}v4"))
        half = len(words) * CHARACTER / 2 + 2
        if at - half >= free:
            free = at + half + CHARACTER
            parts.append(label(min(at, WIDTH - half), bottom + 17, words, "middle"))
    parts.append(label((LEFT + RIGHT) / 2, bottom + 35, shortened(x.title, 60), "middle"))
    parts.append(label(4, 13, shortened(y.title, 60), "start"))
    for value, words in levels:
        parts.append(path("level", f"M{LEFT:g} {up(value):.1f}H{RIGHT:g}"))
        parts.append(label(RIGHT, up(value) - 4, shortened(words), "end"))
    for each in reversed(series):
        parts += shapes(each, [(across(x), up(y)) for x, y in each.points])
    return Drawing(name, visible(title, 4000), visible(about, 4000), bottom + BELOW, joined(*parts))


def legend(series: Sequence[Series]) -> tuple[float, Markup]:
    """Where the plot begins, and the legend above it: in columns, as many as there is room for."""
    names = [shortened(each.name) for each in series]
    width = 46.0 + CHARACTER * max(map(len, names), default=0)
    columns = max(1, min(len(names), int(WIDTH // width)))
    parts = []
    for index, (each, name) in enumerate(zip(series, names, strict=True)):
        x, y = 4 + width * (index % columns), TITLE + ROW * (index // columns) + 5
        parts += [path(f"curve s{each.look}", f"M{x:.1f} {y:.1f}h24")] if each.kind != "dots" else []
        parts += [dots(each.look, [(x + 12, y)])] if each.has_dots else []
        parts.append(label(x + 29, y + 4, name, "start"))
    rows = -(-len(names) // columns)
    return TITLE + ROW * rows + (6 if rows else 0), joined(*parts)


def shapes(series: Series, points: Sequence[Point]) -> list[Markup]:
    """Those of one series, whose points are places by now."""
    if not points:
        return []
    (x, y), *others = points
    then = "H{:.1f}V{:.1f}" if series.kind == "steps" else "L{:.1f} {:.1f}"
    curve = f"M{x:.1f} {y:.1f}" + "".join(then.format(*point) for point in others)
    lines = [path(f"curve s{series.look}", curve)] if series.kind != "dots" else []
    return [*lines, *([dots(series.look, points)] if series.has_dots else [])]


def dots(look: int, points: Iterable[Point]) -> Markup:
    """The first in each cell."""
    first: dict[Point, Point] = {}
    for x, y in points:
        first.setdefault((x // CELL, y // CELL), (x, y))
    return path(f"dots s{look}", "".join(f"M{x:.1f} {y:.1f}{MARKS[look]}" for x, y in first.values()))


def path(look: str, d: str) -> Markup:
    return element("path", class_=look, d=d)


def label(x: float, y: float, words: str, anchor: str) -> Markup:
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def shortened(text: str, most: int = MOST_NAME) -> str:
    shown = visible(text, 1000)
    return shown if len(shown) <= most else shown[: most - 3] + "..."
