"""Figures as SVG: lines and steps over an axis, and scattered dots, on linear or logarithmic axes with round ticks.

What lines are is said by colour, by dashes and by the shape of their dots. `svg` is a figure for a page whose style has
STYLE; `document` is one for a file of its own, in light or dark as its reader prefers.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from lfm2np.oracle.reports.figure import SHAPES, label
from lfm2np.oracle.reports.page import STYLE as PAGE_STYLE
from lfm2np.oracle.reports.parts import visible

STYLE = (resources.files("lfm2np.simulate.page") / "curves.css").read_text(encoding="utf-8")
COLOURS = PAGE_STYLE[: PAGE_STYLE.index("*")]  # of a page, light and dark: its style begins with them
WIDTH, LEFT, RIGHT = 400.0, 56.0, 386.0  # of the drawing, and where its plot is
TITLE, ROW, PLOT, BELOW = (
    24.0,
    17.0,
    190.0,
    42.0,
)  # heights: of the axis' title, a row of the legend, the plot, the rest
CHARACTER = 6.9  # width of one, about
MOST_NAME = 46  # characters in a legend
MARKS = (*SHAPES.values(), "m-3.5 0h7m-3.5-3.5v7", "m0 4.5l4.5-8h-9z")  # around a centre
MOST_LINES = len(MARKS)
MOST_DOTS = 24  # of a line: one with more has none
WIDE = 8.0  # largest over smallest, from which on a logarithmic axis shows more than a linear one
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
    """A figure: what it shows in words, all escaped, and its shapes."""

    name: str  # that no other figure of the page has
    title: str
    about: str
    height: float
    shapes: str


def svg(drawing: Drawing) -> str:
    return element(drawing, "", drawing.shapes)


def document(drawing: Drawing) -> str:
    """A whole file."""
    style = f"<style>\n{COLOURS.strip()}\n{STYLE}</style>\n"
    ground = f'<rect class="ground" width="{WIDTH:g}" height="{drawing.height:g}" rx="6"/>\n'
    size = f'xmlns="http://www.w3.org/2000/svg" width="{1.5 * WIDTH:g}" height="{1.5 * drawing.height:g}" '
    return element(drawing, size, style + ground + drawing.shapes)


def element(drawing: Drawing, more: str, content: str) -> str:
    name = drawing.name
    return (
        f'<svg {more}class="chart" viewBox="0 0 {WIDTH:g} {drawing.height:g}" role="img" '
        f'aria-labelledby="{name}-title {name}-about">\n<title id="{name}-title">{drawing.title}</title>\n'
        f'<desc id="{name}-about">{drawing.about}</desc>\n{content}</svg>\n'
    )


# --- axes


def tick_words(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"


def seconds_words(value: float) -> str:
    """A round number of seconds, in a unit that keeps it short."""
    for unit, size in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        if value < 999.5 * size:
            return f"{value / size:.3g} {unit}"
    return f"{tick_words(value)} s"


def percent_words(share: float) -> str:
    return f"{100 * share:.3g} %"


@dataclass(frozen=True)
class Axis:
    """`ticks`: where; else at round numbers. `from_zero`: a linear one shows 0."""

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
    shown = [value for value in values if math.isfinite(value)]
    if axis.is_log:
        ticks = log_ticks([value for value in shown if value > 0] or [1.0])
    else:
        shown += [0.0] if axis.from_zero or not shown else []
        ticks = linear_ticks(min(shown), max(shown))
    return Scale(ticks[0], ticks[-1], start, stop, tuple(axis.ticks) or thinned(ticks, axis.is_log), axis.is_log)


def linear_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten; the first is at most `low`, the last at least `high`."""
    if not high - low > 1e-300:
        high = low + 1.0
    decade = math.floor(math.log10((high - low) / 5.0))
    step = next(size for size in (step_of(k, decade) for k in (1, 2, 5, 10, 20)) if (high - low) / size <= 6.0)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round_to(count, step) for count in range(first, last + 1)]


def step_of(factor: int, decade: int) -> float:
    return float(f"{factor}e{decade}")


def round_to(count: int, step: float) -> float:
    """Without what rounding adds to 3 * 0.1."""
    return float(f"{count * step:.12g}")


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
    shown = [Line(line.name, finite(line.points), line.steps) for line in lines[:MOST_LINES]]
    xs, ys = ([point[place] for line in shown for point in line.points] for place in (0, 1))
    names = [line.name for line in shown] if len(shown) > 1 else []
    top, legends = legend(names, [has_dots(line) for line in shown])
    across, up = scales(x, y, xs, [*ys, *(level for level, _ in levels)], top)
    parts = [axes(x, y, across, up), legends]
    for number, line in enumerate(shown):
        points = [(across(x), up(y)) for x, y in line.points]
        if points:
            path = steps_path(points) if line.steps else "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(f'<path class="curve s{number}" d="{path}"/>\n')
        if has_dots(line):
            parts.append(dots(number, points))
    parts += [level_line(up(value), words) for value, words in levels]
    return drawing(name, title, about, top, parts)


def scatter_chart(
    name: str,
    title: str,
    about: str,
    groups: Sequence[Dots],
    x: Axis,
    y: Axis,
    joined: Sequence[Point] = (),
    levels: Sequence[tuple[float, str]] = (),
) -> Drawing:
    """`joined` points are joined by a line. A label that would cover another is left out, a later group's first."""
    shown = [group for group in groups if group.points]
    top, legends = legend([group.name for group in shown], [True] * len(shown), shown)
    xs, ys = ([point[place] for group in shown for point in group.points] for place in (0, 1))
    across, up = scales(x, y, map(float, xs), [*map(float, ys), *(level for level, _ in levels)], top)
    parts = [axes(x, y, across, up), legends]
    parts += [level_line(up(value), words) for value, words in levels]
    if joined:
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in joined)
        parts.append(f'<path class="curve s{shown[0].look}" d="M{path}"/>\n')
    for group in reversed(shown):  # the first is on top
        parts.append(dots(group.look, [(across(x), up(y)) for x, y, _ in group.points], group.hollow))
    parts += labels([(across(x), up(y), words) for group in shown for x, y, words in group.points if words])
    return drawing(name, title, about, top, parts)


def drawing(name: str, title: str, about: str, top: float, parts: Sequence[str]) -> Drawing:
    shown = [html.escape(visible(text, 4000)) for text in (title, about)]
    return Drawing(name, shown[0], shown[1], top + PLOT + BELOW, "".join(parts))


def finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if all(map(math.isfinite, point))]


def scales(x: Axis, y: Axis, xs: Iterable[float], ys: Iterable[float], top: float) -> tuple[Scale, Scale]:
    return scale_of(x, xs, LEFT, RIGHT), scale_of(y, ys, top + PLOT, top)


def axes(x: Axis, y: Axis, across: Scale, up: Scale) -> str:
    bottom, top = up.start, up.stop
    parts, free = [], -math.inf
    for tick in up.ticks:
        parts.append(f'<path class="grid" d="M{LEFT:g} {up(tick):.1f}H{RIGHT:g}"/>\n')
        parts.append(label(LEFT - 6, up(tick) + 4, y.words(tick), "end"))
    for tick in across.ticks:
        at, words = across(tick), x.words(tick)
        parts.append(f'<path class="axis" d="M{at:.1f} {bottom:g}v4"/>\n')
        half = len(words) * CHARACTER / 2
        if at - half >= free:
            free = at + half + CHARACTER
            parts.append(label(min(at, WIDTH - half), bottom + 17, words, "middle"))
    parts.append(f'<path class="axis" d="M{LEFT:g} {top:g}V{bottom:g}H{RIGHT:g}"/>\n')
    parts.append(label((LEFT + RIGHT) / 2, bottom + 35, words_of(x.title), "middle"))
    parts.append(label(4, 13, words_of(y.title), "start"))
    return "".join(parts)


def words_of(text: str, most: int = 60) -> str:
    return html.escape(visible(text, most))


def legend(names: Sequence[str], dotted: Sequence[bool], groups: Sequence[Dots] = ()) -> tuple[float, str]:
    """Where the plot begins, and the legend above it: in columns, as many as there is room for."""
    shown = [short(name) for name in names]
    width = 46.0 + CHARACTER * max(map(len, shown), default=0)
    columns = max(1, min(len(shown), int((WIDTH - 8) // width)))
    parts = []
    for index, name in enumerate(shown):
        x, y = 4 + width * (index % columns), TITLE + ROW * (index // columns) + 5
        if groups:
            parts.append(dots(groups[index].look, [(x + 12, y)], groups[index].hollow))
        else:
            parts.append(f'<path class="curve s{index}" d="M{x:.1f} {y:.1f}h24"/>\n')
            parts.append(dots(index, [(x + 12, y)]) if dotted[index] else "")
        parts.append(label(x + 29, y + 4, html.escape(name), "start"))
    rows = -(-len(shown) // columns)
    return TITLE + ROW * rows + (6 if rows else 0), "".join(parts)


def short(name: str) -> str:
    shown = visible(name, 1000)
    return shown if len(shown) <= MOST_NAME else shown[: MOST_NAME - 3] + "..."


def has_dots(line: Line) -> bool:
    return not line.steps and len(line.points) <= MOST_DOTS


def dots(look: int, points: Sequence[Point], hollow: bool = False) -> str:
    drawn = "".join(f"M{x:.1f} {y:.1f}{MARKS[look % len(MARKS)]}" for x, y in points)
    return f'<path class="dots s{look % len(MARKS)}{" hollow" if hollow else ""}" d="{drawn}"/>\n'


def steps_path(points: Sequence[Point]) -> str:
    """Along each value until the next."""
    (x, y), *others = points
    return f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in others)


def level_line(y: float, words: str) -> str:
    line = f'<path class="level" d="M{LEFT:g} {y:.1f}H{RIGHT:g}"/>\n'
    return line + label(RIGHT, y - 4, words_of(words), "end")


def labels(places: Sequence[tuple[float, float, str]]) -> list[str]:
    """Beside their dots, where no earlier label is."""
    taken: list[tuple[float, float, float]] = []
    parts = []
    for x, y, words in places:
        width = len(words) * CHARACTER
        for left, base in ((x + 7, y - 3), (x - 7 - width, y - 3), (x + 7, y + 13), (x - 7 - width, y + 13)):
            free = all(left + width < other or left > end or abs(base - line) > 12 for other, end, line in taken)
            if free and left >= 0 and left + width <= WIDTH:
                taken.append((left, left + width, base))
                parts.append(label(left, base, html.escape(words), "start"))
                break
    return parts
