"""A comparison as a report: a row a checkpoint, and perplexities by what was scored."""

from __future__ import annotations

from collections import Counter

from lfm2np.oracle.compare.compare import Compared, Figures
from lfm2np.oracle.report.report import RIGHT, Report, Section, Table, number, plural

HEADER = ("checkpoint", "bits", "KL mean", "median", "99 %", "largest", "same top-1", "mismatches", "clear")
PERPLEXITY = ("checkpoint", "of", "base", "quantised", "ratio")
NOTES = (
    "KL: from the base's distribution over the whole vocabulary to the quantised, nats. Bits: stored, a weight.",
    "Mismatches: other greedy tokens; clear: the base's margin is more than a step of bfloat16 of its logits.",
)


def report_of(compared: Compared) -> Report:
    """`figures` are described by schemas/compare.schema.json: what there is no data for is null or empty."""
    named = list(zip(names_of(compared), compared.figures, strict=True))
    perplexities = [
        [name, each["source"], *(digits(each[side]) for side in ("base", "quantised", "ratio"))]
        for name, figures in named
        for each in figures["perplexities"]
    ]
    return Report(
        command="compare",
        verdict="compared",
        exit_code=RIGHT,
        means="Both sides are computed in exact arithmetic: whatever differs here comes from the weights.",
        facts={
            "base": str(compared.base.path),
            "scored": ", ".join(
                f"{each['sequences']} {each['source']} ({plural(each['positions'], 'position')})"
                for each in compared.sources
            ),
            "digest": compared.digest,
            **{f"not computed {index}": failure for index, failure in enumerate(compared.failed, 1)},
        },
        sections=[
            Section("Figures", [Table("", HEADER, [main_row(*each) for each in named]), *NOTES]),
            Section("Perplexity", [Table("", PERPLEXITY, perplexities, (0, 1))] if perplexities else []),
        ],
        figures={
            "base": {"path": str(compared.base.path), "sha256": compared.base.sha256},
            "scored": compared.sources,
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


def main_row(name: str, figures: Figures) -> list[str]:
    kl, mismatches = figures["kl"], figures["mismatches"]
    agreement = mismatches["agreement"]
    return [
        *(name, f"{figures['bits_a_weight']:.2f}"),
        *(number(kl[which]) for which in ("mean", "median", "p99", "largest")),
        "-" if agreement is None else f"{100 * agreement:.2f} %",
        *(str(mismatches[which]) for which in ("count", "clear")),
    ]


def digits(value: float | None) -> str:
    return "-" if value is None else f"{value:#.6g}"
