"""One simulation as plain data, its latencies and counts in figures, and their report. Times are seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.commands.simulate.cost import MODELS, CostModel
from lfm2np.commands.simulate.run import Counts, Simulation
from lfm2np.commands.simulate.traffic import NANOSECONDS, Traffic
from lfm2np.errors import RequestError
from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Finding, Report, Section, Table, plural
from scheduler import RequestRefused, SchedulerConfig
from scheduler.trace import config_as_json

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
HEADS = ("mean", *QUANTILES, "max")
NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two tokens",
    "e2e": "end to end",
    "queued": "in the queue",
}
SURE, UNSURE = 4.0, 1.0  # lengths of the queue, in units of what chance makes at capacity
NEAR_LONGEST = 0.8
GROWN = 1.2  # requests in the server in the last quarter of all arrivals, over those in the third
WORTH_SAYING = 10  # requests
MOST_BLOCKS = 10**7  # whose lists take 1 GB
MOST_TOTAL_ERROR = 0.1  # of a cost model, of the time of all steps, that goes without a warning
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Scenario:
    """One simulation. With `gigabytes` of memory, num_blocks is what fits of the model of the preset `cost.name`."""

    traffic: Traffic
    config: SchedulerConfig
    cost: CostModel
    gigabytes: float | None = None

    def with_setting(self, name: str, value: Any) -> Scenario:
        """RequestError for an unknown name, or a value that it can't have. `rate` is the traffic's."""
        if name == "rate":
            if type(value) not in (int, float) or not 1e-9 <= value <= 1e12:
                raise RequestError(f"rate {value!r}: expected requests a second, above 0")
            return dataclasses.replace(self, traffic=dataclasses.replace(self.traffic, rate=float(value)))
        if name not in SETTINGS:
            raise RequestError(f"setting {name!r}: expected one of {', '.join(SETTINGS)}")
        return dataclasses.replace(self, config=config_of({**asdict(self.config), name: value}))

    def sized(self) -> SchedulerConfig:
        if self.gigabytes is None:
            return self.config
        model = self.cost.name.partition(":")[2]
        if model not in MODELS:
            raise RequestError(f"--memory: expected a cost GPU:MODEL, not {self.cost.name}; else give --num-blocks")
        blocks = MODELS[model].num_blocks(self.gigabytes, self.config.block_size)
        return config_of({**asdict(self.config), "num_blocks": blocks})


SETTINGS = ("rate", *(each.name for each in dataclasses.fields(SchedulerConfig)))


def config_of(settings: Mapping[str, Any]) -> SchedulerConfig:
    """RequestError for what can't be, and for more blocks than a simulation holds in memory."""
    try:
        config = SchedulerConfig(**settings)
    except RequestRefused as error:
        raise RequestError(str(error)) from None
    if config.num_blocks > MOST_BLOCKS:
        raise RequestError(f"num_blocks {config.num_blocks}: expected at most {MOST_BLOCKS}")
    return config


def simulate(scenario: Scenario, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Its figures, as JSON has them."""
    simulation = Simulation(scenario.sized(), scenario.cost)
    counts = simulation.run(scenario.traffic.arrivals(), progress)
    latencies = latencies_of(counts)
    cost = scenario.cost
    arrived, finished = len(counts.arrived), len(latencies["e2e"][0])
    return {
        "kind": "simulation",
        "traffic": str(scenario.traffic),
        "config": config_as_json(simulation.config),
        "cost": {"name": cost.name, "origin": cost.origin, "errors": cost.errors},
        "beyond": counts.beyond / counts.busy if counts.busy else None,
        "requests": {
            "arrived": arrived + sum(counts.refused.values()),
            "finished": finished,
            "left": counts.left,
            "refused": dict(counts.refused),
            "left_out": scenario.traffic.trace.left_out,
        },
        "seconds": {name: distribution(*values) for name, values in latencies.items()},
        "throughput": throughput(counts, finished),
        "utilisation": utilisation(counts, simulation.config),
        "prefix_cache": asdict(simulation.scheduler.prefix_cache.statistics),
        "preemptions": counts.preemptions,
        "queue": queue(counts),
        "steps": {"all": counts.steps, "one_by_one": counts.single_steps},
    }


# --- figures


def latencies_of(counts: Counts) -> dict[str, tuple[Ints, Ints | None]]:
    """By name: nanoseconds, and how often each occurred (None: once). Only of those that got so far."""
    arrived, admitted, first, ended, outputs = (
        np.array(column, np.int64)
        for column in (counts.arrived, counts.admitted, counts.first, counts.ended, counts.outputs)
    )
    several = (ended >= 0) & (outputs > 1)
    return {
        "ttft": ((first - arrived)[first >= 0], None),
        "tpot": ((ended - first)[several] // (outputs[several] - 1), None),
        "itl": (np.array(counts.gaps, np.int64), np.array(counts.gap_counts, np.int64)),
        "e2e": ((ended - arrived)[ended >= 0], None),
        "queued": ((admitted - arrived)[admitted >= 0], None),
    }


def distribution(values: Ints, times: Ints | None = None) -> dict[str, float | None]:
    """Mean, quantiles (the least value that such a share does not exceed) and maximum, in seconds; None of no values.
    `times`: how often each value occurred."""
    if not len(values):
        return dict.fromkeys(HEADS)
    times = np.ones(len(values), np.int64) if times is None else times
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(times[order])
    places = np.searchsorted(upto, np.ceil(np.array([*QUANTILES.values()]) * upto[-1] - 1e-9))
    numbers = ((values * times).sum() / upto[-1], *values[order][places], values.max())
    return {name: float(number) / NANOSECONDS for name, number in zip(HEADS, numbers, strict=True)}


def throughput(counts: Counts, finished: int) -> dict[str, float | None]:
    seconds = counts.end / NANOSECONDS
    totals = {"requests": finished, "output_tokens": counts.output_tokens, "computed_tokens": counts.tokens}
    rates = {f"{name}_per_second": total / seconds if seconds else None for name, total in totals.items()}
    return {"seconds": seconds, **rates}


def utilisation(counts: Counts, config: SchedulerConfig) -> dict[str, float | None]:
    """Shares: of the whole time in steps; while it was busy, of slots and blocks; of the tokens that steps could hold.
    Blocks that hold a cached prefix only are free to be taken, and do not count."""
    shares = {
        "busy": (counts.busy, counts.end),
        "slots": (counts.running, counts.busy * config.max_num_seqs),
        "blocks": (counts.blocks, counts.busy * config.num_blocks),
        "budget": (counts.tokens, counts.steps * config.max_num_batched_tokens),
    }
    return {name: part / whole if whole else None for name, (part, whole) in shares.items()}


def queue(counts: Counts) -> dict[str, Any]:
    """The longest queue and when; `saturated`: since when it grew to the last arrival, and by how many requests a
    second (None: all at once), if it did; `unclear`: why that can't be told.

    After n arrivals since it was empty, a queue at capacity is some sqrt(n) long by chance (times the spread of the
    gaps, for bursts). One that is SURE times as long, and near its longest, grows. So does one that ended the
    simulation.
    """
    if not counts.waiting:
        return {"longest": 0, "longest_at": 0.0, "saturated": None, "unclear": None}
    waiting, arrived = np.array(counts.waiting, np.int64), np.array(counts.arrived, np.int64)
    longest, last = int(waiting.argmax()), int(waiting[-1])
    empty = np.flatnonzero(waiting <= 1)
    since = len(waiting) - 1 - int(empty[-1]) if len(empty) else len(waiting)
    began = int(arrived[empty[-1]]) if len(empty) else 0
    mean = arrived[-1] / len(arrived)
    spread = float((np.diff(arrived, prepend=0).astype(float) ** 2).mean() / mean**2) if mean else 1.0
    chance = (since * max(1.0, spread - 1.0)) ** 0.5
    saturated = unclear = None
    if counts.left or is_long(last, int(waiting.max()), SURE * chance):
        seconds = (int(arrived[-1]) - began) / NANOSECONDS
        rate = last / seconds if seconds else None
        saturated = {"since": began / NANOSECONDS, "waiting": last, "requests_per_second": rate}
    elif mean_in_server(counts, 3) > GROWN * mean_in_server(counts, 2) + WORTH_SAYING:
        unclear = "more and more requests were in the server to the last arrival: the trace is too short to tell"
    elif is_long(last, int(waiting.max()), UNSURE * chance):
        unclear = f"{last} requests waited at the last arrival: the load is near capacity"
    at = int(arrived[longest]) / NANOSECONDS
    return {"longest": int(waiting[longest]), "longest_at": at, "saturated": saturated, "unclear": unclear}


def is_long(waiting: int, longest: int, least: float) -> bool:
    return waiting >= max(WORTH_SAYING, least, NEAR_LONGEST * longest)


def mean_in_server(counts: Counts, quarter: int) -> float:
    """Requests that ran or waited in one quarter (from 0) of the time to the last arrival."""
    length = counts.arrived[-1] / 4
    if not length:
        return 0.0
    arrived, ended = np.array(counts.arrived, np.int64), np.array(counts.ended, np.int64)
    ended = np.where(ended < 0, counts.end, ended)
    inside = np.minimum(ended, (quarter + 1) * length) - np.maximum(arrived, quarter * length)
    return float(np.maximum(inside, 0).sum() / length)


# --- the report


def simulation_report(figures: Mapping[str, Any]) -> Report:
    """It measures: exit code 0, saturated or not."""
    verdict, looks, because = judged(figures)
    requests, config, rates = figures["requests"], figures["config"], figures["throughput"]
    lost = {"refused": refused_of(figures), "left when the simulation ended": requests["left"]}
    lost |= {"without tokens left out": requests["left_out"]}
    finished = [f"{requests['finished']:,} of {requests['arrived']:,} finished"]
    finished += [f"{number:,} {what}" for what, number in lost.items() if number]
    names = ("requests", "output_tokens", "computed_tokens")
    busy, slots, blocks, budget = map(percent, figures["utilisation"].values())
    beyond, cache = figures["beyond"], figures["prefix_cache"]
    cached = percent(cache["hit_tokens"] / cache["query_tokens"]) if cache["queries"] else ""
    facts = {
        "traffic": figures["traffic"],
        "requests": f"{', '.join(finished)}, in {span(rates['seconds'])} of simulated time",
        "cost": cost_words(figures["cost"]),
        "scheduler": f"policy {config['policy']}; {config['num_blocks']:,} blocks of {config['block_size']} tokens; at "
        f"most {config['max_num_seqs']:,} requests and {config['max_num_batched_tokens']:,} tokens a step",
        "beyond": f"{percent(beyond)} of the busy time is in steps larger than any that was measured" if beyond else "",
        "a second": ", ".join(f"{rates[f'{name}_per_second'] or 0:,.1f} {name.replace('_', ' ')}" for name in names),
        "use": f"busy {busy} of the time; meanwhile {slots} of the slots, {blocks} of the blocks, "
        f"{budget} of the token budget",
        "prefixes": f"{cached} of {cache['query_tokens']:,} prompt tokens were cached" if cached else "",
        "preempted": f"{figures['preemptions']:,} times" if figures["preemptions"] else "",
        "refused": "; ".join(
            f"{number:,}, such as {reason}" if number > 1 else f"1: {reason}"
            for reason, number in requests["refused"].items()
        ),
    }
    titles = [head if head in ("mean", "max") else head.upper() for head in HEADS]
    rows = [
        [words, name.upper(), *(span(figures["seconds"][name][head]) for head in HEADS)]
        for name, words in NAMES.items()
    ]
    return Report(
        command="simulate",
        verdict=verdict,
        exit_code=RIGHT,
        looks=looks,
        means="Times are simulated: the scheduler decides each step, the cost model says how long it takes.",
        findings=[Finding("queue", because)],
        facts={name: words for name, words in facts.items() if words},
        sections=[Section("How long requests take", [Table("", ("", "", *titles), rows, (0, 1))])],
        figures=figures,
    )


def judged(figures: Mapping[str, Any]) -> tuple[str, int, str]:
    """The verdict on the queue, how it looks, and a sentence."""
    queue, refused = figures["queue"], refused_of(figures)
    where = f"longest queue: {queue['longest']:,}, at {span(queue['longest_at'])}"
    if saturated := queue["saturated"]:
        rate = saturated["requests_per_second"]
        by = "all at once" if rate is None else f"by {rate:.3g} requests a second"
        ended = "; the simulation ended there" if figures["requests"]["left"] else ""
        begin = f"SATURATED: the queue grows without bound from {span(saturated['since'])} on, {by}"
        return "SATURATED", WRONG, f"{begin}, to {saturated['waiting']:,} at the last arrival{ended}"
    if queue["unclear"]:
        verdict = "unclear whether saturated"
        return verdict, OPEN, f"{verdict}: {queue['unclear']} ({where})"
    bounded = f"the queue did not grow without bound ({where})"
    if refused:
        few = f"{refused:,} of {figures['requests']['arrived']:,} requests were refused"
        return f"{plural(refused, 'request')} refused", OPEN, f"{few}; of the others {bounded}"
    return "not saturated", RIGHT, f"not saturated: {bounded}"


def refused_of(figures: Mapping[str, Any]) -> int:
    return sum(figures["requests"]["refused"].values())


def cost_words(cost: Mapping[str, Any]) -> str:
    sign = "\u25b3 " if "not measured" in cost["origin"] else ""
    errors = cost["errors"]
    off = f"; off by {100 * errors['median']:.0f} % a step (median)" if errors else ""
    if errors and abs(errors["total"]) > MOST_TOTAL_ERROR:
        off += f", and by {100 * errors['total']:+.0f} % of all their time: simulated times are no better"
        sign = "\u25b3 "
    return f"of a step: {cost['name']} ({sign}{cost['origin']}{off})"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def span(seconds: float | None) -> str:
    """With three digits, in a unit that suits it."""
    if seconds is None:
        return "-"
    for unit, size, most in (("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 600.0), ("min", 60.0, 7200.0)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"
