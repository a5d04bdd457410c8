"""A comparison as a report: a row a checkpoint, perplexities by source, token mismatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lfm2np.oracle.compare.compare import Compared, Figures
from lfm2np.oracle.compare.sequences import TEXT
from lfm2np.oracle.report.report import RIGHT, Report, Section, Table, number, plural

HEADER = (
    *("checkpoint", "bits", "KL mean", "median", "99 %", "largest", "same top-1", "mismatches", "clear"),
    *("perplexity", "ratio"),
)
NOTES = (
    "KL: from the base's distribution over the whole vocabulary to the quantised, nats. Bits: stored, a weight.",
    "Mismatches: other greedy tokens; clear: the base's margin is more than a step of bfloat16 of its logits.",
    "Perplexity: of the text if there is one, else of the requests' completions.",
)


def report_of(compared: Compared) -> Report:
    """`figures` are described by schemas/compare.schema.json: what there is no data for is null or empty."""
    failed = {f"not computed {index}": failure for index, failure in enumerate(compared.failed, 1)}
    names = names_of(compared)
    mismatches = mismatch_table(compared.figures, names)
    rows = [[name, *main_cells(figures)] for name, figures in zip(names, compared.figures, strict=True)]
    return Report(
        command="compare",
        verdict="compared",
        exit_code=RIGHT,
        means="Both sides are computed in exact arithmetic: whatever differs here comes from the weights.",
        facts={
            "base": str(compared.base.path),
            "scored": ", ".join(
                f"{counts['sequences']} {source} ({plural(counts['positions'], 'position')})"
                for source, counts in compared.sources.items()
            ),
            "digest": compared.digest,
            **failed,
        },
        sections=[
            Section("Figures", [Table("", HEADER, rows), *NOTES, *perplexity_tables(compared.figures, names)]),
            Section("Token mismatches", [mismatches] if mismatches.rows else [], is_long=True),
        ],
        figures={
            "base": {"path": str(compared.base.path), "sha256": compared.base.sha256},
            "scored": [{"source": source, **counts} for source, counts in compared.sources.items()],
            "quantised": [
                {"path": str(checkpoint.path), "sha256": checkpoint.sha256, **figures}
                for checkpoint, figures in zip(compared.quantised, compared.figures, strict=True)
            ],
            "failed": list(compared.failed),
            "digest": compared.digest,
        },
    )


def names_of(compared: Compared) -> list[str]:
    """The name of each file, or its path if others have the same name."""
    paths = [checkpoint.path for checkpoint in compared.quantised]
    count = Counter(path.name for path in paths)
    return [path.name if count[path.name] == 1 else str(path) for path in paths]


def main_cells(figures: Figures) -> list[str]:
    kl, mismatches, perplexities = figures["kl"], figures["mismatches"], figures["perplexities"]
    of_text = [perplexity for perplexity in perplexities if perplexity["source"] == TEXT]
    perplexity = next(iter(of_text or perplexities), {"quantised": None, "ratio": None})
    agreement = mismatches["agreement"]
    return [
        f"{figures['bits_a_weight']:.2f}",
        *(number(kl[name]) for name in ("mean", "median", "p99", "largest")),
        "-" if agreement is None else f"{100 * agreement:.2f} %",
        *(str(mismatches[name]) for name in ("count", "clear")),
        digits(perplexity["quantised"], 5),
        digits(perplexity["ratio"], 6),
    ]


def digits(value: float | None, count: int) -> str:
    return "-" if value is None else f"{value:#.{count}g}"


def perplexity_tables(figures: Sequence[Figures], names: Sequence[str]) -> list[Table]:
    """A row a source, a column a checkpoint."""
    rows: dict[str, list[str]] = {}
    for column, entry in enumerate(figures):
        for perplexity in entry["perplexities"]:
            start = [perplexity["source"], digits(perplexity["base"], 6), *["-"] * len(names)]
            row = rows.setdefault(perplexity["source"], start)
            row[2 + column] = digits(perplexity["quantised"], 6)
    return [Table("Perplexity", ("of", "base", *names), list(rows.values()))] if rows else []


def mismatch_table(figures: Sequence[Figures], names: Sequence[str]) -> Table:
    header = ("checkpoint", "sequence", "row", "base's token", "quantised", "margin, nats", "KL, nats", "near tie")
    rows = [
        [
            *(name, f"{mismatch['source']} {mismatch['name']}"),
            *(mismatch["row"], mismatch["base_token_id"], mismatch["token_id"]),
            *(number(mismatch["margin"]), number(mismatch["kl"]), "yes" if mismatch["near_tie"] else "no"),
        ]
        for name, entry in zip(names, figures, strict=True)
        for mismatch in entry["listed_mismatches"]
    ]
    return Table("The widest margins first", header, rows, (0, 1))
