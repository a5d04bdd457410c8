"""A comparison as text and as an object for programs; the rows of its tables, which the page shares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lfm2np.oracle.compare.compare import Compared
from lfm2np.oracle.compare.figures import Figures
from lfm2np.oracle.compare.sequences import GREEDY, OWN_TEXTS, REQUESTS, TEXT
from lfm2np.oracle.reports.report_parts import aligned, environment, number, plural, visible

FORMAT_VERSION = 1
LARGE_RATIO = 1000.0
MOST_PARTS = 20  # of a table by tensor on a terminal
Row = list[str]
HEADER = (
    *("checkpoint", "bits", "KL mean", "median", "99 %", "largest", "same top-1", "flips", "clear"),
    *("log-prob", "perplexity", "ratio"),
)
NOTES = (
    "KL: from the base's distribution over the whole vocabulary to the quantised, nats. Bits: stored, a weight.",
    "Flips: other greedy tokens; clear: the base's margin is more than a step of bfloat16 of its logits.",
    "log-prob: mean change of that of the given tokens. Perplexity: of the text if there is one.",
)


def as_json(compared: Compared, command: str) -> dict[str, Any]:
    """Every name is always there; what was not requested is null or empty."""
    return {
        "format_version": FORMAT_VERSION,
        "base": {"path": str(compared.base.path), "sha256": compared.base.sha256},
        "by": compared.by,
        "scored": [{"source": source, **counts} for source, counts in compared.sources.items()],
        "quantised": [
            {"path": str(checkpoint.files.path), "sha256": checkpoint.sha256, **figures}
            for checkpoint, figures in zip(compared.quantised, compared.figures, strict=True)
        ],
        "failed": list(compared.failed),
        "digest": compared.digest,
        "command": command,
        "environment": environment(),
    }


def as_text(compared: Compared) -> str:
    """The main table; then tables by layer and by part, one column per checkpoint."""
    lines = [f"base      {visible(str(compared.base.path))}", f"scored    {scored_words(compared)}", ""]
    lines += [*aligned([HEADER, *main_rows(compared)], left=(0,)), "", *NOTES]
    for title, header, rows in tables(compared):
        shown = rows[:MOST_PARTS]
        more = [f"... {len(rows) - len(shown)} more: --json and --html have them"] if len(rows) > len(shown) else []
        lines += ["", title, *aligned([header, *shown], left=(0,)), *more]
    lines += [f"failed    {visible(failure)}" for failure in compared.failed]
    return "\n".join([*lines, "", f"digest    {compared.digest}"])


def scored_words(compared: Compared) -> str:
    words = []
    for source, counts in compared.sources.items():
        count = counts["sequences"]
        nouns = {REQUESTS: plural(count, "request"), TEXT: plural(count, "window") + " of the text"}
        nouns |= {GREEDY: plural(count, "greedy answer"), OWN_TEXTS: f"the {count} {OWN_TEXTS}, as none were given"}
        words.append(f"{nouns[source]} ({plural(counts['positions'], 'position')})")
    return ", ".join(words)


def names(compared: Compared) -> list[str]:
    """The name of each file, or its path if others have the same name."""
    paths = [checkpoint.files.path for checkpoint in compared.quantised]
    count = Counter(path.name for path in paths)
    return [visible(path.name if count[path.name] == 1 else str(path)) for path in paths]


def main_rows(compared: Compared) -> list[Row]:
    return [[name, *main_cells(figures)] for name, figures in zip(names(compared), compared.figures, strict=True)]


def main_cells(figures: Figures) -> Row:
    kl, flips, changes = figures["kl"], figures["flips"], figures["logprobs"]
    perplexity = main_perplexity(figures)
    return [
        f"{figures['bits_a_weight']:.2f}",
        *(number(kl[name]) for name in ("mean", "median", "p99", "largest")),
        "-" if flips["agreement"] is None else f"{100 * flips['agreement']:.2f} %",
        str(flips["count"]),
        str(flips["clear"]),
        number(changes["mean"]) if changes else "-",
        digits(perplexity["quantised"], 5) if perplexity else "-",
        ratio_cell(perplexity["ratio"]) if perplexity else "-",
    ]


def digits(value: float | None, count: int) -> str:
    return "-" if value is None else f"{value:.{count}g}"


def ratio_cell(value: float | None) -> str:
    return f"{value:.5f}" if value is not None and value < LARGE_RATIO else digits(value, 6)


def main_perplexity(figures: Figures) -> Figures | None:
    perplexities: list[Figures] = figures["perplexities"]
    of_text = [perplexity for perplexity in perplexities if perplexity["source"] == TEXT]
    return next(iter(of_text or perplexities), None)


def tables(compared: Compared) -> list[tuple[str, Row, list[Row]]]:
    """Title, header, rows: what was requested beside the main table."""
    figures, columns = compared.figures, names(compared)
    parts = [(name, rows) for name, rows in across(figures, "parts") if any(row and row["changed"] for row in rows)]
    if compared.by == "tensor":
        parts.sort(key=lambda part: -max(cost(row) for row in part[1] if row))
    layers, routes, answers = across(figures, "layers"), across(figures, "routes"), [each["greedy"] for each in figures]
    perplexities = []
    for name, rows in across(figures, "perplexities"):
        base = next(row for row in rows if row)["base"]
        perplexities.append([f"{name}: base {digits(base, 6)}", *cells(rows, lambda row: digits(row["quantised"], 6))])
    greedy = [
        ["answers that differ", *cells(answers, lambda answers: f"{answers['diverged']} of {answers['requests']}")],
        ["tokens before that", *cells(answers, lambda answers: f"{answers['same']} of {answers['tokens']}")],
    ]
    bodies = [
        (
            *("Relative RMS difference of the residual stream, both networks quantised up to there", "after"),
            [[name, *cells(rows, lambda row: number(row["error"]))] for name, rows in layers],
        ),
        (
            *(f"Mean KL (flips) of the base with one {compared.by} alone quantised", compared.by),
            [[name, *cells(rows, part_cell)] for name, rows in parts],
        ),
        (
            *("Positions whose token goes to other experts", "layer"),
            [[f"layer {name}", *cells(rows, lambda row: f"{row['moved']} of {row['rows']}")] for name, rows in routes],
        ),
        ("Perplexity", "of", perplexities),
        ("Greedy answers", "", greedy if any(answers) else []),
    ]
    return [(title, [head, *columns], body) for title, head, body in bodies if body]


def cells(rows: Sequence[Figures | None], as_cell: Callable[[Figures], str]) -> Row:
    return ["-" if row is None else as_cell(row) for row in rows]


def part_cell(row: Figures) -> str:
    return "-" if row["kl"] is None else f"{number(row['kl'])} ({row['flips']})"


def cost(row: Figures) -> float:
    """A part with unknown cost comes first."""
    return math.inf if row["kl"] is None else float(row["kl"])


def across(figures: Sequence[Figures], name: str) -> list[tuple[str, list[Figures | None]]]:
    """The rows of all checkpoints side by side, by their name; None for a missing one."""
    by_name: list[dict[str, Figures]] = []
    for entry in figures:
        by_name.append({str(row.get("name", row.get("layer", row.get("source")))): row for row in entry[name] or ()})
    return [
        (key, [rows.get(key) for rows in by_name]) for key in dict.fromkeys(key for rows in by_name for key in rows)
    ]
