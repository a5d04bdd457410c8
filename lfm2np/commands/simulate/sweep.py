"""Many configurations of one traffic: a sweep over settings and rates, and the capacity of each at a target.

Combinations that differ only in a setting that their policy does not read are one configuration. At each rate the best
run is, of those that are not saturated, serve most requests and meet the target, the one with the shortest mean
end-to-end time. The capacity is the highest rate, in requests a second, at which a configuration is clearly not
saturated and meets the target: found by bisection, to one percent. Who refuses fewer requests comes first.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.commands.simulate.curve import MOST_LINES, picture
from lfm2np.commands.simulate.result import (
    HEADS,
    NAMES,
    QUANTILES,
    Scenario,
    cost_words,
    simulate,
    span,
)
from lfm2np.errors import RequestError
from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Finding, Report, Section, Table, plural
from lfm2np.values import show

MOST_RUNS = 10_000
UNREAD = {"waiting_served_ratio": "waiting-served", "max_waiting_tokens": "waiting-served"}  # but by this policy
PRECISION = 1.01  # of a capacity
MOST_FACTOR = 2.0**16  # between the first rate that is tried and the last
FEW = 10  # requests beyond a quantile
COLUMNS = (("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("itl", "p99"), ("e2e", "mean"))
Settings = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """What must not exceed so many seconds: "ttft_p99=2"."""

    metric: str
    quantile: str
    seconds: float

    def value(self, figures: Mapping[str, Any]) -> float:
        """Infinite if no request got so far."""
        value = figures["seconds"][self.metric][self.quantile]
        return math.inf if value is None else float(value)

    def is_met(self, figures: Mapping[str, Any]) -> bool:
        return figures["queue"]["saturated"] is None and self.value(figures) <= self.seconds

    def rests_on(self, figures: Mapping[str, Any]) -> str:
        """A warning if the quantile is one of a few requests."""
        few = max(1, round(figures["requests"]["finished"] * (1 - QUANTILES.get(self.quantile, 0.0))))
        return f"{self.quantile.upper()} rests on {plural(few, 'request')}: simulate more" if few < FEW else ""

    @property
    def name(self) -> str:
        return metric_words(self.metric, self.quantile)


def metric_words(metric: str, quantile: str) -> str:
    return f"{metric.upper()} {quantile.upper() if quantile in QUANTILES else quantile}"


def read_target(text: str) -> Target:
    match = re.fullmatch(rf"({'|'.join(NAMES)})_({'|'.join(HEADS)})=(\d*\.?\d+)", text)
    if match is None or float(match[3]) <= 0:
        raise RequestError(f"target {show(text)}: expected a metric and seconds, such as ttft_p99=2")
    return Target(match[1], match[2], float(match[3]))


# --- configurations


def read_settings(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Of "policy=fcfs,static" or "rate=2:32", doubled from step to step."""
    settings: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values or name in settings:
            what = "given twice" if name in settings else "expected NAME=VALUE,... or NAME=FIRST:LAST"
            raise RequestError(f"sweep {show(text)}: {what}")
        settings[name] = list(dict.fromkeys(itertools.chain(*map(values_of, values.split(",")))))
    return settings


def values_of(text: str) -> list[Any]:
    first, *last = map(value_of, text.split(":"))
    if not last:
        return [first]
    if len(last) > 1 or not {type(first), type(last[0])} <= {int, float} or not 0 < first < last[0]:
        raise RequestError(f"sweep: {show(text)}: expected two numbers above 0, the second one larger")
    doubled = (first * 2**step for step in itertools.count())
    return [*itertools.takewhile(lambda value: value < last[0], doubled), last[0]]


def value_of(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, list | dict) else value


def scenarios(base: Scenario, settings: Mapping[str, Sequence[Any]]) -> list[tuple[Settings, Scenario]]:
    """Every combination once, without settings that its policy does not read. RequestError for one that can't be."""
    if math.prod(map(len, settings.values())) > MOST_RUNS:
        raise RequestError(f"a sweep of more than {MOST_RUNS} runs")
    runs: dict[tuple[tuple[str, Any], ...], Scenario] = {}
    for values in itertools.product(*settings.values()):
        chosen, scenario = dict(zip(settings, values, strict=True)), base
        for name, value in chosen.items():
            scenario = scenario.with_setting(name, value)
        policy = scenario.config.policy
        read = tuple((name, value) for name, value in chosen.items() if UNREAD.get(name, policy) == policy)
        runs.setdefault(read, scenario)
    return [(dict(read), scenario) for read, scenario in runs.items()]


# --- a sweep


def summary(
    base: Scenario, chosen: Sequence[Settings], results: Sequence[Mapping[str, Any]], target: Target | None
) -> dict[str, Any]:
    """As data, by rate, the best run of each rate first."""
    runs = []
    for settings, figures in zip(chosen, results, strict=True):
        is_met = not target or target.is_met(figures)
        runs.append({"settings": settings, "lost": lost(figures), "is_met": is_met, **figures})
    runs.sort(key=lambda run: (run["settings"].get("rate", 0), rank(run)))
    names = list(dict.fromkeys(name for settings in chosen for name in settings))
    aim = None if target is None else vars(target)
    return {"kind": "sweep", "traffic": str(base.traffic), "target": aim, "settings": names, "runs": runs}


def lost(figures: Mapping[str, Any]) -> int:
    """Percent of the requests that did not finish."""
    requests = figures["requests"]
    return round(100 * (1 - requests["finished"] / requests["arrived"])) if requests["arrived"] else 100


def rank(run: Mapping[str, Any]) -> tuple[bool, int, bool, float]:
    """Smaller is better. Whoever refuses long requests is fast for the others: that is no merit."""
    mean = run["seconds"]["e2e"]["mean"]
    return run["queue"]["saturated"] is not None, run["lost"], not run["is_met"], math.inf if mean is None else mean


def best_runs(result: Mapping[str, Any]) -> dict[float | None, Mapping[str, Any]]:
    """The first of each rate."""
    best: dict[float | None, Mapping[str, Any]] = {}
    for run in result["runs"]:
        best.setdefault(run["settings"].get("rate"), run)
    return best


def sweep_report(result: Mapping[str, Any], target: Target | None) -> Report:
    """It measures: exit code 0."""
    runs, best = result["runs"], best_runs(result)
    met = sum(run["is_met"] for run in best.values())
    saturated = sum(run["queue"]["saturated"] is not None for run in runs)
    if saturated == len(runs):
        verdict, looks = "every run is saturated", WRONG
    elif target is None:
        verdict, looks = "measured: no target was set", RIGHT
    else:
        of_rates = f" at {met} of {plural(len(best), 'rate')}" if 0 < met < len(best) else ""
        verdict, looks = f"target met{of_rates}" if met else "target not met", RIGHT if met == len(best) else OPEN
    facts = {
        "traffic": result["traffic"],
        "target": f"{target.name} at most {span(target.seconds)}" if target else "",
        "runs": f"{len(runs)}, {saturated} of them saturated",
        "cost": cost_words(runs[0]["cost"]),
    }
    return Report(
        command="simulate",
        verdict=verdict,
        exit_code=RIGHT,
        looks=looks,
        means="Times are simulated. At each rate, in requests a second, the runs had the same requests.",
        facts={name: words for name, words in facts.items() if words},
        next_steps=[best_words(rate, run, target) for rate, run in best.items()],
        sections=[Section("All runs", [table_of(result, [id(run) for run in best.values()])])],
        figures=result,
    )


def best_words(rate: float | None, run: Mapping[str, Any], target: Target | None) -> str:
    at = "" if rate is None else f"at {rate:g} requests a second "
    if run["queue"]["saturated"] or run["lost"] == 100:
        return f"{at}none of the configurations serves this traffic"
    aim = target or Target("ttft", "p99", math.inf)
    choose = "choose" if run["is_met"] else "none meets the target; the best is"
    rests = f" ({few})" if target and (few := target.rests_on(run)) else ""
    times = f"{aim.name} {span(aim.value(run))}, {span(run['seconds']['e2e']['mean'])} end to end"
    return f"{at}{choose} {setting_words(run['settings'])}: {times}{rests}"


def setting_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name != "rate") or "the one configuration"


def table_of(result: Mapping[str, Any], best: Sequence[int]) -> Table:
    names = result["settings"]
    heads = [*names, *(metric_words(*column) for column in COLUMNS), "req/s", "not served", "state"]
    rows = []
    for run in result["runs"]:
        settings = [str(run["settings"].get(name, "-")) for name in names]
        times = [span(run["seconds"][metric][quantile]) for metric, quantile in COLUMNS]
        rate = f"{run['throughput']['requests_per_second'] or 0:.3g}"
        rows.append([*settings, *times, rate, f"{run['lost']} %", state(run, id(run) in best)])
    return Table("", heads, rows, (len(heads) - 1,), 100)


def state(run: Mapping[str, Any], is_best: bool) -> str:
    if run["queue"]["saturated"]:
        return "\u2715 saturated"
    unclear = "\u25b2 unclear whether saturated" if run["queue"]["unclear"] else ""
    misses = "" if run["is_met"] else "misses the target"
    return ", ".join(filter(None, (unclear, misses))) or ("\u25cf best" if is_best else "")


def curve(path: str, result: Mapping[str, Any], target: Target | None) -> bytes:
    """The target's metric, or ttft_p99, by requests a second: a line for each configuration, without the runs that are
    saturated. RequestError where that leaves none, and of `picture`, which has the format of this path."""
    metric, quantile = (target.metric, target.quantile) if target else COLUMNS[1]
    lines: dict[str, list[tuple[float, float]]] = {}
    for run in result["runs"]:
        value = run["seconds"][metric][quantile]
        if value and not run["queue"]["saturated"]:
            lines.setdefault(setting_words(run["settings"]), []).append((run["settings"]["rate"], value))
    if not lines:
        raise RequestError("--curve: every run is saturated, expected one that is not")
    drawn = dict(list(lines.items())[:MOST_LINES])
    left = f", the first {MOST_LINES} of {len(lines)} configurations" if len(lines) > MOST_LINES else ""
    about = f"One line for each configuration{left}; {result['traffic']}."
    return picture(path, drawn, metric_words(metric, quantile), about, target.seconds if target else None)


# --- capacity


def capacity(scenario: Scenario, target: Target) -> dict[str, Any]:
    """`rate`: the highest that meets the target, in requests a second (0: none does; None: all do, the trace is too
    short to tell), with the target's value there, the percent of requests that are refused, what the value `rests_on`
    if that is little, and how many simulations that took. A run in which it is unclear whether the queue grows does not
    count as met: short traces would promise more than the server can compute."""
    at: dict[float, dict[str, Any]] = {}  # by rate that was met
    runs = 0

    def meets(rate: float) -> bool:
        nonlocal runs
        runs += 1
        figures = simulate(scenario.with_setting("rate", rate))
        if target.is_met(figures) and figures["queue"]["unclear"] is None:
            at[rate] = {"value": target.value(figures), "lost": lost(figures), "rests_on": target.rests_on(figures)}
        return rate in at

    start = scenario.traffic.rate or scenario.traffic.trace.rate or 1.0
    low, high = (start, math.inf) if meets(start) else (0.0, start)
    while high == math.inf and low < start * MOST_FACTOR:
        low, high = (2 * low, high) if meets(2 * low) else (low, 2 * low)
    while low == 0.0 and high > start / MOST_FACTOR:
        low, high = (high / 2, high) if meets(high / 2) else (low, high / 2)
    while 0.0 < PRECISION * low < high < math.inf:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    nothing = {"value": None, "lost": None, "rests_on": ""}
    return {"rate": None if high == math.inf else low, **at.get(low, nothing), "runs": runs}


def capacity_report(
    base: Scenario, target: Target, chosen: Sequence[Settings], found: Sequence[Mapping[str, Any]]
) -> Report:
    """One line a configuration, the highest capacity first of those that refuse as many requests."""
    pairs = [{"settings": settings, **each} for settings, each in zip(chosen, found, strict=True)]
    pairs.sort(key=lambda each: (each["lost"] or 0, -math.inf if each["rate"] is None else -each["rate"]))
    return Report(
        command="simulate",
        verdict=f"capacity measured, at {target.name} of at most {span(target.seconds)}",
        exit_code=RIGHT,
        means="The highest rate at which the simulated queue does not grow without bound and the target is met.",
        findings=[Finding("capacity", capacity_words(each, target)) for each in pairs],
        facts={"traffic": str(base.traffic), "cost": cost_words(vars(base.cost))},
        figures={"kind": "capacity", "traffic": str(base.traffic), "target": vars(target), "capacities": pairs},
    )


def capacity_words(each: Mapping[str, Any], target: Target) -> str:
    name = setting_words(each["settings"]).removeprefix("policy ")
    if each["rate"] == 0:
        return f"{name}: meets the target at no rate"
    refused = f", {each['lost']} % of them refused" if each["lost"] else ""
    if each["rate"] is None:
        return f"{name}: meets the target at any rate{refused}: the trace is too short to tell"
    value = "; ".join(filter(None, (f"{target.name} {span(each['value'])}", each["rests_on"])))
    return f"{name}: {each['rate']:.3g} requests a second{refused} ({value})"
