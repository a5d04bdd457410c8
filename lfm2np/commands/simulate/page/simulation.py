"""The report of one simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lfm2np.commands.simulate.report import (
    HEADS,
    NAMES,
    SHARES,
    beyond_lines,
    by_priority,
    config_line,
    percent,
    prefix_words,
    saturation_line,
    span,
    throughput_words,
    unfinished,
    utilisation_words,
)
from lfm2np.oracle.report.charts import Axis, Drawing, Line, Point, line_chart, percent_words, seconds_words, svg
from lfm2np.oracle.report.markup import Markup, joined
from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Block, Figure, Finding, Report, Section, Table, plural

TITLES = ("mean", *map(str.upper, SHARES), "max")  # of HEADS
DISTRIBUTIONS = ("ttft", "tpot", "itl", "e2e")
SHORT = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "queued": "queued"}
USED = {
    "busy": "of the time, in steps",
    "slots": "of max_num_seqs, while busy",
    "blocks": "of the pool's blocks, owned by requests, while busy",
    "budget": "of max_num_batched_tokens, of all steps",
}
ENDED = {
    "complete": "all that can be cached was",
    "too short": "the prompt has no full block",
    "unknown": "its next block was never computed, or evicted so long ago that it is forgotten",
    "evicted": "its next block had been evicted",
    "window": "blocks of windowed layers were gone",
    "disabled": "prefix caching is off",
}
NEAR = 0.2  # of a level that is reached: else it is not drawn
NOTE = (
    "Times are simulated: the scheduler decides each step, the cost model says how long it takes. "
    "Quantiles are at most 1/256 too large."
)


def simulation_report(result: Mapping[str, Any]) -> Report:
    """Of a result as report.as_json gives it, or read back from JSON. It measures: exit code 0, saturated or not."""
    verdict, looks = verdict_of(result)
    facts = {
        "traffic": result["traffic"],
        "requests": requests_words(result),
        "cost": f"of a step: {cost_words(result['cost'])}",
        "scheduler": config_line(result["config"]),
        "beyond": "".join(beyond_lines(result["beyond"])),
        "a second": throughput_words(result["throughput"]),
        "use": utilisation_words(result["utilisation"]),
        "prefixes": prefix_words(result["prefix_cache"]),
        **more_facts(result),
    }
    return Report(
        command="simulate",
        verdict=verdict,
        exit_code=RIGHT,
        looks=looks,
        means=NOTE,
        findings=[Finding("queue", saturation_line(result))],
        facts={name: words for name, words in facts.items() if words},
        sections=[
            Section("How long requests take", seconds(result)),
            Section("Distributions", [distributions(result)], is_long=True),
            Section("Over time", list(over_time(result)), is_long=True),
            Section("What is used", list(used(result)), is_long=True),
            Section("Prefix cache, preemptions, drafts", cached(result), is_long=True),
            Section("Requests", list(requests(result)), is_long=True),
            Section("What was simulated", simulated(result), is_long=True),
        ],
        figures={name: value for name, value in result.items() if name != "groups"},
    )


def verdict_of(result: Mapping[str, Any]) -> tuple[str, int]:
    """With its looks."""
    if result["saturation"]:
        return "SATURATED", WRONG
    return ("unclear whether saturated", OPEN) if result["queue"]["unclear"] else ("not saturated", RIGHT)


def requests_words(result: Mapping[str, Any]) -> str:
    requests = result["requests"]
    counts = [f"{requests['finished']:,} of {requests['arrived']:,} finished", *unfinished(requests)]
    return f"{', '.join(counts)}, in {span(result['throughput']['seconds'])} of simulated time"


def more_facts(result: Mapping[str, Any]) -> dict[str, str]:
    """What most simulations do not have, or not in numbers worth a line."""
    drafts, padding, requests = result["drafts"], result["padding"], result["requests"]
    refused = [f"{number:,}: {reason}" for reason, number in sorted(requests["refused"].items())[:5]]
    skipped = [f"{number:,} with {reason}" for reason, number in requests.get("skipped", {}).items() if number]
    batches = f"{percent(padding['share'])} of the tokens of request-level batches of {padding['batch_size']:,}"
    accepted = f"{part(drafts['accepted'], drafts['proposed'])} of {drafts['proposed']:,} accepted"
    return {
        "preempted": f"{result['preemptions']:,} times" if result["preemptions"] else "",
        "drafts": accepted if drafts["proposed"] else "",
        "padding": batches if padding["share"] is not None else "",
        "left out": "; ".join(skipped),
        "refused": "; ".join(refused),
    }


def cost_words(cost: Mapping[str, Any]) -> str:
    return f"{cost['name']} ({origin(cost)})"


def origin(cost: Mapping[str, Any]) -> str:
    words: str = cost["origin"]
    return f"\u25b3 {words}" if "not measured" in words else words


# --- seconds


def seconds(result: Mapping[str, Any]) -> list[Block]:
    rows = [[words, SHORT[name], *spans(result["seconds"][name])] for name, words in NAMES.items()]
    priorities = [[priority, *spans(values)] for priority, values in by_priority(result)]
    of_priorities = [Table("Time to first token by priority", ("priority", *TITLES), priorities)]
    return [Table("", ("", "", *TITLES), rows, (0, 1)), *(of_priorities if priorities else [])]


def spans(values: Mapping[str, float | None]) -> list[str]:
    return [span(values[name]) for name in HEADS]


def distributions(result: Mapping[str, Any]) -> Block:
    shown = {name: points for name in DISTRIBUTIONS if (points := result["distributions"][name])}
    if not shown:
        return "No request got a token."
    drawing = line_chart(
        "distributions",
        "Share of requests, or of tokens, that took at most so long",
        "Distribution functions on a logarithmic axis; the numbers stand in the tables.",
        [Line(SHORT[name], steps_up(points), steps=True) for name, points in shown.items()],
        Axis("time, log scale", is_log=True, words=seconds_words),
        Axis("share", words=percent_words),
    )
    return figure(drawing, [distribution_table(name, points) for name, points in shown.items()])


def steps_up(points: Sequence[Sequence[float]]) -> list[Point]:
    """From 0 up."""
    return [(points[0][0], 0.0), *((value, share) for value, share in points)] if points else []


def distribution_table(name: str, points: Sequence[Sequence[float]]) -> Table:
    rows = [[span(value), f"{100 * share:.4g} %"] for value, share in points]
    return Table(f"Distribution of {NAMES[name]} ({SHORT[name]})", ("at most", "share"), rows, ())


def figure(drawing: Drawing, numbers: Sequence[Table] = (), more: str = "") -> Figure:
    return Figure(svg(drawing), joined(Markup(drawing.title), ".", more), numbers)


# --- over time


def over_time(result: Mapping[str, Any]) -> Iterator[Block]:
    courses, config = result["courses"], result["config"]
    if not courses["running"]:
        yield "Nothing was computed."
        return
    width = courses["width"]
    blocks, slots = config["num_blocks"], config["max_num_seqs"]
    charts: list[tuple[str, str, str, int | None, str]] = [
        ("running", "Running requests", "requests", slots, f"max_num_seqs: {slots:,}"),
        ("waiting", "Waiting requests", "requests", None, ""),
        ("blocks", "Owned blocks", "blocks", blocks, f"the pool: {blocks:,}"),
        ("tokens_per_second", "Computed tokens a second", "tokens a second", None, ""),
    ]
    rows = [
        [amount(index * width), *(amount(courses[name][index]) for name, *_ in charts)]
        for index in range(len(courses["running"]))
    ]
    heads = ("from second", *(title.lower() for _, title, *_ in charts))
    numbers = Table(f"Means of {span(width)} each", heads, rows, ())
    yield f"Means of {plural(len(rows), 'bin')}, {span(width)} each."
    for chart in charts:
        yield course(*chart, courses[chart[0]], width, [numbers] if chart is charts[-1] else [])


def course(
    name: str,
    title: str,
    unit: str,
    level: int | None,
    level_words: str,
    values: Sequence[float],
    width: float,
    numbers: Sequence[Table],
) -> Figure:
    """A figure, with a line at `level`, if that does not press the course to the ground."""
    points = [(index * width, value) for index, value in enumerate([*values, values[-1]])]
    highest = max(range(len(values)), key=values.__getitem__)
    about = (
        f"{title} over {span(len(values) * width)}: first {amount(values[0])}, at most {amount(values[highest])} "
        f"(at {span(highest * width)}), last {amount(values[-1])}."
    )
    levels, more = [], ""
    if level is not None and values[highest] >= NEAR * level:
        levels, about = [(level, level_words)], f"{about} A line marks {level_words}."
    elif level is not None:
        more = f" Far above them: {level_words}."
    line, x, y = Line(title, points, steps=True), Axis("seconds"), Axis(unit)
    return figure(line_chart(f"course-{name}", title, about, [line], x, y, levels), numbers, more)


def amount(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e15 else f"{value:.4g}"


# --- tables


def used(result: Mapping[str, Any]) -> Iterator[Block]:
    shares, rates, padding = result["utilisation"], result["throughput"], result["padding"]
    rows = [[name, percent(shares[name]), words] for name, words in USED.items()]
    yield Table("Utilisation", ("", "share", "of what"), rows, (0, 2))
    a_second = [
        [name.removesuffix("_per_second").replace("_", " "), "-" if rate is None else amount(rate)]
        for name, rate in rates.items()
        if name != "seconds"
    ]
    yield Table("Throughput", ("", "a second"), a_second)
    yield f"{result['steps']['all']:,} steps."
    if padding["share"] is not None:
        yield (
            f"Batches of whole requests, {padding['batch_size']:,} neighbours each, padded to the longest, would "
            f"have computed {padding['tokens']:,} tokens for nothing: {percent(padding['share'])} of theirs."
        )


def cached(result: Mapping[str, Any]) -> list[Block]:
    cache, drafts = result["prefix_cache"], result["drafts"]
    rows = [
        ["preemptions", f"{result['preemptions']:,}"],
        ["draft tokens proposed", f"{drafts['proposed']:,}"],
        ["draft tokens accepted", part(drafts["accepted"], drafts["proposed"])],
        ["requests that looked up their prefix", f"{cache['queries']:,}"],
        ["tokens of their prompts", f"{cache['query_tokens']:,}"],
        ["found in the cache", part(cache["hit_tokens"], cache["query_tokens"])],
    ]
    ended = [
        [reason, part(number, cache["queries"]), ENDED.get(reason, "")] for reason, number in cache["ended"].items()
    ]
    return [
        Table("Prefix cache, preemptions, drafts", ("", "number"), rows),
        Table("What ended the hits", ("", "requests", "why"), ended, (0, 2)),
    ]


def part(number: int, all_: int) -> str:
    return f"{number:,} ({percent(number / all_)})" if all_ else f"{number:,}"


def requests(result: Mapping[str, Any]) -> Iterator[Table]:
    counts = result["requests"]
    refused = counts["refused"]
    rows = [[name, f"{counts[name]:,}"] for name in ("arrived", "finished", "aborted", "left")]
    yield Table("Requests", ("", "number"), [*rows, ["refused", f"{sum(refused.values()):,}"]])
    for caption, reasons in (("Refused", refused), ("Skipped in the trace", counts.get("skipped", {}))):
        if reasons:
            yield Table(caption, ("why", "requests"), [[why, f"{number:,}"] for why, number in by_number(reasons)])


def by_number(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """The most frequent first."""
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def simulated(result: Mapping[str, Any]) -> list[Block]:
    rows = [[name, str(value)] for name, value in result["config"].items()]
    return [cost_errors(result["cost"]), Table("Configuration of the scheduler", ("setting", "value"), rows, (0, 1))]


def cost_errors(cost: Mapping[str, Any]) -> Block:
    """How well the cost model predicts."""
    errors = cost.get("errors")
    if errors is None:
        return "The errors of the cost model are not known: it was not fitted to measured steps."
    rows = [
        ["steps that were measured", f"{errors['steps']:,}"],
        ["median of the errors", f"{100 * errors['median']:.3g} %"],
        ["nine of ten are at most", f"{100 * errors['p90']:.3g} %"],
        ["error of their total time", f"{100 * errors['total']:+.3g} %"],
    ]
    return Table(f"Errors of the cost model, cross-validated in {plural(errors['folds'], 'fold')}", ("", "value"), rows)
