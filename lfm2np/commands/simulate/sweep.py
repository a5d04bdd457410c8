"""Many configurations of one traffic: which are on the Pareto front, and which one to choose, how surely.

The front is of time to first token against time per output token: no other run is better in one and as good in the
other. The choice is, of the runs that meet the target and are not saturated, the one with the shortest mean time per
output token; without a target, the one with the shortest mean end-to-end time. How sure: groups of neighbouring
requests are drawn anew, with replacement, the same for all runs (they had the same requests); the share of these
resamplings in which the same run is chosen. Groups, as neighbours are not independent: a burst strikes them together.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.commands.simulate.histogram import upper_end_of
from lfm2np.commands.simulate.report import SHARES, beyond_lines, span
from lfm2np.commands.simulate.scenario import CHOSEN, OF_WAITING_SERVED, Scenario
from lfm2np.commands.simulate.steps import number_or_text
from lfm2np.commands.simulate.traffic import NANOSECONDS
from lfm2np.errors import RequestError
from lfm2np.values import show

METRICS = ("ttft", "tpot", "e2e")
RESAMPLINGS = 1000
STEPS = 6  # of a range of fractions
FEW = 10  # requests beyond a quantile
MOST_RUNS = 10_000
UNREAD = "-"  # stands for a setting that a run's policy does not read
RANGE = re.compile(r"([0-9.eE+-]+):([0-9.eE+-]+)")


@dataclass(frozen=True)
class Target:
    """A quantile of a metric that must not exceed so many seconds."""

    metric: str
    quantile: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.quantile.upper()} {WORDS[self.metric]} below {span(self.seconds)}"


WORDS = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end-to-end time"}


def read_target(text: str) -> Target:
    """ "ttft_p99=2": in seconds."""
    match = re.fullmatch(rf"({'|'.join(METRICS)})_({'|'.join(SHARES)})=([0-9.eE+-]+)", text)
    try:
        seconds = float(match[3]) if match else float("nan")
    except ValueError:
        seconds = float("nan")
    if match is None or not 0 < seconds < float("inf"):
        raise RequestError(f"target {show(text)}: expected a metric and seconds, such as ttft_p99=2")
    return Target(match[1], match[2], seconds)


# --- which runs


def read_settings(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each setting of "policy=fcfs,static", "num_blocks=512:4096" (doubled from step to step) or
    "waiting_served_ratio=0.1:2" (STEPS values, each as many times the one before)."""
    settings: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values or name in settings:
            what = "given twice" if name in settings else "expected NAME=VALUE,... or NAME=FIRST:LAST"
            raise RequestError(f"sweep {show(text)}: {what}")
        settings[name] = list(dict.fromkeys(itertools.chain(*map(values_of, values.split(",")))))
    return settings


def values_of(text: str) -> list[Any]:
    match = RANGE.fullmatch(text)
    if match is None:
        return [value_of(text)]
    first, last = value_of(match[1]), value_of(match[2])
    if isinstance(first, str) or isinstance(last, str) or not 0 < first < last:
        raise RequestError(f"sweep: {show(text)}: expected two numbers, the second larger than the first, above 0")
    if isinstance(first, int) and isinstance(last, int):
        return [*(first << step for step in range(64) if first << step < last), last]
    return [float(f"{first * (last / first) ** (step / (STEPS - 1)):.3g}") for step in range(STEPS)]


def value_of(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    return words[text.lower()] if text.lower() in words else number_or_text(text)


def scenarios(base: Scenario, settings: Mapping[str, Sequence[Any]]) -> list[tuple[dict[str, Any], Scenario]]:
    """Every combination, without settings that its policy does not read, so that no run stands there twice.

    RequestError, before anything is simulated, for one that can't be.
    """
    count = combinations(settings)
    if count > MOST_RUNS:
        raise RequestError(f"a sweep of {count} runs: expected at most {MOST_RUNS}")
    runs: dict[tuple[tuple[str, Any], ...], Scenario] = {}
    for values in itertools.product(*settings.values()):
        chosen, scenario = dict(zip(settings, values, strict=True)), base
        for name, value in chosen.items():
            scenario = scenario.with_setting(name, value)
        read = tuple((name, value) for name, value in chosen.items() if name not in scenario.unread())
        runs.setdefault(read, scenario)
    return [(dict(read), scenario) for read, scenario in runs.items()]


def combinations(settings: Mapping[str, Sequence[Any]]) -> int:
    return int(np.prod([len(values) for values in settings.values()], dtype=object))


# --- which is best

Grouped = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]  # a run, and its groups of requests


def summary(
    traffic: str,
    settings: Mapping[str, Sequence[Any]],
    results: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]],
    target: Target | None,
) -> dict[str, Any]:
    """As data, the best run first. `results`: each run's settings, and what scenario.simulate gave for each seed."""
    by_load: dict[str, list[Grouped]] = {}
    for chosen, seeds in results:
        groups = list(itertools.chain(*(seed["groups"] for seed in seeds)))
        by_load.setdefault(load_words(chosen), []).append((run_of(chosen, seeds), groups))
    parts = {load: of_one_load(runs, target) for load, runs in by_load.items()}
    return {
        "kind": "sweep",
        "traffic": traffic,
        "cost": results[0][1][0]["cost"],
        "settings": {name: list(values) for name, values in settings.items()},
        "target": None if target is None else vars(target),
        "runs": list(itertools.chain(*(part["runs"] for part in parts.values()))),
        "answer": [answer_words(load, part["answer"]) for load, part in parts.items()],
        "notes": notes(parts, target, combinations(settings) - len(results)),
        "share": min(part["share"] for part in parts.values()),
    }


def answer_words(load: str, answer: str) -> str:
    return f"With {load}: {answer}" if load else answer[0].upper() + answer[1:]


def notes(parts: Mapping[str, Mapping[str, Any]], target: Target | None, left_out: int) -> list[str]:
    """What has to be known of the answers, each said once, with the loads that it holds for."""
    aim = f" of the runs that meet the target, {target}" if target else ""
    lines = [f"Chosen: the shortest mean {WORDS[chosen_by(target)]}{aim}."]
    if any(part["compared"] > 1 for part in parts.values()):
        lines.append(f"% sure: the share of {RESAMPLINGS:,} resamplings of the requests with the same choice.")
    loads: dict[str, list[str]] = {}
    for load, part in parts.items():
        for note in part["notes"]:
            loads.setdefault(note, []).append(load)
    for note, where in loads.items():
        lines.append(f"{note}." if len(where) == len(parts) else f"{note} ({'; '.join(where)}).")
    if left_out > 0:
        unread = " and ".join(OF_WAITING_SERVED)
        lines.append(f"Left out: {left_out} that would be another run again ({unread}: of policy waiting-served only).")
    return lines


def of_one_load(runs: Sequence[Grouped], target: Target | None) -> dict[str, Any]:
    """What requests come, and how fast, is nothing to choose: the runs of one load are compared with one another."""
    ordered = sorted(runs, key=lambda grouped: rank(grouped[0], target))
    chosen = [run for run, _ in ordered]
    share, rival = certainty(chosen, [groups for _, groups in ordered], target)
    front = on_front(chosen, target)
    return {
        "runs": [{**run, "on_front": index in front} for index, run in enumerate(chosen)],
        "answer": answer(chosen, target, share, rival),
        "notes": notes_of(chosen, target),
        "compared": len(competitors(chosen)),
        "share": share,
    }


def run_of(chosen: Mapping[str, Any], seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first seed's result, with quantiles and means over all of them."""
    first = seeds[0]
    names = ("throughput", "utilisation", "preemptions", "prefix_cache", "requests", "queue", "beyond")
    saturated = next((seed["saturation"] for seed in seeds if seed["saturation"]), None)
    return {
        "settings": dict(chosen),
        "seconds": {metric: averaged([seed["seconds"][metric] for seed in seeds]) for metric in first["seconds"]},
        **{name: first[name] for name in names},
        "saturation": saturated,
        "lost": max(lost_percent(seed["requests"]) for seed in seeds),
    }


def lost_percent(requests: Mapping[str, Any]) -> int:
    """Of the requests that came: refused, aborted, or left when the simulation ended."""
    lost = requests["arrived"] - requests["finished"]
    return round(100 * lost / requests["arrived"]) if requests["arrived"] else 100


def averaged(values: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    return {name: mean_of([value[name] for value in values]) for name in values[0]}


def mean_of(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def rank(run: Mapping[str, Any], target: Target | None) -> tuple[bool, int, bool, float, float]:
    """Smaller is better: not saturated, more requests served (in whole percents), target met, then by what is chosen.

    Who refuses long requests is fast for the others: that is no merit.
    """
    aimed, _ = measures(run, target)
    least = run["seconds"][chosen_by(target)]["mean"]
    misses = target is not None and aimed > target.seconds
    saturated = run["saturation"] is not None
    return (saturated, run["lost"], misses, aimed if misses or saturated or least is None else least, aimed)


def chosen_by(target: Target | None) -> str:
    """The metric whose mean decides."""
    return "tpot" if target else "e2e"


def measures(run: Mapping[str, Any], target: Target | None) -> tuple[float, float]:
    """What the target is about (or P99 time to first token), and mean time per output token; infinite if unknown."""
    metric, quantile = (target.metric, target.quantile) if target else ("ttft", "p99")
    numbers = run["seconds"][metric][quantile], run["seconds"]["tpot"]["mean"]
    aimed, least = (float("inf") if number is None else number for number in numbers)
    return aimed, least


def on_front(runs: Sequence[Mapping[str, Any]], target: Target | None) -> set[int]:
    """The runs that no other beats: of time to first token (or what the target is about) and per output token."""
    points = [measures(run, target) for run in runs]
    open_ = competitors(runs)
    return {index for index in open_ if not any(beats(points[other], points[index]) for other in open_)}


def competitors(runs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Those that are not saturated and serve as many requests as any of these, and any at all."""
    open_ = [index for index, run in enumerate(runs) if run["saturation"] is None and run["lost"] < 100]
    least = min((runs[index]["lost"] for index in open_), default=0)
    return [index for index in open_ if runs[index]["lost"] == least]


def beats(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first != second and first[0] <= second[0] and first[1] <= second[1]


def certainty(
    runs: Sequence[Mapping[str, Any]],
    groups: Sequence[Sequence[Mapping[str, Any]]],
    target: Target | None,
) -> tuple[float, int | None]:
    """The share of resamplings in which the first run is best, and which is so most often in the others."""
    open_ = competitors(runs)
    if not open_:
        return 1.0, None
    drawn = resamplings(max(len(each) for each in groups))
    metric, quantile = (target.metric, target.quantile) if target else ("ttft", "p99")
    ranks = np.empty((len(open_), RESAMPLINGS, 2))
    for place, index in enumerate(open_):
        aimed = resampled(groups[index], metric, drawn, SHARES[quantile])
        least = resampled(groups[index], chosen_by(target), drawn, None)
        misses = aimed > target.seconds if target else np.zeros(RESAMPLINGS, bool)
        ranks[place] = np.stack([misses, np.where(misses, aimed, least)], axis=1)
    winners = np.array(
        [min(range(len(open_)), key=lambda place: tuple(ranks[place, draw])) for draw in range(RESAMPLINGS)]
    )
    counts = np.bincount(winners, minlength=len(open_))
    same = [place for place, index in enumerate(open_) if is_tie(runs[0], runs[index])]
    share = float(counts[same].sum()) / RESAMPLINGS
    counts[same] = 0
    return share, open_[int(counts.argmax())] if counts.any() else None


def resamplings(size: int) -> NDArray[np.int64]:
    """How often each of `size` groups is drawn, [resamplings, groups]: the same on every machine."""
    rng = random.Random(0)
    return np.array([np.bincount(rng.choices(range(size), k=size), minlength=size) for _ in range(RESAMPLINGS)])


def resampled(
    groups: Sequence[Mapping[str, Any]], metric: str, drawn: NDArray[np.int64], share: float | None
) -> NDArray[np.float64]:
    """The quantile, or the mean (None), of each resampling, [resamplings] in seconds; `drawn` [resamplings, groups]."""
    keys = sorted({key for group in groups for key, _ in group[metric]}, key=upper_end_of)
    if not keys:
        return np.full(len(drawn), np.inf)
    place = {key: number for number, key in enumerate(keys)}
    counts = np.zeros((drawn.shape[1], len(keys)), np.int64)
    for row, group in enumerate(groups):
        for key, number in group[metric]:
            counts[row, place[key]] = number
    values = np.array([upper_end_of(key) for key in keys], np.int64)
    drawn_counts = drawn @ counts
    totals = drawn_counts.sum(axis=1)
    if share is None:
        shift = max(0, (int(totals.max()) * int(values.max())).bit_length() - 62)  # exact sums, in 64 bits
        sums = (drawn_counts @ (values >> shift)) * 2.0**shift
        return np.where(totals > 0, sums / np.maximum(totals, 1) / NANOSECONDS, np.inf)
    upto = drawn_counts.cumsum(axis=1)
    places = (upto < share * totals[:, None]).sum(axis=1)
    return np.where(totals > 0, values[np.minimum(places, len(keys) - 1)] / NANOSECONDS, np.inf)


def answer(runs: Sequence[Mapping[str, Any]], target: Target | None, share: float, rival: int | None) -> str:
    """One line on runs that stand in the order of their rank."""
    best, compared = runs[0], len(competitors(runs))
    if best["saturation"] is not None:
        return f"every run is saturated: none of these {len(runs)} configurations serves this traffic."
    if best["lost"] == 100:
        return f"no run finished a request: none of these {len(runs)} configurations serves this traffic."
    aimed, least = measures(best, target)
    metric, quantile = (target.metric, target.quantile) if target else ("ttft", "p99")
    meets = target is None or aimed <= target.seconds
    begin = "choose" if meets else "none meets the target; the nearest is"
    numbers = f"{quantile.upper()} {WORDS[metric]} {span(aimed)}, {span(least)} per output token"
    numbers += "" if target else f", {span(best['seconds']['e2e']['mean'])} end to end"
    other = f", else mostly {setting_words(runs[rival]['settings'])}" if rival is not None else ""
    sure = f" (the best of {compared}, {100 * share:.0f} % sure{other})" if compared > 1 and meets else ""
    return f"{begin} {setting_words(best['settings'])}: {numbers}{sure}."


def notes_of(runs: Sequence[Mapping[str, Any]], target: Target | None) -> list[str]:
    """Of the best: what its numbers leave open."""
    best = runs[0]
    if best["saturation"] is not None or best["lost"] == 100:
        return []
    lines = [f"{best['lost']} % of the requests are not served"] if best["lost"] else []
    if best["queue"]["unclear"]:
        lines.append(f"Whether it is saturated is unclear: {best['queue']['unclear']}")
    lines += [*beyond_lines(best["beyond"]), *tie_words(runs)]
    if target is not None:
        beyond = best["requests"]["finished"] * (1 - SHARES[target.quantile])
        few = f"{target.quantile.upper()} rests on {beyond:.3g} requests: simulate more"
        lines += [few] if beyond < FEW else []
    return lines


def is_tie(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two runs came out the same, in all times."""
    return bool(first["seconds"] == second["seconds"] and first["lost"] == second["lost"])


def tie_words(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    same = [setting_words(run["settings"]) for run in runs[1:] if is_tie(runs[0], run)]
    more = f" and {len(same) - 2} more" if len(same) > 2 else ""
    return [f"The same times with {' or '.join(same[:2])}{more}"] if same else []


def setting_words(settings: Mapping[str, Any]) -> str:
    chosen = [f"{name} {value}" for name, value in settings.items() if name in CHOSEN]
    return ", ".join(chosen) or "the only configuration"


def load_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name not in CHOSEN)
