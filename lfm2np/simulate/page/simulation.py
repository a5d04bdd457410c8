"""The page of one simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.oracle.report.charts import STYLE, Axis, Drawing, Line, Point, line_chart, percent_words, seconds_words, svg
from lfm2np.oracle.reports.page import bullets, details, foreign, page, table
from lfm2np.oracle.reports.report_parts import plural
from lfm2np.simulate.report import (
    HEADS,
    NAMES,
    SHARES,
    beyond_lines,
    by_priority,
    percent,
    saturation_line,
    span,
    unfinished,
)

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
NO_TIME = "<p>Nothing was computed.</p>\n"


def simulation_page(result: Mapping[str, Any]) -> str:
    """Of a result as report.as_json gives it, or read back from JSON."""
    sections = [
        ("seconds", "How long requests take", seconds(result)),
        ("time", "Over time", over_time(result)),
        ("use", "What is used", used(result)),
        ("cache", "Prefix cache, preemptions, drafts", cached(result)),
        ("requests", "Requests", requests(result)),
        ("what", "What was simulated", simulated(result)),
    ]
    return page(f"lfm2np simulate: {result['traffic']}", head(result), sections, note(), STYLE)


def note() -> str:
    return (
        '<p class="note">Times are simulated: the scheduler decides each step, the cost model says how long it takes. '
        "Quantiles are at most 1/256 too large.</p>\n"
    )


# --- first


def head(result: Mapping[str, Any]) -> str:
    unclear, requests = result["queue"]["unclear"], result["requests"]
    sign, kind = ("✕", "bug") if result["saturation"] else ("▲", "drift") if unclear else ("●", "exact")
    counts = [f"{requests['finished']:,} of {requests['arrived']:,} requests finished", *unfinished(requests)]
    lines = [
        f"Traffic: {foreign(result['traffic'])}",
        f"{', '.join(counts)}, in {span(result['throughput']['seconds'])} of simulated time",
        f"Cost of a step: {foreign(result['cost']['name'])}: {origin(result['cost'])}",
        *map(first_upper, beyond_lines(result["beyond"])),
    ]
    return verdict("lfm2np simulate", kind, f"{sign} {first_upper(saturation_line(result))}.", lines)


def verdict(title: str, kind: str, words: str, lines: Sequence[str]) -> str:
    """What a page begins with."""
    words = f"<p><strong>{words}</strong></p>\n{bullets(lines)}"
    return f'<h1>{title}</h1>\n<div class="verdict {kind}">\n{words}</div>\n'


def first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def origin(cost: Mapping[str, Any]) -> str:
    words = foreign(cost["origin"])
    return f"<strong>△ not measured</strong>: {words}" if "not measured" in cost["origin"] else words


# --- seconds


def seconds(result: Mapping[str, Any]) -> str:
    rows = [[SHORT[name], *spans(result["seconds"][name])] for name in NAMES]
    content = table("Time of requests", ("", *TITLES), {"": rows}, ())
    content += f'<p class="note">{"; ".join(f"{SHORT[name]}: {words}" for name, words in NAMES.items())}.</p>\n'
    priorities = [[foreign(priority), *spans(values)] for priority, values in by_priority(result)]
    if priorities:
        content += table("Time to first token by priority", ("priority", *TITLES), {"": priorities})
    lines = {name: steps_up(result["distributions"][name]) for name in DISTRIBUTIONS}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return content + "<p>No request got a token.</p>\n"
    drawing = line_chart(
        "distributions",
        "Share of requests, or of tokens, that took at most so long",
        "Distribution functions on a logarithmic axis. "
        + " ".join(f"{SHORT[name]}: {in_words(result['seconds'][name])}." for name in lines),
        [Line(SHORT[name], points, steps=True) for name, points in lines.items()],
        Axis("time, log scale", is_log=True, words=seconds_words),
        Axis("share", words=percent_words),
    )
    numbers = "".join(distribution_table(name, result["distributions"][name]) for name in lines)
    return content + figure(drawing) + details("The numbers of the figure", numbers)


def spans(values: Mapping[str, float | None]) -> list[str]:
    return [span(values[name]) for name in HEADS]


def in_words(values: Mapping[str, float | None]) -> str:
    return ", ".join(f"{title} {span(values[name])}" for title, name in zip(TITLES, HEADS, strict=True))


def steps_up(points: Sequence[Sequence[float]]) -> list[Point]:
    """From 0 up."""
    return [(points[0][0], 0.0), *((value, share) for value, share in points)] if points else []


def distribution_table(name: str, points: Sequence[Sequence[float]]) -> str:
    rows = [[span(value), f"{100 * share:.4g} %"] for value, share in points]
    return table(f"Distribution of {NAMES[name]} ({SHORT[name]})", ("at most", "share"), {"": rows}, ())


def figure(drawing: Drawing, more: str = "") -> str:
    return f'<figure>\n{svg(drawing)}<figcaption class="note">{drawing.title}.{more}</figcaption>\n</figure>\n'


# --- over time


def over_time(result: Mapping[str, Any]) -> str:
    courses, config = result["courses"], result["config"]
    if not courses["running"]:
        return NO_TIME
    width = courses["width"]
    blocks, slots = config["num_blocks"], config["max_num_seqs"]
    charts: list[tuple[str, str, str, int | None, str]] = [
        ("running", "Running requests", "requests", slots, f"max_num_seqs: {slots:,}"),
        ("waiting", "Waiting requests", "requests", None, ""),
        ("blocks", "Owned blocks", "blocks", blocks, f"the pool: {blocks:,}"),
        ("tokens_per_second", "Computed tokens a second", "tokens a second", None, ""),
    ]
    drawn = "".join(course(*chart, courses[chart[0]], width) for chart in charts)
    rows = [
        [amount(index * width), *(amount(courses[name][index]) for name, *_ in charts)]
        for index in range(len(courses["running"]))
    ]
    heads = ("from second", *(title.lower() for _, title, *_ in charts))
    numbers = table(f"Means of {span(width)} each", heads, {"": rows}, ())
    about = f"<p>Means of {plural(len(rows), 'bin')}, {span(width)} each.</p>\n"
    return f'{about}<div class="figures">\n{drawn}</div>\n' + details("The numbers of the figures", numbers)


def course(
    name: str, title: str, unit: str, level: int | None, level_words: str, values: Sequence[float], width: float
) -> str:
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
    return figure(line_chart(f"course-{name}", title, about, [line], x, y, levels), more)


def amount(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e15 else f"{value:.4g}"


# --- tables


def used(result: Mapping[str, Any]) -> str:
    shares, rates = result["utilisation"], result["throughput"]
    rows = [[name, percent(shares[name]), words] for name, words in USED.items()]
    content = table("Utilisation", ("", "share", "of what"), {"": rows}, (0, 2))
    a_second = [
        [name.removesuffix("_per_second").replace("_", " "), "-" if rate is None else amount(rate)]
        for name, rate in rates.items()
        if name != "seconds"
    ]
    content += table("Throughput", ("", "a second"), {"": a_second})
    steps, padding = result["steps"], result["padding"]
    content += f"<p>{steps['all']:,} steps.</p>\n"
    if padding["share"] is not None:
        content += (
            f"<p>Batches of whole requests, {padding['batch_size']:,} neighbours each, padded to the longest, would "
            f"have computed {padding['tokens']:,} tokens for nothing: {percent(padding['share'])} of theirs.</p>\n"
        )
    return content


def cached(result: Mapping[str, Any]) -> str:
    cache, drafts = result["prefix_cache"], result["drafts"]
    rows: list[list[object]] = [
        ["preemptions", f"{result['preemptions']:,}"],
        ["draft tokens proposed", f"{drafts['proposed']:,}"],
        ["draft tokens accepted", part(drafts["accepted"], drafts["proposed"])],
        ["requests that looked up their prefix", f"{cache['queries']:,}"],
        ["tokens of their prompts", f"{cache['query_tokens']:,}"],
        ["found in the cache", part(cache["hit_tokens"], cache["query_tokens"])],
    ]
    content = table("Prefix cache, preemptions, drafts", ("", "number"), {"": rows})
    ended = [
        [foreign(reason), part(number, cache["queries"]), ENDED.get(reason, "")]
        for reason, number in cache["ended"].items()
    ]
    return content + table("What ended the hits", ("", "requests", "why"), {"": ended}, (0, 2))


def part(number: int, all_: int) -> str:
    return f"{number:,} ({percent(number / all_)})" if all_ else f"{number:,}"


def requests(result: Mapping[str, Any]) -> str:
    counts = result["requests"]
    refused = counts["refused"]
    rows = [[name, f"{counts[name]:,}"] for name in ("arrived", "finished", "aborted", "left")]
    rows.append(["refused", f"{sum(refused.values()):,}"])
    content = table("Requests", ("", "number"), {"": rows})
    for caption, reasons in (("Refused", refused), ("Skipped in the trace", counts.get("skipped", {}))):
        if reasons:
            reason_rows = [[foreign(why), f"{number:,}"] for why, number in by_number(reasons)]
            content += table(caption, ("why", "requests"), {"": reason_rows})
    return content


def by_number(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """The most frequent first."""
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def simulated(result: Mapping[str, Any]) -> str:
    content = f"<p>Traffic: {foreign(result['traffic'])}</p>\n{cost_of_a_step(result['cost'])}"
    rows = [[foreign(name), foreign(str(value))] for name, value in result["config"].items()]
    return content + table("Configuration of the scheduler", ("setting", "value"), {"": rows}, (0, 1))


def cost_of_a_step(cost: Mapping[str, Any]) -> str:
    """Where the cost model comes from, and how well it predicts."""
    content = f"<p>Cost of a step: {foreign(cost['name'])}: {origin(cost)}</p>\n"
    errors = cost.get("errors")
    if errors is None:
        return content + "<p>Its errors are not known: it was not fitted to measured steps.</p>\n"
    rows = [
        ["steps that were measured", f"{errors['steps']:,}"],
        ["median of the errors", f"{100 * errors['median']:.3g} %"],
        ["nine of ten are at most", f"{100 * errors['p90']:.3g} %"],
        ["error of their total time", f"{100 * errors['total']:+.3g} %"],
    ]
    caption = f"Errors of the cost model, cross-validated in {plural(errors['folds'], 'fold')}"
    return content + table(caption, ("", "value"), {"": rows})
