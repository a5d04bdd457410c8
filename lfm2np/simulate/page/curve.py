"""One metric of a sweep against one setting, as a picture of its own: an SVG file for a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.simulate.page.curves import (
    Axis,
    Line,
    document,
    is_wide,
    line_chart,
    percent_words,
    seconds_words,
    tick_words,
)
from lfm2np.simulate.page.sweep import WIDE_SETTING
from lfm2np.simulate.report import HEADS, NAMES
from lfm2np.values import show

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    title: str
    value: Callable[[Run], float | None]
    words: Callable[[float], str]


def seconds_metric(name: str, which: str) -> Metric:
    title = f"{NAMES[name]}, {which if which in ('mean', 'max') else which.upper()}"
    return Metric(title, lambda run: run["seconds"][name][which], seconds_words)


def hit_share(run: Run) -> float | None:
    cache = run["prefix_cache"]
    return cache["hit_tokens"] / cache["query_tokens"] if cache["query_tokens"] else None


METRICS = {
    **{f"{name}_{which}": seconds_metric(name, which) for name in NAMES for which in HEADS},
    **{
        name: Metric(name.replace("_", " "), lambda run, name=name: run["throughput"][name], tick_words)  # type: ignore[misc]
        for name in ("requests_per_second", "output_tokens_per_second", "computed_tokens_per_second")
    },
    "hit_share": Metric("prompt tokens found in the prefix cache", hit_share, percent_words),
    "preemptions": Metric("preemptions", lambda run: run["preemptions"], tick_words),
}


def curve(result: Mapping[str, Any], name: str) -> str:
    """Of a sweep: the metric against its first setting with several values, a line for each combination of the others.

    What is saturated is left out. RequestError for an unknown metric.
    """
    if name not in METRICS:
        raise RequestError(f"metric {show(name)}: expected one of {', '.join(METRICS)}")
    metric = METRICS[name]
    setting = next(
        (key for key, values in result["settings"].items() if len(values) > 1), next(iter(result["settings"]))
    )
    values = result["settings"][setting]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    lines = lines_of(
        result, setting, {value: value if numeric else place for place, value in enumerate(values)}, metric
    )
    is_log = numeric and is_wide(values, WIDE_SETTING) and min(values) > 0
    words = tick_words if numeric else lambda place: str(values[round(place)])
    ticks = (values if numeric else range(len(values))) if len(values) <= 8 else ()
    heights = [y for line in lines for _, y in line.points]
    high = metric.words is seconds_words and is_wide(heights)
    return document(
        line_chart(
            "curve",
            f"{metric.title} by {setting}",
            f"{metric.title} by {setting}; {result['traffic']}; cost of a step: {result['cost']['name']}.",
            lines,
            Axis(f"{setting}, log scale" if is_log else setting, is_log, words, ticks, from_zero=False),
            Axis(f"{metric.title}, log scale" if high else metric.title, high, metric.words),
        )
    )


def lines_of(result: Mapping[str, Any], setting: str, places: Mapping[Any, float], metric: Metric) -> Sequence[Line]:
    """In the order in which the settings name their values."""
    groups: dict[str, list[tuple[float, float]]] = {}
    others = [key for key in result["settings"] if key != setting]
    order = {key: {str(value): place for place, value in enumerate(result["settings"][key])} for key in others}
    runs = sorted(result["runs"], key=lambda run: [order[key][str(run["settings"][key])] for key in others])
    for run in runs:
        value = metric.value(run)
        if value is not None and not run["saturation"]:
            words = ", ".join(f"{key} {run['settings'][key]}" for key in others)
            groups.setdefault(words, []).append((places[run["settings"][setting]], value))
    return [Line(words, sorted(points)) for words, points in groups.items()]
