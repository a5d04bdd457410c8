"""Figures as SVG: lines, steps and dots on linear or logarithmic axes with round ticks.

What a line or a group of dots is is said by colour, by dashes and by the shape of the dots. `svg` is a figure for a
report's page; `document` is one for a file of its own, in light or dark as its reader prefers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

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
class Line:
    """`steps`: a value holds until the next. Else points are joined, and each is a dot."""

    name: str
    points: Sequence[Point]
    steps: bool = False


@dataclass(frozen=True)
class Dots:
    """Single points. `look` is a number of MARKS."""

    name: str
    points: Sequence[Point]
    look: int = 0
    hollow: bool = False


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


@dataclass(frozen=True)
class Scale:
    """From values to places: the first tick stands at `start`, the last at `stop`; what is beyond stands there too."""

    ticks: Sequence[float]
    start: float
    stop: float
    is_log: bool

    def __call__(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        at = min(max(value, low), high)
        if self.is_log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.start + (self.stop - self.start) * ((at - low) / (high - low))


def scale_of(axis: Axis, values: Iterable[float], start: float, stop: float) -> Scale:
    """Holds all values: a linear one from 0 on; on a logarithmic one those that are not above 0 stand at its begin."""
    if axis.is_log:
        ticks = axis.ticks or log_ticks([value for value in values if value > 0] or [1.0])
    else:
        ticks = axis.ticks or linear_ticks([0.0, *values])
    return Scale(ticks, start, stop, axis.is_log)


def linear_ticks(values: Sequence[float]) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten; the first is at most the least value, the last at least the largest."""
    low, high = min(values), max(values)
    if high - low < SMALLEST:
        high = low + 1.0
    decade = math.floor(math.log10((high - low) / 5.0))
    step = next(size for size in (float(f"{k}e{decade}") for k in (1, 2, 5, 10, 20)) if (high - low) / size <= 6.0)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{count * step:.12g}") for count in range(first, last + 1)]  # without what rounding adds to 3 * 0.1


def log_ticks(values: Sequence[float]) -> list[float]:
    """Of 1, 2, 5, 10, ... those around the values, at least two; of many powers of ten only, in the end every so many."""
    low, high = min(values), max(values)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = [float(f"{factor}e{decade}") for decade in range(first - 1, last + 1) for factor in (1, 2, 5)]
    steps = [step for step in [*steps, float(f"1e{last + 1}")] if 0.0 < step < math.inf]
    begin = max((index for index, step in enumerate(steps) if step <= low), default=0)
    end = min((index for index, step in enumerate(steps) if step >= high), default=len(steps) - 1)
    if end - begin < 7:
        return steps[begin : end + 1] if end > begin else steps[max(0, begin - 1) : begin + 2]
    every = 1 + (last - first - 1) // 6
    return [float(f"1e{decade}") for decade in range(first, last + every, every) if float(f"1e{decade}") < math.inf]


# --- figures


def line_chart(
    name: str,
    title: str,
    about: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    levels: Sequence[tuple[float, str]] = (),
) -> Drawing:
    """The first MOST_LINES lines; levels are horizontal, with their words."""
    looks = [Dots(line.name, line.points, look) for look, line in enumerate(lines[:MOST_LINES])]
    curves = [line.steps for line in lines[:MOST_LINES]]
    return chart(name, title, about, looks, x, y, levels, curves)


def scatter_chart(
    name: str,
    title: str,
    about: str,
    groups: Sequence[Dots],
    x: Axis,
    y: Axis,
    levels: Sequence[tuple[float, str]] = (),
) -> Drawing:
    """The first group is on top. Of dots of one group that can't be told apart, all but the first are left out."""
    return chart(name, title, about, [group for group in groups if group.points], x, y, levels)


def chart(
    name: str,
    title: str,
    about: str,
    groups: Sequence[Dots],
    x: Axis,
    y: Axis,
    levels: Sequence[tuple[float, str]],
    curves: Sequence[bool] = (),
) -> Drawing:
    """`curves`: the groups are lines, of steps or not."""
    top, legends = legend(groups if not curves or len(groups) > 1 else [], bool(curves))
    xs, ys = ([float(point[place]) for group in groups for point in group.points] for place in (0, 1))
    across = scale_of(x, xs, LEFT, RIGHT)
    up = scale_of(y, [*ys, *(level for level, _ in levels)], top + PLOT, top)
    parts = [axes(x, y, across, up), legends]
    for value, words in levels:
        parts.append(path("level", f"M{LEFT:g} {up(value):.1f}H{RIGHT:g}"))
        parts.append(label(RIGHT, up(value) - 4, shortened(words), "end"))
    for index, group in reversed(list(enumerate(groups))):
        points = [(across(x), up(y)) for x, y in group.points]
        if curves and points:
            parts.append(path(f"curve s{group.look}", steps_path(points) if curves[index] else joined_path(points)))
        if not curves or not (curves[index] or len(points) > MOST_DOTS):
            parts.append(dots(group, points))
    return Drawing(name, visible(title, 4000), visible(about, 4000), up.start + BELOW, joined(*parts))


def axes(x: Axis, y: Axis, across: Scale, up: Scale) -> Markup:
    bottom, top = up.start, up.stop
    parts: list[Markup] = []
    free = -math.inf
    for tick in up.ticks:
        parts.append(path("grid", f"M{LEFT:g} {up(tick):.1f}H{RIGHT:g}"))
        parts.append(label(LEFT - 6, up(tick) + 4, y.words(tick), "end"))
    for tick in across.ticks:
        at, words = across(tick), x.words(tick)
        parts.append(path("axis", f"M{at:.1f} {bottom:g}v4"))
        half = len(words) * CHARACTER / 2 + 2
        if at - half >= free:
            free = at + half + CHARACTER
            parts.append(label(min(at, WIDTH - half), bottom + 17, words, "middle"))
    parts.append(path("axis", f"M{LEFT:g} {top:g}V{bottom:g}H{RIGHT:g}"))
    parts.append(label((LEFT + RIGHT) / 2, bottom + 35, shortened(x.title, 60), "middle"))
    parts.append(label(4, 13, shortened(y.title, 60), "start"))
    return joined(*parts)


def legend(groups: Sequence[Dots], are_lines: bool) -> tuple[float, Markup]:
    """Where the plot begins, and the legend above it: in columns, as many as there is room for."""
    names = [shortened(group.name) for group in groups]
    width = 46.0 + CHARACTER * max(map(len, names), default=0)
    columns = max(1, min(len(names), int(WIDTH // width)))
    parts = []
    for index, (group, name) in enumerate(zip(groups, names, strict=True)):
        x, y = 4 + width * (index % columns), TITLE + ROW * (index // columns) + 5
        parts += [path(f"curve s{group.look}", f"M{x:.1f} {y:.1f}h24")] if are_lines else []
        parts += [dots(group, [(x + 12, y)]), label(x + 29, y + 4, name, "start")]
    rows = -(-len(names) // columns)
    return TITLE + ROW * rows + (6 if rows else 0), joined(*parts)


def dots(group: Dots, points: Iterable[Point]) -> Markup:
    """The first in each cell."""
    first: dict[Point, Point] = {}
    for x, y in points:
        first.setdefault((x // CELL, y // CELL), (x, y))
    drawn = "".join(f"M{x:.1f} {y:.1f}{MARKS[group.look % len(MARKS)]}" for x, y in first.values())
    return path(f"dots s{group.look % len(MARKS)}{' hollow' if group.hollow else ''}", drawn)


def joined_path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def steps_path(points: Sequence[Point]) -> str:
    """Along each value until the next."""
    (x, y), *others = points
    return f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in others)


def path(look: str, d: str) -> Markup:
    return element("path", class_=look, d=d)


def label(x: float, y: float, words: str, anchor: str) -> Markup:
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def shortened(text: str, most: int = MOST_NAME) -> str:
    shown = visible(text, 1000)
    return shown if len(shown) <= most else shown[: most - 3] + "..."
