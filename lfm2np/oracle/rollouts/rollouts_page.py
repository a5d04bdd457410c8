"""The figures of rollouts as one page for any browser: no script, no request, foreign text escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.reports.figure import BOTTOM, CELL, HEIGHT, LEFT, RIGHT, SHAPES, TOP, WIDTH, label
from lfm2np.oracle.reports.page import bullets, foreign, page, table, versions
from lfm2np.oracle.reports.report_parts import environment, number
from lfm2np.oracle.rollouts.reported_side import SIDES
from lfm2np.oracle.rollouts.rollouts import Judged
from lfm2np.oracle.rollouts.rollouts_report import PARTS, head

Float64 = NDArray[np.float64]
LEAST_SHOWN = 1e-8  # nats: smaller errors are drawn there
MARKS = {SIDES[0]: Verdict.EXACT, SIDES[1]: Verdict.DRIFT}


def as_html(judged: Judged, figures: Mapping[str, Any], model: LoadedModel, command: str) -> str:
    sections = [
        ("sides", "Sampler and trainer", sides(figures)),
        ("difference", "Their difference", difference(judged, figures)),
        ("causes", "What explains it", causes(figures)),
        ("measures", "Measures", measures_table(figures)),
        ("where", "Where the errors are", groups(figures)),
        ("again", "Versions and command", again(model, command)),
    ]
    lines = [foreign(line) for line in (figures["because"], head(figures)) if line]
    lines += [
        f"Left out: {each['count']} ({each['kind']}), first {foreign(each['first'])}" for each in figures["left_out"]
    ]
    top = f"<h1>lfm2np rollouts: {figures['verdict']}</h1>\n{bullets(lines)}"
    note = '<p class="note">Log-probabilities in nats; rms in units of the rounding error of the number format.</p>\n'
    return page("lfm2np rollouts", top, sections, note)


def sides(figures: Mapping[str, Any]) -> str:
    text = ""
    for name in SIDES:
        side = figures["sides"][name]
        reasons = bullets([foreign(reason) for reason in side["reasons"]])
        text += f'<div class="verdict {side["verdict"].lower()}"><p>{name}: {side["verdict"]}</p>\n{reasons}</div>\n'
    known = [name for name in SIDES if "format" in figures["sides"][name]]
    header = ("side", "reports", "format", "tokens", "rms", "largest", "wrong", "mean |error|, nats")
    rows = []
    for name in known:
        side = figures["sides"][name]
        values = (side["reported"], number(side["rms"]), number(side["worst"]), side["wrong"])
        rows.append([name, side["reading"], side["format"], *values, number(side["mean_abs_error"])])
    return text + (
        table("Each side against the exact log-probabilities", header, {"": rows}, (0, 1, 2)) if rows else ""
    )


def difference(judged: Judged, figures: Mapping[str, Any]) -> str:
    parts = figures["difference"]
    if parts is None:
        return "<p>Only one side reported log-probabilities.</p>\n"
    rows = [
        [words, f"{parts['parts'][name]['share']:.1%}", number(parts["parts"][name]["mean_abs"])]
        for name, words in PARTS.items()
    ]
    meaning = f"<p>What they mean by it: {foreign(parts['meaning'])}.</p>\n" if parts["meaning"] else ""
    low, high = parts["clip"]
    clipped = parts["clipped"]
    text = (
        f"<p>{number(parts['mean_abs'])} nats on the average, at most {number(parts['largest'])}. The ratio trainer / "
        f"sampler is below {low:g} for {clipped['below']:.2%} of the tokens, "
        f"above {high:g} for {clipped['above']:.2%}.</p>\n"
    )
    text += table("trainer - sampler in three parts", ("part", "share of the square", "mean |part|, nats"), {"": rows})
    return text + meaning + position_figure(judged) + ratio_figure(judged)


def causes(figures: Mapping[str, Any]) -> str:
    text = ""
    header = ("hypothesis", "detail", "reading", "format", "nats a token behind", "explained", "adequate")
    for name in SIDES:
        rows = [
            [
                each["name"],
                foreign(each["detail"]),
                each["reading"],
                each["format"],
                number(each["behind_the_best_per_token"]),
                f"{each['explained']:.1%}",
                "yes" if each["adequate"] else "no",
            ]
            for each in figures["sides"][name].get("hypotheses", ())
        ]
        if rows:
            text += table(f"Hypotheses about the {name}", header, {"": rows}, (0, 1, 2, 3))
        if rows and figures["sides"][name]["cause"]:
            text += bars(name, rows) + mended(figures["sides"][name])
    return text or "<p>Nothing had to be explained.</p>\n"


def mended(side: Mapping[str, Any]) -> str:
    clipped = side["cause"] and side["cause"]["clipped"]
    if not clipped:
        return ""
    rows = [[when, *(f"{clipped[when][edge]:.2%}" for edge in ("below", "above"))] for when in ("before", "after")]
    return table("Clipped ratios before and after mending it", ("", "below", "above"), {"": rows})


def measures_table(figures: Mapping[str, Any]) -> str:
    columns = {name: values for name, values in figures["measures"].items() if values}
    if not columns:
        return "<p>Nothing to compare.</p>\n"
    names = dict.fromkeys(name for values in columns.values() for name in values)
    rows = [[name, *(number(values.get(name)) for values in columns.values())] for name in names]
    header = ("measure", *(name.replace("_", " against ") for name in columns))
    return table("Under the names of the projects that log them", header, {"": rows})


def groups(figures: Mapping[str, Any]) -> str:
    bodies = {}
    for name, rows in figures["by"].items():
        bodies[f"by {name}"] = [
            [
                row["group"],
                row["tokens"],
                number(row["mean_abs_difference"]),
                *(number(row[side]["rms"]) if side in row else "" for side in SIDES),
                *(row[side]["wrong"] if side in row else "" for side in SIDES),
            ]
            for row in rows
        ]
    header = (
        "group",
        "tokens",
        "mean |difference|",
        *(f"{side} {what}" for what in ("rms", "wrong") for side in SIDES),
    )
    return table("Errors by what a token's place is", header, bodies) if bodies else "<p>A single group.</p>\n"


def again(model: LoadedModel, command: str) -> str:
    facts = [*environment().items(), (model.path.name, model.sha256)]
    return versions("Versions and checkpoint", facts, command)


# --- pictures


def position_figure(judged: Judged) -> str:
    """Each side's error against the token's place in the answer, both on a log scale."""
    places = np.concatenate([np.arange(len(each.entropy)) for each in judged.scores])
    series = {}
    for side in judged.sides.values():
        if side.fit is not None:
            known = np.isfinite(side.fit.errors)
            sizes = np.maximum(np.abs(side.fit.errors[known]), LEAST_SHOWN)
            series[side.name] = places[known] + 1.0, sizes
    return log_figure("position", "Error of a log-probability by the token's place in the answer", "token", series)


def ratio_figure(judged: Judged) -> str:
    """Ratio trainer / sampler against the sampler's probability."""
    sampler, trainer = (judged.sides[name].reported for name in SIDES)
    known = np.isfinite(sampler) & np.isfinite(trainer)
    with np.errstate(over="ignore"):
        ratios = np.exp(np.clip(trainer[known] - sampler[known], -20.0, 20.0))
    points = np.exp(np.maximum(sampler[known], -20.0)), ratios
    return log_figure(
        "ratio", "Ratio trainer / sampler by the sampler's probability", "probability", {SIDES[0]: points}
    )


def log_figure(name: str, title: str, axis: str, series: Mapping[str, tuple[Float64, Float64]]) -> str:
    """Points (x, y) of each side, both on log scales; points of one cell share a mark. "" without any."""
    values = [axis_values for points in series.values() for axis_values in points]
    if not values or not len(values[0]):
        return ""
    x_range, y_range = (decades(np.concatenate(values[start::2])) for start in (0, 1))

    def place(value: float, edges: tuple[int, int], low: float, high: float) -> float:
        return low + (high - low) * (math.log10(value) - edges[0]) / (edges[1] - edges[0])

    parts = [f'<path class="axis" d="M{LEFT:g} {TOP:g}V{BOTTOM:g}H{RIGHT:g}"/>\n']
    for decade in range(y_range[0], y_range[1] + 1, 1 + (y_range[1] - y_range[0]) // 8):
        parts.append(label(LEFT - 6, place(10.0**decade, y_range, BOTTOM, TOP) + 4, f"1e{decade}", "end"))
    for decade in range(x_range[0], x_range[1] + 1, 1 + (x_range[1] - x_range[0]) // 6):
        parts.append(label(place(10.0**decade, x_range, LEFT, RIGHT), BOTTOM + 17, f"1e{decade}", "middle"))
    for number_of, (side, (xs, ys)) in enumerate(series.items()):
        verdict = MARKS[side]
        cells: dict[tuple[float, float], tuple[float, float]] = {(-1.0, -1.0): (LEFT + 8 + 110.0 * number_of, 14.0)}
        for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
            at = place(x, x_range, LEFT, RIGHT), place(y, y_range, BOTTOM, TOP)
            cells.setdefault((at[0] // CELL, at[1] // CELL), at)
        drawn = "".join(f"M{left:.1f} {top:.1f}{SHAPES[verdict]}" for left, top in cells.values())
        parts.append(f'<path class="mark {verdict.lower()}" d="{drawn}"/>\n')
        parts.append(label(LEFT + 17 + 110.0 * number_of, 18, side, "start"))
    parts.append(label((LEFT + RIGHT) / 2, HEIGHT - 6, axis, "middle"))
    return figure(name, title, "".join(parts))


def decades(values: Float64) -> tuple[int, int]:
    low, high = math.floor(math.log10(values.min())), math.ceil(math.log10(values.max()))
    return low, max(high, low + 1)


def bars(name: str, rows: Sequence[Sequence[Any]]) -> str:
    """The share of the squared error that each hypothesis explains."""
    shown = rows[:10]
    parts = []
    for index, row in enumerate(shown):
        top = TOP + index * (BOTTOM - TOP) / len(shown)
        width = (RIGHT - LEFT - 200) * float(row[5].removesuffix("%")) / 100
        parts.append(f'<path class="mark exact" d="M{LEFT + 200:g} {top:.1f}h{width:.1f}v12h-{width:.1f}z"/>\n')
        parts.append(label(LEFT + 194, top + 11, row[0], "end"))
    return figure(f"bars-{name}", f"Share of the {name}'s squared error that each hypothesis explains", "".join(parts))


def figure(name: str, title: str, drawn: str) -> str:
    about = f'<desc id="{name}-about">The numbers stand in the tables.</desc>'
    return (
        f'<figure>\n<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-labelledby="{name}-title {name}-about">\n'
        f'<title id="{name}-title">{title}</title>\n{about}\n{drawn}</svg>\n'
        f'<figcaption class="note">{title}.</figcaption>\n</figure>\n'
    )
