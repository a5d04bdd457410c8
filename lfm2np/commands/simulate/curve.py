"""One metric by requests a second as a picture: an SVG file, in light or dark as its reader prefers.

Both axes are logarithmic. A line is told from another by its colour and by its dashes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from lfm2np.commands.simulate.result import span
from lfm2np.oracle.report.as_text import visible
from lfm2np.oracle.report.markup import Markup, element

WIDTH, LEFT, RIGHT = 400.0, 60.0, 384.0  # of the picture, and where its plot is
TITLE, ROW, PLOT, BELOW = 30.0, 17.0, 220.0, 42.0  # heights: title of an axis, row of the legend, plot, what is below
DASHES = ("none", "7 3", "2 2.5", "9 3 2 3", "14 4", "4 2 1 2 1 2")  # of each line
MOST_LINES = len(DASHES)
LIGHT = ("#0072b2", "#c04a00", "#007a5a", "#a03f78", "#1b1d21", "#8a6000"), "#ffffff", "#1b1d21", "#767c86"
DARK = ("#56b4e9", "#ff8a4c", "#2fc294", "#e6a3c9", "#eceef1", "#e69f00"), "#15171a", "#eceef1", "#868d98"


def style(lines: Sequence[str], page: str, text: str, edge: str) -> str:
    """Colours of the lines and of all else."""
    colours = " ".join(f".s{index} {{ stroke: {colour}; }}" for index, colour in enumerate(lines))
    return f"svg {{ background: {page}; }} text {{ fill: {text}; }} path {{ stroke: {edge}; }} {colours}"


STYLE = f"""
path {{ fill: none; stroke-width: 1.8; }} .axis, .grid, .level {{ stroke-width: 1; }}
text {{ font: 13px system-ui, sans-serif; }} .grid {{ stroke-opacity: .3; }} .level {{ stroke-dasharray: 9 4; }}
{" ".join(f".s{index} {{ stroke-dasharray: {dashes}; }}" for index, dashes in enumerate(DASHES))}
{style(*LIGHT)}
@media (prefers-color-scheme: dark) {{ {style(*DARK)} }}
"""
Line = Sequence[tuple[float, float]]


def picture(lines: Mapping[str, Line], metric: str, about: str, target: float | None) -> str:
    """lines   at most MOST_LINES, by name: points of requests a second and seconds, all above 0
    target  in seconds, drawn across
    """
    rates = sorted({x for points in lines.values() for x, _ in points})
    seconds = [y for points in lines.values() for _, y in points] + ([] if target is None else [target])
    top, ticks = TITLE + ROW * len(lines), ticks_around(seconds)
    bottom = top + PLOT
    across, up = scale(rates, LEFT, RIGHT), scale(ticks, bottom, top)
    parts = [path("axis", f"M{LEFT:g} {top:g}V{bottom:g}H{RIGHT:g}")]
    for tick in ticks:
        parts += [path("grid", f"M{LEFT:g} {up(tick):.1f}H{RIGHT:g}"), text(LEFT - 6, up(tick) + 4, span(tick), "end")]
    for rate in rates if len(rates) < 9 else (rates[0], rates[-1]):
        parts.append(text(across(rate), bottom + 17, f"{rate:.4g}", "middle"))
    parts.append(text((LEFT + RIGHT) / 2, bottom + 35, "requests a second, log scale", "middle"))
    parts.append(text(4, 13, f"{metric}, log scale", "start"))
    if target is not None:
        parts.append(path("level", f"M{LEFT:g} {up(target):.1f}H{RIGHT:g}"))
        parts.append(text(RIGHT, up(target) - 4, f"target: {span(target)}", "end"))
    for index, (name, points) in enumerate(lines.items()):
        y = TITLE + ROW * index
        parts += [path(f"s{index}", f"M4 {y:g}h24"), text(33, y + 4, visible(name, 50), "start")]
        parts.append(path(f"s{index}", "M" + "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)))
    title = element("title", f"{metric} by requests a second")
    sizes = {"viewBox": f"0 0 {WIDTH:g} {bottom + BELOW:g}", "width": "600", "role": "img"}
    look = element("style", Markup(STYLE))
    return element("svg", title, element("desc", about), look, parts, xmlns="http://www.w3.org/2000/svg", **sizes)


def ticks_around(values: Sequence[float]) -> list[float]:
    """Of 1, 2, 5, 10, ... those around the values; powers of ten only, where they span many."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    factors = (1, 2, 5) if high - low <= 2 else (1,)
    steps = [float(f"{factor}e{decade}") for decade in range(low, high + 1) for factor in factors]
    first = max(index for index, step in enumerate(steps) if step <= min(values))
    last = min(index for index, step in enumerate(steps) if step >= max(values) and index > first)
    return steps[first : last + 1]


def scale(values: Sequence[float], start: float, stop: float) -> Callable[[float], float]:
    """From values to places: the first stands at `start`, the last at `stop`."""
    low, wide = math.log(values[0]), math.log(values[-1] / values[0]) or 1.0
    return lambda value: start + (stop - start) * (math.log(value) - low) / wide


def path(look: str, d: str) -> Markup:
    return element("path", class_=look, d=d)


def text(x: float, y: float, words: str, anchor: str) -> Markup:
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
