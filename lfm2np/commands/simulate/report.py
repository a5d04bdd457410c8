"""A simulation's result as plain data, and words for it. Times are seconds; None is what was not counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lfm2np.commands.simulate.cost import CostModel
from lfm2np.commands.simulate.histogram import Course, Histogram, upper_end_of
from lfm2np.commands.simulate.statistics import Group, Statistics
from lfm2np.commands.simulate.traffic import NANOSECONDS
from scheduler import Scheduler, SchedulerConfig
from scheduler.trace import config_as_json

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
HEADS = ("mean", *SHARES, "max")  # of a distribution
MOST_POINTS = 128  # of a distribution that is drawn
SURE, UNSURE = 4.0, 1.0  # lengths of the queue, in units of what chance makes at capacity
NEAR_LONGEST = 0.8
GROWN = 1.2  # requests in the server in the last quarter of all arrivals, over those in the third
WORTH_SAYING = 10  # requests


def as_json(
    statistics: Statistics, scheduler: Scheduler, cost: CostModel, traffic: str, left: int = 0
) -> dict[str, Any]:
    """`left`: requests that had not ended when the simulation was."""
    whole, config = statistics.whole(), scheduler.config
    return {
        "kind": "simulation",
        "traffic": traffic,
        "config": config_as_json(config),
        "cost": {
            "name": cost.name,
            "origin": cost.origin,
            "errors": None if cost.errors is None else asdict(cost.errors),
        },
        "beyond": statistics.beyond / statistics.busy if statistics.busy else None,
        "requests": {
            "arrived": statistics.requests + sum(statistics.refused.values()),
            "finished": statistics.finished,
            "aborted": statistics.aborted,
            "left": left,
            "refused": dict(statistics.refused),
        },
        "seconds": {
            **{name: distribution(getattr(whole, name)) for name in ("ttft", "tpot", "e2e")},
            "itl": distribution(statistics.itl),
            "queued": distribution(statistics.queued),
        },
        "ttft_by_priority": {
            str(priority): distribution(histogram)
            for priority, histogram in sorted(statistics.ttft_by_priority.items())
        },
        "throughput": throughput(statistics),
        "utilisation": utilisation(statistics, config),
        "prefix_cache": asdict(scheduler.prefix_cache.statistics),
        "preemptions": statistics.preemptions,
        "drafts": {"proposed": statistics.draft_tokens, "accepted": statistics.accepted_drafts},
        "padding": padding(statistics),
        "saturation": saturation(statistics, left),
        "queue": queue(statistics),
        "steps": {"all": statistics.steps, "one_by_one": statistics.real_steps},
        "courses": courses(statistics),
        "distributions": {
            "ttft": points(whole.ttft),
            "tpot": points(whole.tpot),
            "e2e": points(whole.e2e),
            "itl": points(statistics.itl),
        },
    }


def distribution(histogram: Histogram) -> dict[str, float | None]:
    quantiles = dict(zip(SHARES, histogram.quantiles(SHARES.values()), strict=True))
    values = {"mean": histogram.mean, **quantiles, "max": histogram.largest if histogram.count else None}
    return {name: None if value is None else value / NANOSECONDS for name, value in values.items()}


def points(histogram: Histogram) -> list[tuple[float, float]]:
    """(seconds, share of the values up to there): at most MOST_POINTS, the first and the last among them."""
    keys = sorted(histogram.buckets, key=upper_end_of)
    upto, line = 0, []
    for key in keys:
        upto += histogram.buckets[key]
        line.append((upper_end_of(key) / NANOSECONDS, upto / histogram.count))
    every = -(-len(line) // MOST_POINTS)
    return [*line[:-1:every], *line[-1:]] if line else []


def throughput(statistics: Statistics) -> dict[str, float | None]:
    seconds = statistics.end / NANOSECONDS
    counts = {
        "requests_per_second": statistics.finished,
        "output_tokens_per_second": statistics.output_tokens,
        "computed_tokens_per_second": statistics.prompt_tokens + statistics.output_tokens,
    }
    return {"seconds": seconds, **{name: count / seconds if seconds else None for name, count in counts.items()}}


def utilisation(statistics: Statistics, config: SchedulerConfig) -> dict[str, float | None]:
    """Shares: of the whole time in steps; while it was busy, of slots and blocks; of the tokens that steps could hold.

    `blocks`: owned ones. Those that hold a cached prefix only are free to be taken.
    """
    busy = statistics.busy
    shares = {
        "busy": (busy, statistics.end),
        "slots": (sum(statistics.running.bins), busy * config.max_num_seqs),
        "blocks": (sum(statistics.blocks.bins), busy * config.num_blocks),
        "budget": (sum(statistics.computed.bins), statistics.steps * config.max_num_batched_tokens),
    }
    return {name: part / all_ if all_ else None for name, (part, all_) in shares.items()}


def padding(statistics: Statistics) -> dict[str, Any]:
    """What request-level batches of max_num_seqs neighbours would have computed for nothing."""
    batches = statistics.padding
    share = 1 - batches.used / batches.padded if batches.padded else None
    return {"batch_size": batches.size, "tokens": batches.padded - batches.used, "share": share}


def saturation(statistics: Statistics, left: int) -> dict[str, float | None] | None:
    """Since when the queue grew, to the last arrival, and by how many requests a second; None: it did not, to say so.

    After n arrivals since it was empty, a queue at capacity is some sqrt(n) long by chance (times the spread of the
    gaps, for bursts). One that is SURE times as long, and near its longest, grows. A queue that was so long that the
    simulation ended is one, too.
    """
    if not left and not is_long(statistics, SURE):
        return None
    begin, end = statistics.last_empty, statistics.last_arrival
    rate = statistics.waiting_at_last_arrival / (end - begin) * NANOSECONDS if end > begin else None
    return {
        "since": begin / NANOSECONDS,
        "waiting": statistics.waiting_at_last_arrival,
        "requests_per_second": rate,
    }


def is_long(statistics: Statistics, times: float) -> bool:
    waiting, arrived = statistics.waiting_at_last_arrival, statistics.requests
    mean = statistics.last_arrival / max(1, arrived)
    spread = statistics.gap_squares / max(1, arrived) / mean**2 if mean else 1.0
    chance = (statistics.arrived_since * max(1.0, spread - 1.0)) ** 0.5
    return bool(waiting >= max(WORTH_SAYING, times * chance, NEAR_LONGEST * statistics.most_waiting))


def queue(statistics: Statistics) -> dict[str, Any]:
    """The longest queue, when, and why it is not clear whether it would have grown without bound; None: it is."""
    quarter = statistics.last_arrival // 4
    third, last = (mean_between(statistics, at * quarter, (at + 1) * quarter) for at in (2, 3)) if quarter else (0, 0)
    unclear = None
    if last > GROWN * third + WORTH_SAYING:
        unclear = "more and more requests were in the server to the last arrival: the trace is too short to tell"
    elif is_long(statistics, UNSURE):
        unclear = f"{statistics.waiting_at_last_arrival} requests waited at the last arrival: the load is near capacity"
    at = statistics.most_waiting_at / NANOSECONDS
    return {"longest": statistics.most_waiting, "longest_at": at, "unclear": unclear}


def mean_between(statistics: Statistics, begin: int, end: int) -> float:
    """Requests that ran or waited."""
    means = []
    for course in (statistics.running, statistics.waiting):
        first, last = begin // course.width, max(begin // course.width + 1, end // course.width)
        means.append(sum(course.bins[first:last]) / ((last - first) * course.width))
    return sum(means)


def courses(statistics: Statistics) -> dict[str, Any]:
    """Means over bins of one width, from time 0 on: requests that run and wait, owned blocks, tokens a second."""
    named = {
        "running": statistics.running,
        "waiting": statistics.waiting,
        "blocks": statistics.blocks,
        "tokens_per_second": statistics.computed,
    }
    width = max(course.width for course in named.values())
    lists = {name: widened(course, width) for name, course in named.items()}
    longest = max(map(len, lists.values()))
    scale = {"tokens_per_second": width / NANOSECONDS}
    means = {
        name: [total / scale.get(name, width) for total in [*bins, *[0] * (longest - len(bins))]]
        for name, bins in lists.items()
    }
    return {"width": width / NANOSECONDS, **means}


def widened(course: Course, width: int) -> list[int]:
    each = width // course.width
    return [sum(course.bins[at : at + each]) for at in range(0, len(course.bins), each)]


# --- words


def unfinished(requests: Mapping[str, Any]) -> list[str]:
    """How many did not finish, and why."""
    refused, when = sum(requests["refused"].values()), "left when the simulation ended"
    counts = {"aborted": requests["aborted"], "refused": refused, when: requests["left"]}
    return [f"{number:,} {what}" for what, number in counts.items() if number]


def beyond_lines(share: float | None) -> list[str]:
    return [f"{percent(share)} of the busy time is in steps larger than any that was measured"] if share else []


def config_line(config: Mapping[str, Any]) -> str:
    return (
        f"policy {config['policy']}; {config['num_blocks']:,} blocks of {config['block_size']} tokens; at most "
        f"{config['max_num_seqs']:,} requests and {config['max_num_batched_tokens']:,} tokens a step"
    )


NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two tokens",
    "e2e": "end to end",
    "queued": "in the queue",
}


def by_priority(result: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, float | None]]]:
    groups = result["ttft_by_priority"]
    return list(groups.items()) if len(groups) > 1 else []


def throughput_words(rates: Mapping[str, float | None]) -> str:
    names = ("requests", "output_tokens", "computed_tokens")
    return ", ".join(f"{rates[f'{name}_per_second'] or 0:,.1f} {name.replace('_', ' ')}" for name in names)


def utilisation_words(shares: Mapping[str, float | None]) -> str:
    busy, slots, blocks, budget = (percent(shares[name]) for name in ("busy", "slots", "blocks", "budget"))
    return (
        f"busy {busy} of the time; meanwhile {slots} of the slots, {blocks} of the blocks, {budget} of the token budget"
    )


MISSES = {
    "too short": "prompt shorter than a block",
    "unknown": "never cached, or evicted long ago",
    "window": "blocks of windowed layers evicted",
    "disabled": "prefix caching is off",
}


def prefix_words(cache: Mapping[str, Any]) -> str:
    if not cache["queries"]:
        return ""
    share = percent(cache["hit_tokens"] / cache["query_tokens"])
    missed = {reason: number for reason, number in cache["ended"].items() if number and reason != "complete"}
    ordered = sorted(missed.items(), key=lambda pair: -pair[1])
    misses = ", ".join(f"{number:,} ({MISSES.get(reason, reason)})" for reason, number in ordered)
    return f"{share} of {cache['query_tokens']:,} prompt tokens; prefix misses: {misses or 'none'}"


def saturation_line(result: Mapping[str, Any]) -> str:
    saturated, longest = result["saturation"], result["queue"]
    where = f"longest queue: {longest['longest']:,}, at {span(longest['longest_at'])}"
    if saturated is None and longest["unclear"]:
        return f"unclear whether saturated: {longest['unclear']} ({where})"
    if saturated is None:
        left = result["requests"]["aborted"]
        return f"not saturated: the queue did not grow without bound ({where})" + (
            f"; but {left:,} users left before their answer ended" if left else ""
        )
    rate = saturated["requests_per_second"]
    by = "all at once" if rate is None else f"by {rate:.3g} requests a second"
    ended = "; the simulation ended there (--most-waiting)" if result["requests"]["left"] else ""
    return (
        f"SATURATED: the queue grows without bound from {span(saturated['since'])} on, {by}, to "
        f"{saturated['waiting']:,} at the last arrival{ended}"
    )


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


def group_as_json(group: Group) -> dict[str, Any]:
    """Its histograms, for the bootstrap (sweep.py)."""
    return {
        name: [[key, number] for key, number in sorted(getattr(group, name).buckets.items())]
        for name in ("ttft", "tpot", "e2e")
    }
