"""A whole comparison: both predictions at every position, of each quantised checkpoint, and figures of them.

Figures have the same bits on every machine: sums over positions are math.fsum's, correctly rounded and so independent
of order; exponentials are elementary's; a percentile is the value at its rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.work.place import Place, compute
from lfm2np.errors import NumericsError
from lfm2np.oracle.compare.pair import Files
from lfm2np.oracle.compare.positions import Others, compare_work
from lfm2np.oracle.compare.sequences import Scored
from lfm2np.oracle.report.report import RIGHT, Report, Section, Table, number, plural
from lfm2np.truth import elementary
from lfm2np.values import Progress
from scheduler.checksum import json_sha256

HEADER = ("checkpoint", "bits", "KL mean", "median", "99 %", "largest", "same top-1", "mismatches", "clear")
PERPLEXITY = ("checkpoint", "of", "base", "quantised", "ratio")
NOTES = (
    "KL: from the base's distribution over the whole vocabulary to the quantised, nats. Bits: stored, a weight.",
    "Mismatches: other greedy tokens; clear: the base's margin is more than a step of bfloat16 of its logits.",
)
Result = Mapping[str, Any]  # of one sequence: see positions.py
Kept = tuple[Scored, Result, Result]  # of one sequence the base's columns and the other's
Figures = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Compared:
    """The result. figures: one entry per checkpoint, in their order; failed: why sequences could not be computed."""

    base: LoadedModel
    quantised: tuple[Files, ...]
    scored: tuple[Scored, ...]
    figures: tuple[Figures, ...]
    failed: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of the figures, whose shortest digits say their bits."""
        return json_sha256(self.figures)

    @property
    def sources(self) -> list[Figures]:
        """What was scored, by where it came from: sequences, and compared positions."""
        sizes: dict[str, list[int]] = {}
        for sequence in self.scored:
            sizes.setdefault(sequence.source, []).append(sequence.stop - sequence.start)
        return [{"source": source, "sequences": len(each), "positions": sum(each)} for source, each in sizes.items()]


def compare(
    model: LoadedModel,
    quantised: Sequence[Files],
    others: Others,
    scored: Sequence[Scored],
    place: Place,
    progress: Progress | None = None,
) -> Compared:
    """The whole comparison of some checkpoints with the base. NumericsError if no sequence can be computed.

    others  loaded checkpoints, or where workers find them, by SHA-256
    """
    names = [checkpoint.sha256 for checkpoint in quantised]
    results = compute(compare_work(others), model, [sequence.item(names) for sequence in scored], place, progress)
    figures = [
        {**figures_of(scored, results, number), "bits_a_weight": checkpoint.bits_a_weight}
        for number, checkpoint in enumerate(quantised)
    ]
    failed = dict.fromkeys(
        f"{sequence.source} {sequence.name}: {columns['error']}"
        for sequence, result in zip(scored, results, strict=True)
        for columns in (result["base"], *result["quantised"])
        if "error" in columns
    )
    if not any(entry["positions"] for entry in figures):
        raise NumericsError(f"no sequence can be computed, {next(iter(failed))}")
    return Compared(model, tuple(quantised), tuple(scored), tuple(figures), tuple(failed))


# --- figures


def figures_of(scored: Sequence[Scored], results: Sequence[Result], number: int) -> Figures:
    """Of the quantised checkpoint of that number. A mismatch is another greedy token; a clear one has a margin in the
    base of more than a bfloat16 step of its logits.

    Sequences with an error are left out, and counted under `failed`. Figures without data are None.
    """
    compared = [
        (sequence, result["base"], result["quantised"][number])
        for sequence, result in zip(scored, results, strict=True)
        if "error" not in result["quantised"][number]
    ]
    kls = sorted(value for _, _, other in compared for value in other["kl"].tolist())
    clear = [base["clear"][base["best"] != other["best"]] for _, base, other in compared]  # of mismatches
    count = sum(map(len, clear))
    return {
        "failed": len(scored) - len(compared),
        "positions": len(kls),
        "kl": {
            "mean": mean(kls) if kls else None,
            "median": ranked(kls, 50),
            "p99": ranked(kls, 99),
            "largest": ranked(kls, 100),
        },
        "mismatches": {
            "count": count,
            "clear": sum(int(rows.sum()) for rows in clear),
            "agreement": (len(kls) - count) / len(kls) if kls else None,
        },
        "perplexities": perplexities(compared),
    }


def perplexities(compared: Sequence[Kept]) -> list[Figures]:
    """By source; the ratio is the exponential of the mean loss of log-probability."""
    logprobs: dict[str, tuple[list[float], list[float]]] = {}
    for sequence, *sides in compared:
        for values, side in zip(logprobs.setdefault(sequence.source, ([], [])), sides, strict=True):
            values += side["logprobs"].tolist()
    return [
        {
            "source": source,
            "tokens": len(base),
            "base": exp(-mean(base)),
            "quantised": exp(-mean(other)),
            "ratio": exp(mean([one - two for one, two in zip(base, other, strict=True)])),
        }
        for source, (base, other) in logprobs.items()
        if base
    ]


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return math.fsum(values) / len(values)


def ranked(ascending: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least `percent` of 100 do not exceed."""
    return ascending[max(0, -(-len(ascending) * percent // 100) - 1)] if ascending else None


def exp(x: float) -> float | None:
    """None beyond what elementary's exponential reaches."""
    return float(elementary.exp(np.array([x], np.float64))[0]) if x <= elementary.EXP_MAX else None


# --- as a report


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
