"""Figures as SVG: lines and steps over an axis, and scattered dots, on linear or logarithmic axes with round ticks.

What lines are is said by colour, by dashes and by the shape of their dots. `svg` is a figure for a report's page;
`document` is one for a file of its own, in light or dark as its reader prefers.
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
TITLE, ROW, PLOT, BELOW = 24.0, 17.0, 190.0, 42.0  # heights: title of an axis, row of the legend, plot, what is below
TALL = 280.0  # a plot of dots, which have labels
CHARACTER = 7.2  # width of one, about
APART = CHARACTER  # between labels: two numbers side by side read as one
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
NARROWEST = 0.1  # range of a linear axis, by its largest value: its ticks differ within three digits
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
    """Single points, each with its label ("": none). `look` is a number of MARKS."""

    name: str
    points: Sequence[tuple[float, float, str]]
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
    named = {"id": f"{drawing.name}-title"}, {"id": f"{drawing.name}-about"}
    return element(
        "svg",
        element("title", drawing.title, **named[0]),
        element("desc", drawing.about, **named[1]),
        *before,
        drawing.shapes,
        **more,
        class_="chart",
        viewBox=f"0 0 {WIDTH:g} {drawing.height:g}",
        role="img",
        aria_labelledby=" ".join(each["id"] for each in named),
    )


def document(drawing: Drawing) -> str:
    """A whole file."""
    style = element("style", Markup(f"\n{COLOURS.strip()}\n{STYLE}"))
    ground = element("rect", class_="ground", width=f"{WIDTH:g}", height=f"{drawing.height:g}", rx="6")
    width, height = f"{1.5 * WIDTH:g}", f"{1.5 * drawing.height:g}"
    return svg(drawing, style, ground, xmlns="http://www.w3.org/2000/svg", width=width, height=height)


def path(look: str, d: str) -> Markup:
    return element("path", class_=look, d=d)


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


@dataclass(frozen=True)
class Axis:
    """`ticks`: several, in order, from the least value to the largest; else round numbers. `from_zero`: if linear."""

    title: str
    is_log: bool = False
    words: Callable[[float], str] = tick_words
    ticks: Sequence[float] = ()
    from_zero: bool = True


@dataclass(frozen=True)
class Scale:
    """From values to places: `low` stands at `start`, `high` at `stop`; what is beyond them stands there too."""

    low: float
    high: float
    start: float
    stop: float
    ticks: Sequence[float]
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.start + (self.stop - self.start) * ((at - low) / (high - low))


def scale_of(axis: Axis, values: Iterable[float], start: float, stop: float) -> Scale:
    """Holds all values; on a logarithmic axis those that are not above 0 stand at its begin."""
    if axis.ticks:
        return Scale(axis.ticks[0], axis.ticks[-1], start, stop, axis.ticks, axis.is_log)
    shown = list(values)
    if axis.is_log:
        ticks = log_ticks([value for value in shown if value > 0] or [1.0])
    else:
        shown += [0.0] if axis.from_zero or not shown else []
        ticks = linear_ticks(min(shown), max(shown))
    return Scale(ticks[0], ticks[-1], start, stop, thinned(ticks, axis.is_log), axis.is_log)


def linear_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten; the first is at most `low`, the last at least `high`."""
    missing = NARROWEST * max(-low, high) - (high - low)
    if missing > 0:
        low, high = low - missing / 2, high + missing / 2
    if high - low < SMALLEST:
        low, high = 0.0, 1.0
    decade = math.floor(math.log10((high - low) / 5.0))
    step = next(size for size in (step_of(k, decade) for k in (1, 2, 5, 10, 20)) if (high - low) / size <= 6.0)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{count * step:.12g}") for count in range(first, last + 1)]  # without what rounding adds to 3 * 0.1


def step_of(factor: int, decade: int) -> float:
    return float(f"{factor}e{decade}")


def log_ticks(values: Sequence[float]) -> list[float]:
    """All of 1, 2, 5, 10, ... from the last that is at most the smallest value to the first at least the largest."""
    low, high = min(values), max(values)
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    steps = [step_of(factor, decade) for decade in range(first, last + 1) for factor in (1, 2, 5)]
    steps = [step for step in steps if 0.0 < step < math.inf]
    begin = max((index for index, step in enumerate(steps) if step <= low), default=0)
    end = min((index for index, step in enumerate(steps) if step >= high), default=len(steps) - 1)
    if begin == end:
        begin, end = max(0, begin - 1), min(len(steps) - 1, end + 1)
    return steps[begin : end + 1]


def thinned(ticks: Sequence[float], is_log: bool) -> list[float]:
    """Where a logarithmic axis is long: powers of ten only, in the end only every so many."""
    if not is_log or len(ticks) <= 7:
        return list(ticks)
    decades = [tick for tick in ticks if f"{tick:e}".startswith("1.0")]
    return decades[:: 1 + (len(decades) - 1) // 6]


def is_wide(values: Iterable[float], wide: float = WIDE) -> bool:
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) / min(positive) >= wide


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
    shown = lines[:MOST_LINES]
    xs, ys = ([point[place] for line in shown for point in line.points] for place in (0, 1))
    names = [line.name for line in shown] if len(shown) > 1 else []
    top, legends = legend(names, [has_dots(line) for line in shown])
    heights = [*ys, *(level for level, _ in levels)]
    across, up = scale_of(x, xs, LEFT, RIGHT), scale_of(y, heights, top + PLOT, top)
    parts = [axes(x, y, across, up), legends]
    for number, line in enumerate(shown):
        points = [(across(x), up(y)) for x, y in line.points]
        if points:
            curve = steps_path(points) if line.steps else "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(path(f"curve s{number}", curve))
        if has_dots(line):
            parts.append(dots(number, points))
    parts += [level_line(up(value), words, []) for value, words in levels]
    return drawing(name, title, about, up.start + BELOW, parts)


def scatter_chart(
    name: str,
    title: str,
    about: str,
    groups: Sequence[Dots],
    x: Axis,
    y: Axis,
    along: Sequence[Point] = (),
    levels: Sequence[tuple[float, str]] = (),
) -> Drawing:
    """The points `along` are joined by a line. A label that would cover a dot, or one of an earlier group, is left out;
    of dots of one group without labels that can't be told apart, all but the first.
    """
    shown = [group for group in groups if group.points]
    top, legends = legend([group.name for group in shown], [True] * len(shown), shown)
    xs, ys = ([point[place] for group in shown for point in group.points] for place in (0, 1))
    heights = [*map(float, ys), *(level for level, _ in levels)]
    across, up = scale_of(x, map(float, xs), LEFT, RIGHT), scale_of(y, heights, top + TALL, top)
    parts = [axes(x, y, across, up), legends]
    if along:
        curve = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in along)
        parts.append(path(f"curve s{shown[0].look}", f"M{curve}"))
    places = [apart((across(x), up(y), words) for x, y, words in group.points) for group in shown]
    everywhere = [place for group in places for place in group]
    boxes = [(x - 4, x + 4, y - 4, y + 4) for x, y, _ in everywhere]
    for value, words in levels:
        parts.append(level_line(up(value), words, boxes))
    parts += labels(everywhere, boxes)
    for group, points in reversed(list(zip(shown, places, strict=True))):  # the first is on top
        parts.append(dots(group.look, [(x, y) for x, y, _ in points], group.hollow))
    return drawing(name, title, about, up.start + BELOW, parts)


def apart(places: Iterable[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Those with labels, and of the others the first in each cell."""
    first: dict[tuple[float, float, str], tuple[float, float, str]] = {}
    for x, y, words in places:
        first.setdefault((x, y, words) if words else (x // CELL, y // CELL, words), (x, y, words))
    return list(first.values())


def drawing(name: str, title: str, about: str, height: float, parts: Sequence[Markup]) -> Drawing:
    return Drawing(name, visible(title, 4000), visible(about, 4000), height, joined(*parts))


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
    parts.append(label((LEFT + RIGHT) / 2, bottom + 35, words_of(x.title), "middle"))
    parts.append(label(4, 13, words_of(y.title), "start"))
    return joined(*parts)


def label(x: float, y: float, words: str, anchor: str) -> Markup:
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def words_of(text: str) -> str:
    return visible(text, 60)


def legend(names: Sequence[str], dotted: Sequence[bool], groups: Sequence[Dots] = ()) -> tuple[float, Markup]:
    """Where the plot begins, and the legend above it: in columns, as many as there is room for."""
    shown = [short(name) for name in names]
    width = 46.0 + CHARACTER * max(map(len, shown), default=0)
    columns = max(1, min(len(shown), int(WIDTH // width)))
    parts = []
    for index, name in enumerate(shown):
        x, y = 4 + width * (index % columns), TITLE + ROW * (index // columns) + 5
        if groups:
            parts.append(dots(groups[index].look, [(x + 12, y)], groups[index].hollow))
        else:
            parts.append(path(f"curve s{index}", f"M{x:.1f} {y:.1f}h24"))
            parts.append(dots(index, [(x + 12, y)]) if dotted[index] else Markup())
        parts.append(label(x + 29, y + 4, name, "start"))
    rows = -(-len(shown) // columns)
    return TITLE + ROW * rows + (6 if rows else 0), joined(*parts)


def short(name: str) -> str:
    shown = visible(name, 1000)
    return shown if len(shown) <= MOST_NAME else shown[: MOST_NAME - 3] + "..."


def has_dots(line: Line) -> bool:
    return not line.steps and len(line.points) <= MOST_DOTS


def dots(look: int, points: Sequence[Point], hollow: bool = False) -> Markup:
    drawn = "".join(f"M{x:.1f} {y:.1f}{MARKS[look % len(MARKS)]}" for x, y in points)
    return path(f"dots s{look % len(MARKS)}{' hollow' if hollow else ''}", drawn)


def steps_path(points: Sequence[Point]) -> str:
    """Along each value until the next."""
    (x, y), *others = points
    return f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in others)


Box = tuple[float, float, float, float]  # left, right, top, bottom


def box(left: float, base: float, words: str) -> Box:
    return left, left + len(words) * CHARACTER, base - 10, base + 1


def overlap(first: Box, second: Box) -> bool:
    return first[0] < second[1] and second[0] < first[1] and first[2] < second[3] and second[2] < first[3]


def level_line(y: float, words: str, taken: list[Box]) -> Markup:
    """Its words where nothing is, if there is such a place."""
    line = path("level", f"M{LEFT:g} {y:.1f}H{RIGHT:g}")
    right = RIGHT - len(words) * CHARACTER
    places = [(left, base) for base in (y - 4, y + 14) for left in (right, LEFT + 4)]
    left, base = next((place for place in places if is_free(box(*place, words), taken)), places[0])
    taken.append(box(left, base, words))
    at, anchor = (RIGHT, "end") if left == right else (left, "start")
    return joined(line, label(at, base, words_of(words), anchor))


def is_free(place: Box, taken: Sequence[Box]) -> bool:
    return place[0] >= 0 and place[1] <= WIDTH and not any(overlap(place, other) for other in taken)


def labels(places: Sequence[tuple[float, float, str]], taken: list[Box]) -> list[Markup]:
    """Beside their dots, where nothing is; adds their boxes to `taken`."""
    parts = []
    for x, y, words in places:
        width = len(words) * CHARACTER
        sides = ((x + 6, y + 4), (x - 6 - width, y + 4), (x - width / 2, y - 6), (x - width / 2, y + 16))
        corners = ((x + 4, y - 5), (x - 4 - width, y - 5), (x + 4, y + 14), (x - 4 - width, y + 14))
        for left, base in (*sides, *corners) if words else ():
            place = box(left, base, words)
            if is_free(place, taken):
                taken.append((place[0] - APART, place[1] + APART, *place[2:]))
                parts.append(label(left, base, words, "start"))
                break
    return parts
