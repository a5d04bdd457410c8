"""What was compared, as text and as an object for programs; the rows of its tables, which the page has as well."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lfm2np.oracle.compare.compare import Compared
from lfm2np.oracle.compare.figures import Figures
from lfm2np.oracle.compare.sequences import GREEDY, OWN_TEXTS, REQUESTS, TEXT
from lfm2np.oracle.reports.parts import environment, number, plural, visible

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
    """Every name is always there; what was not asked for is null or empty."""
    return {
        "format_version": FORMAT_VERSION,
        "base": {"path": str(compared.base.path), "sha256": compared.base.sha256},
        "by": compared.by,
        "scored": [{"source": source, **counts} for source, counts in compared.sources.items()],
        "quantised": [
            {"path": str(one.files.path), "sha256": one.sha256, **figures}
            for one, figures in zip(compared.quantised, compared.figures, strict=True)
        ],
        "failed": list(compared.failed),
        "digest": compared.digest,
        "command": command,
        "environment": environment(),
    }


def as_text(compared: Compared) -> str:
    """The table, a row each; then by layer and by part, a column each."""
    lines = [f"base      {visible(str(compared.base.path))}", f"scored    {scored_words(compared)}", ""]
    lines += [*aligned([HEADER, *main_rows(compared)]), "", *NOTES]
    for title, header, rows in tables(compared):
        shown = rows[:MOST_PARTS]
        more = [f"... {len(rows) - len(shown)} more: --json and --html have them"] if len(rows) > len(shown) else []
        lines += ["", title, *aligned([header, *shown]), *more]
    lines += [f"failed    {visible(one)}" for one in compared.failed]
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
    """The name of each file, or its path where others have that name, too."""
    paths = [one.files.path for one in compared.quantised]
    count = Counter(path.name for path in paths)
    return [visible(path.name if count[path.name] == 1 else str(path)) for path in paths]


def main_rows(compared: Compared) -> list[Row]:
    return [[name, *main_cells(own)] for name, own in zip(names(compared), compared.figures, strict=True)]


def main_cells(own: Figures) -> Row:
    kl, flips, changes = own["kl"], own["flips"], own["logprobs"]
    perplexity = main_perplexity(own)
    return [
        f"{own['bits_a_weight']:.2f}",
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


def main_perplexity(own: Figures) -> Figures | None:
    """On the text if there is one."""
    found: list[Figures] = own["perplexities"]
    return next((one for one in found if one["source"] == TEXT), found[0] if found else None)


def tables(compared: Compared) -> list[tuple[str, Row, list[Row]]]:
    """Title, header, rows: whatever was asked for beside the main table."""
    own, columns = compared.figures, names(compared)
    found = [
        (
            "Relative RMS difference of the residual stream, both networks quantised up to there",
            ["after", *columns],
            [[name, *cells(rows, lambda row: number(row["error"]))] for name, rows in across(own, "layers")],
        )
    ]
    if compared.by != "none":
        parts = [(name, rows) for name, rows in across(own, "parts") if any(row and row["changed"] for row in rows)]
        if compared.by == "tensor":
            parts.sort(key=lambda part: -max(cost(row) for row in part[1] if row))
        body = [[name, *cells(rows, part_cell)] for name, rows in parts]
        title = f"Mean KL (flips) of the base with one {compared.by} alone quantised"
        found += [(title, [compared.by, *columns], body)] if body else []
    if any(one["routes"] for one in own):
        body = [
            [f"layer {name}", *cells(rows, lambda row: f"{row['moved']} of {row['rows']}")]
            for name, rows in across(own, "routes")
        ]
        found.append(("Positions whose token goes to other experts", ["layer", *columns], body))
    if any(one["perplexities"] for one in own):
        body = []
        for name, rows in across(own, "perplexities"):
            base = next(row for row in rows if row)["base"]
            body.append([f"{name}: base {digits(base, 6)}", *cells(rows, lambda row: digits(row["quantised"], 6))])
        found.append(("Perplexity", ["of", *columns], body))
    if any(one["greedy"] for one in own):
        answers = [one["greedy"] for one in own]
        body = [
            ["answers that differ", *cells(answers, lambda one: f"{one['diverged']} of {one['requests']}")],
            ["tokens before that", *cells(answers, lambda one: f"{one['same']} of {one['tokens']}")],
        ]
        found.append(("Greedy answers", ["", *columns], body))
    return found


def cells(rows: Sequence[Figures | None], told: Callable[[Figures], str]) -> Row:
    """A dash for a checkpoint of which nothing could be computed."""
    return ["-" if row is None else told(row) for row in rows]


def part_cell(row: Figures) -> str:
    return "-" if row["kl"] is None else f"{number(row['kl'])} ({row['flips']})"


def cost(row: Figures) -> float:
    """A part whose cost can't be told stands first."""
    return math.inf if row["kl"] is None else float(row["kl"])


def across(figures: Sequence[Figures], name: str) -> list[tuple[str, list[Figures | None]]]:
    """The rows of each checkpoint side by side, by their name; None where nothing could be computed."""
    by_name: list[dict[str, Figures]] = []
    for one in figures:
        by_name.append({str(row.get("name", row.get("layer", row.get("source")))): row for row in one[name] or ()})
    return [(key, [own.get(key) for own in by_name]) for key in dict.fromkeys(key for own in by_name for key in own)]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of one width each, the first to the left, all others to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
