"""A comparison as a report: the main table; by layer and by part, a column a checkpoint; token mismatches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lfm2np.oracle.compare.compare import Compared
from lfm2np.oracle.compare.figures import Figures
from lfm2np.oracle.compare.sequences import GREEDY, OWN_TEXTS, REQUESTS, TEXT
from lfm2np.oracle.report.charts import MOST_LINES, Axis, Line, line_chart, svg
from lfm2np.oracle.report.report import RIGHT, Block, Figure, Report, Section, Table, number, plural

LARGE_RATIO = 1000.0
MOST_NAME = 16  # characters of a name in a legend: the last, which say the type
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


def report_of(compared: Compared) -> Report:
    """`figures` are described by schemas/compare.schema.json: what was not requested is null or empty."""
    failed = {f"not computed {index}": failure for index, failure in enumerate(compared.failed, 1)}
    return Report(
        command="compare",
        verdict="compared",
        exit_code=RIGHT,
        means="Both sides are computed in exact arithmetic: whatever differs here comes from the weights.",
        facts={
            "base": str(compared.base.path),
            "scored": scored_words(compared),
            "digest": compared.digest,
            **failed,
        },
        sections=[
            Section("Figures", [Table("", HEADER, main_rows(compared)), *NOTES]),
            Section("Where it comes from", [*drawn(compared), *tables(compared)]),
            Section("Flips", list(flips(compared)), is_long=True),
            Section("Errors of the weights", list(weights(compared)), is_long=True),
        ],
        figures={
            "base": {"path": str(compared.base.path), "sha256": compared.base.sha256},
            "by": compared.by,
            "scored": [{"source": source, **counts} for source, counts in compared.sources.items()],
            "quantised": [
                {"path": str(checkpoint.files.path), "sha256": checkpoint.sha256, **figures}
                for checkpoint, figures in zip(compared.quantised, compared.figures, strict=True)
            ],
            "failed": list(compared.failed),
            "digest": compared.digest,
        },
    )


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
    return [path.name if count[path.name] == 1 else str(path) for path in paths]


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


# --- where it comes from


def drawn(compared: Compared) -> Iterator[Block]:
    """How the residual stream drifts, and the cost of each layer alone, if that was requested."""
    legends = [Path(name).stem[-MOST_NAME:] for name in names(compared)]
    wanted = [("layers", "error", "Relative RMS difference of the residual stream, by layer")]
    wanted += [("parts", "kl", "Mean KL of one layer alone quantised")] if compared.by == "layer" else []
    for rows, value, title in wanted:
        lines = []
        for legend, figures in zip(legends, compared.figures, strict=True):
            points = [(float(place), row[value]) for place, row in enumerate(figures[rows]) if row[value]]
            lines.append(Line(legend, points))
        if any(line.points for line in lines):
            more = f" The first {MOST_LINES} of {len(lines)} checkpoints." if len(lines) > MOST_LINES else ""
            about = (
                "By place in the network, the embedding first, on a log scale; the numbers stand in the table below."
            )
            chart = line_chart(rows, title, about, lines, Axis("place in the network"), Axis("", is_log=True))
            yield Figure(svg(chart), f"{title}, log scale.{more}")


def tables(compared: Compared) -> list[Table]:
    """What was requested beside the main table, a column a checkpoint."""
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
    return [Table(title, [head, *columns], body) for title, head, body in bodies if body]


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


# --- by position and by tensor


def flips(compared: Compared) -> Iterator[Table | str]:
    header = ("sequence", "row", "base's token", "quantised", "margin, nats", "KL, nats", "near tie")
    for name, figures in zip(names(compared), compared.figures, strict=True):
        rows = [
            [
                f"{entry['source']} {entry['name']}",
                *(entry["row"], entry["base_token_id"], entry["token_id"]),
                *(number(entry["margin"]), number(entry["kl"]), "yes" if entry["near_tie"] else "no"),
            ]
            for entry in figures["listed_flips"]
        ]
        title = f"{name}: {plural(figures['flips']['count'], 'flip')}, the widest margins first"
        yield Table(title, header, rows) if rows else title


def weights(compared: Compared) -> Iterator[Table]:
    header = ("tensor", "base", "quantised", "weights", "relative RMS error")
    for name, figures in zip(names(compared), compared.figures, strict=True):
        rows = [
            [entry["name"], entry["base_type"], entry["type"], f"{entry['weights']:,}", number(entry["error"])]
            for entry in figures["tensors"]
        ]
        yield Table(f"{name}: errors of the weights, by tensor", header, rows, (0, 1, 2))
