"""Figures of a comparison: the same bits on every machine.

Sums over positions are math.fsum's, correctly rounded and so independent of order; exponentials are elementary's; a
percentile is the value at its rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lfm2np.oracle.compare.sequences import Scored
from lfm2np.truth import elementary

Result = Mapping[str, Any]  # of one sequence: see positions.py
Kept = tuple[Scored, Result, Result]  # of one sequence the base's columns and the other's
Figures = dict[str, Any]
MOST_MISMATCHES = 100  # that are listed


def figures_of(scored: Sequence[Scored], results: Sequence[Result], number: int) -> Figures:
    """Of the quantised checkpoint of that number.

    Sequences with an error are left out, and counted under `failed`. Figures without data are None.
    """
    compared = [
        (sequence, result["base"], result["quantised"][number])
        for sequence, result in zip(scored, results, strict=True)
        if "error" not in result["quantised"][number]
    ]
    kls = sorted(value for _, _, other in compared for value in other["kl"].tolist())
    listed = [mismatch for entry in compared for mismatch in mismatches(*entry)]
    listed.sort(key=lambda mismatch: (-mismatch["margin"], mismatch["name"], mismatch["row"]))
    return {
        "failed": len(scored) - len(compared),
        "positions": len(kls),
        "kl": {
            "mean": mean(kls) if kls else None,
            "median": ranked(kls, 50),
            "p99": ranked(kls, 99),
            "largest": kls[-1] if kls else None,
        },
        "mismatches": {
            "count": len(listed),
            "clear": sum(not mismatch["near_tie"] for mismatch in listed),
            "agreement": (len(kls) - len(listed)) / len(kls) if kls else None,
        },
        "perplexities": perplexities(compared),
        "listed_mismatches": listed[:MOST_MISMATCHES],
    }


def mismatches(sequence: Scored, base: Result, other: Result) -> Iterator[Figures]:
    """Where the greedy token differs. A near tie: the base's margin is at most a bfloat16 step of its logits."""
    for row in np.flatnonzero(base["best"] != other["best"]).tolist():
        margin = float(base["margins"][row])
        yield {
            "source": sequence.source,
            "name": sequence.name,
            "row": sequence.start + row,
            "base_token_id": int(base["best"][row]),
            "token_id": int(other["best"][row]),
            "margin": margin,
            "kl": float(other["kl"][row]),
            "near_tie": margin <= float(base["steps"][row]),
        }


def perplexities(compared: Sequence[Kept]) -> list[Figures]:
    """By source; the ratio is the exponential of the mean loss of log-probability."""
    entries = []
    for source in dict.fromkeys(sequence.source for sequence, _, _ in compared):
        pairs = [
            pair
            for sequence, base, other in compared
            if sequence.source == source
            for pair in zip(base["logprobs"].tolist(), other["logprobs"].tolist(), strict=True)
        ]
        if pairs:
            means = [mean([-value for value in values]) for values in zip(*pairs, strict=True)]
            loss = mean([base - other for base, other in pairs])
            figures = {"base": exp(means[0]), "quantised": exp(means[1]), "ratio": exp(loss)}
            entries.append({"source": source, "tokens": len(pairs), **figures})
    return entries


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return math.fsum(values) / len(values)


def ranked(ascending: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least `percent` of 100 do not exceed."""
    return ascending[max(0, -(-len(ascending) * percent // 100) - 1)] if ascending else None


def exp(x: float) -> float | None:
    """None beyond what elementary's exponential reaches."""
    return float(elementary.exp(np.array([x], np.float64))[0]) if x <= elementary.EXP_MAX else None
