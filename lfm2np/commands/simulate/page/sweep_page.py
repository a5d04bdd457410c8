"""The report of a sweep, which is many settings of one traffic, and single pictures of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.commands.simulate.page.simulation import NOTE, amount, cost_errors, cost_words, figure
from lfm2np.commands.simulate.report import HEADS, NAMES, percent, saturation_line, span
from lfm2np.commands.simulate.scenario import CHOSEN
from lfm2np.commands.simulate.sweep import MOST_RUNS, UNREAD, load_words
from lfm2np.errors import RequestError
from lfm2np.oracle.report.charts import (
    MOST_LINES,
    Axis,
    Dots,
    Drawing,
    Line,
    document,
    is_wide,
    line_chart,
    percent_words,
    scatter_chart,
    seconds_words,
    tick_words,
)
from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Block, Report, Section, Table, plural
from lfm2np.values import show

FRONT, OTHER, SATURATED = 0, 3, 4  # looks of dots
COLUMNS = (("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("tpot", "p99"), ("e2e", "mean"))
CURVES = (("ttft", "p99"), ("tpot", "mean"))
MOST_NUMBERS = 3  # of runs beside a dot
MOST_LOADS = 6  # that are drawn
WIDE_SETTING = 4.0  # largest over smallest, from which on its axis is logarithmic: many are doubled from run to run
Run = Mapping[str, Any]


def sweep_report(result: Mapping[str, Any]) -> Report:
    """Of a result as sweep.summary gives it, or read back from JSON: its runs are in order, the best first.

    It measures: exit code 0, whether the target is met or not.
    """
    runs, target = result["runs"], result["target"]
    verdict, looks = verdict_of(result)
    numeric = [name for name in result["settings"] if len(numbers_of(runs, name)) > 1]
    saturated = sum(bool(run["saturation"]) for run in runs)
    curves = [block for name in numeric for block in by_setting(runs, name)]
    return Report(
        command="simulate --sweep",
        verdict=verdict,
        exit_code=RIGHT,
        looks=looks,
        means=NOTE,
        facts={
            "traffic": result["traffic"],
            "target": target_words(target) if target else "none",
            "runs": f"{len(runs)}, {saturated} of them saturated",
            "cost": f"of a step: {cost_words(result['cost'])}",
        },
        next_steps=result["answer"],
        sections=[
            Section("All runs, the best first", [all_runs(result), *result["notes"]]),
            Section("Pareto front", list(fronts(result)), is_long=True),
            *([Section("By each setting", curves, is_long=True)] if curves else []),
            Section("More of each run", list(more_of_runs(runs)), is_long=True),
            Section("What was simulated", simulated(result), is_long=True),
        ],
        figures=result,
    )


def verdict_of(result: Mapping[str, Any]) -> tuple[str, int]:
    """With its looks. A target is met where the best run of a load meets it."""
    if all(run["saturation"] for run in result["runs"]):
        return "every run is saturated", WRONG
    best = [runs[0][1] for runs in numbered(result["runs"]).values()]
    target = result["target"]
    if target is None:
        return "measured: no target was set", RIGHT
    met = sum(is_met(run, target) for run in best)
    where = f" with {met} of {plural(len(best), 'load')}" if 0 < met < len(best) else ""
    return (f"target met{where}", OPEN if where else RIGHT) if met else ("target not met", OPEN)


def is_met(run: Run, target: Mapping[str, Any]) -> bool:
    value = seconds_of(run, target["metric"], target["quantile"])
    return not run["saturation"] and value is not None and value <= target["seconds"]


def target_words(target: Mapping[str, Any]) -> str:
    return f"{metric_words(target['metric'], target['quantile'])} at most {span(target['seconds'])}"


def metric_words(metric: str, which: str) -> str:
    return f"{metric.upper()} {which if which == 'mean' else which.upper()}"


def setting_words(settings: Mapping[str, Any], without: str = "") -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name != without) or "all"


def seconds_of(run: Run, metric: str, which: str) -> float | None:
    value: float | None = run["seconds"][metric][which]
    return value


# --- the front


def numbered(runs: Sequence[Run], but: str = "") -> dict[str, list[tuple[int, Run]]]:
    """The runs of each load, with their numbers: only those had the same requests. A load is said without `but`."""
    loads: dict[str, list[tuple[int, Run]]] = {}
    for number, run in enumerate(runs, 1):
        settings = {name: value for name, value in run["settings"].items() if name != but}
        loads.setdefault(load_words(settings), []).append((number, run))
    return loads


def fronts(result: Mapping[str, Any]) -> Iterator[Block]:
    """What the target is about, else TTFT P99, against mean TPOT: a figure for each load."""
    loads = list(numbered(result["runs"]).items())
    for place, (load, runs) in enumerate(loads[:MOST_LOADS]):
        yield front(place, load, runs, result["target"])
    yield from undrawn(len(loads))


def undrawn(loads: int) -> list[Block]:
    return [f"Of {loads} loads {MOST_LOADS} are drawn; the tables have all."] if loads > MOST_LOADS else []


def front(place: int, load: str, runs: Sequence[tuple[int, Run]], target: Mapping[str, Any] | None) -> Block:
    """Of one load."""
    metric, which = (target["metric"], target["quantile"]) if target else ("ttft", "p99")
    places: list[tuple[int, float, float, Run]] = [
        (number, least, aimed, run)
        for number, run in runs
        if (aimed := seconds_of(run, metric, which)) is not None and (least := seconds_of(run, "tpot", "mean"))
    ]
    where = f"With {load}: " if load else ""
    if not places:
        return f"{where}no run has times to draw."
    labels = labels_of([(number, x, y) for number, x, y, run in places if look_of(run) == FRONT])
    groups = [
        Dots(
            name,
            [(x, y, labels.get(number, "")) for number, x, y, run in places if look_of(run) == look],
            look,
            look == OTHER,
        )
        for look, name in ((FRONT, "on the front"), (OTHER, "not on it"), (SATURATED, "saturated"))
    ]
    joined = sorted((x, y) for _, x, y, run in places if look_of(run) == FRONT)
    what = metric_words(metric, which)
    levels = [(target["seconds"], f"target: {span(target['seconds'])}")] if target else []
    drawing = scatter_chart(
        f"front-figure-{place}",
        f"{where}{what} against mean TPOT: lower and further left is better",
        f"{plural(len(joined), 'run')} on the front of {len(places)}: "
        + "; ".join(f"{what} {span(y)} with mean TPOT {span(x)}" for x, y in joined)
        + ". The numbers stand in the table of all runs.",
        groups,
        seconds_axis("mean TPOT", [x for _, x, *_ in places]),
        seconds_axis(what, [y for _, _, y, _ in places]),
        joined,
        levels,
    )
    rows = [[number, state(run), span(y), span(x), setting_words(run["settings"])] for number, x, y, run in places]
    numbers = Table("The dots of the figure", ("run", "state", what, "TPOT mean", "settings"), rows, (1, 4))
    more = " The numbers are those of the runs on the front; where there is no room a dot has none."
    return figure(drawing, [numbers], more)


def labels_of(places: Sequence[tuple[int, float, float]]) -> dict[int, str]:
    """By the first run of each place; runs that came out the same share one."""
    runs: dict[tuple[float, float], list[int]] = {}
    for number, x, y in places:
        runs.setdefault((x, y), []).append(number)
    return {
        same[0]: ", ".join(map(str, same[:MOST_NUMBERS])) + (", ..." if len(same) > MOST_NUMBERS else "")
        for same in runs.values()
    }


def look_of(run: Run) -> int:
    return SATURATED if run["saturation"] else FRONT if run["on_front"] else OTHER


def state(run: Run) -> str:
    if run["queue"]["unclear"] and not run["saturation"]:
        return "▲ unclear whether saturated"
    return {SATURATED: "✕ saturated", FRONT: "● front", OTHER: ""}[look_of(run)]


def axis(title: str, is_log: bool, words: Callable[[float], str], ticks: Sequence[float] = (), **more: Any) -> Axis:
    return Axis(f"{title}, log scale" if is_log else title, is_log, words, ticks, **more)


def seconds_axis(title: str, values: Sequence[float]) -> Axis:
    return axis(title, is_wide(values), seconds_words, from_zero=False)


# --- by each setting


def numbers_of(runs: Sequence[Run], name: str) -> list[float]:
    """The numbers among its values, each once, in order."""
    values = (run["settings"].get(name) for run in runs)
    return sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})


def by_setting(runs: Sequence[Run], name: str) -> Iterator[Block]:
    """Two figures for each load, and their numbers: one line for each combination of the other settings, the best
    first. Of a setting that is a load itself, the figures have it on their axis."""
    values = numbers_of(runs, name)
    loads = {
        load: [run for _, run in those if run["settings"].get(name) in values]
        for load, those in numbered(runs, but=name).items()
    }
    for place, (load, those) in enumerate(list(loads.items())[:MOST_LOADS]):
        yield from curves_of_load(place, load, name, values, those)
    yield from undrawn(len(loads))
    rows = [
        [
            amount(run["settings"][name]),
            *(span(seconds_of(run, *curve)) for curve in CURVES),
            state(run),
            setting_words(run["settings"], without=name),
        ]
        for those in loads.values()
        for group in grouped(those, name).values()
        for run in sorted(group, key=lambda run: run["settings"][name])
    ]
    heads = (name, *(metric_words(*curve) for curve in CURVES), "state", "other settings")
    yield Table(f"The numbers of the figures by {name}", heads, rows, (3, 4))


def grouped(runs: Sequence[Run], name: str) -> dict[str, list[Run]]:
    """By all settings but one."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(setting_words(run["settings"], without=name), []).append(run)
    return groups


def curves_of_load(place: int, load: str, name: str, values: Sequence[float], runs: Sequence[Run]) -> Iterator[Block]:
    groups = grouped(runs, name)
    others = list(
        dict.fromkeys(other for run in runs for other in run["settings"] if other in CHOSEN and other != name)
    )
    lines = f" One line for each {', '.join(others)}." if others else ""
    where = f"With {load}: " if load else ""
    identity = f"{identifier(name)}-{place}"
    if len(groups) > MOST_LINES:
        yield f"The lines of the best {MOST_LINES} of {len(groups)} combinations; the table has all."
    for curve in CURVES:
        yield figure(curves_of(identity, where, name, values, list(groups.values()), *curve), more=lines)


def curves_of(
    identity: str,
    where: str,
    name: str,
    values: Sequence[float],
    groups: Sequence[Sequence[Run]],
    metric: str,
    which: str,
) -> Drawing:
    lines = []
    for group in groups:
        others = [str(value) for other, value in group[0]["settings"].items() if other in CHOSEN and other != name]
        pairs = [(run["settings"][name], seconds_of(run, metric, which)) for run in group]
        lines.append(Line(", ".join(others), sorted((x, y) for x, y in pairs if y is not None)))
    shown = [y for line in lines[:MOST_LINES] for _, y in line.points]
    is_log = is_wide(values, WIDE_SETTING) and min(values) > 0
    what = metric_words(metric, which)
    return line_chart(
        f"{identity}-{metric}",
        f"{where}{what} by {name}",
        f"{where}{what} by {name}, one line for each combination of the other settings; the numbers stand in the "
        "table below.",
        lines,
        axis(name, is_log, tick_words, values if len(values) <= 8 else ()),
        seconds_axis(what, shown),
    )


def identifier(name: str) -> str:
    """For an id: letters, digits and - only; other characters by their numbers."""
    return "set-" + "".join(c if c.isascii() and c.isalnum() else f"-{ord(c):x}-" for c in name)


# --- tables


def all_runs(result: Mapping[str, Any]) -> Table:
    names = list(result["settings"])
    heads = ["run", *names, *(metric_words(*column) for column in COLUMNS), "req/s", "not served", "state"]
    rows = [
        [
            number,
            *(str(run["settings"].get(name, UNREAD)) for name in names),
            *(span(seconds_of(run, *column)) for column in COLUMNS),
            f"{run['throughput']['requests_per_second'] or 0:.3g}",
            f"{run['lost']} %",
            state(run),
        ]
        for number, run in enumerate(result["runs"], 1)
    ]
    return Table("", heads, rows, (len(heads) - 1,), MOST_RUNS)


def more_of_runs(runs: Sequence[Run]) -> Iterator[Block]:
    rows = [
        [
            number,
            span(seconds_of(run, "e2e", "p99")),
            percent(run["utilisation"]["busy"]),
            f"{run['preemptions']:,}",
            f"{saturation_line(run)}." if run["saturation"] else "",
        ]
        for number, run in enumerate(runs, 1)
    ]
    yield Table("Use, and where it is saturated", ("run", "E2E P99", "busy", "preemptions", "saturated"), rows, (4,))


def simulated(result: Mapping[str, Any]) -> list[Block]:
    rows = [[name, ", ".join(map(str, values))] for name, values in result["settings"].items()]
    return [cost_errors(result["cost"]), Table("Settings that were varied", ("setting", "values"), rows, (0, 1))]


# --- one metric against one setting, as a picture of its own: an SVG file for a page


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
            axis(setting, is_log, words, ticks, from_zero=False),
            axis(metric.title, high, metric.words),
        )
    )


def lines_of(result: Mapping[str, Any], setting: str, places: Mapping[Any, float], metric: Metric) -> Sequence[Line]:
    """In the order in which the settings name their values."""
    groups: dict[str, list[tuple[float, float]]] = {}
    others = [key for key in result["settings"] if key != setting]
    order = {key: {str(value): place for place, value in enumerate(result["settings"][key])} for key in others}
    runs = sorted(
        (run for run in result["runs"] if setting in run["settings"]),
        key=lambda run: [order[key].get(str(run["settings"].get(key, UNREAD)), -1) for key in others],
    )
    for run in runs:
        value = metric.value(run)
        if value is not None and not run["saturation"]:
            words = ", ".join(f"{key} {run['settings'][key]}" for key in others if key in run["settings"])
            groups.setdefault(words, []).append((places[run["settings"][setting]], value))
    return [Line(words, sorted(points)) for words, points in groups.items()]
