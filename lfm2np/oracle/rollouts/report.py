"""The report of rollouts: each side against the exact values, what explains it, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.judging.verdict import WRONG as WRONG_VERDICTS
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Block, Finding, Report, Section, Table, number, plural
from lfm2np.oracle.rollouts.exact import AT, SIDES
from lfm2np.oracle.rollouts.judge import Judged, Side
from lfm2np.oracle.rollouts.measures import mean, measures
from lfm2np.oracle.rollouts.reading import Left

Float64 = NDArray[np.float64]
MISMATCH = "MISMATCH"
MEANS = {
    Verdict.EXACT: "Every reported log-probability is within the rounding error of its number format.",
    MISMATCH: "Each side is right by itself, and they report different things.",
    Verdict.INCONCLUSIVE: "Neither side reported log-probabilities.",
    Verdict.DRIFT: "Errors of a side are larger than its number format explains, but another format explains them.",
    Verdict.BUG: "No number format explains the errors of a side, or a named error explains them better.",
}
PAIRS = (SIDES, (SIDES[0], "truth"), (SIDES[1], "truth"))
# Columns of the tables, and the names of their figures.
OF_SIDE = {"verdict": "verdict", "reports": "reading", "format": "format", "tokens": "reported", "RMS": "rms"}
OF_SIDE |= {"worst": "worst", "wrong": "wrong", "mean |error|, nats": "mean_abs_error"}
OF_CAUSE = {"hypothesis": "name", "detail": "detail", "reading": "reading", "format": "format", "wrong": "wrong"}
OF_CAUSE |= {"RMS": "rms", "explained": "explained"}
ERRORS = "RMS and worst in units of the format's rounding error, worst beyond one rounding step of the logits."
EXPLAINED = (
    "wrong: positions further off than the format explains; explained: the share that the hypothesis puts right."
)
MORE = "--previous DIR, the checkpoint of the step before, and --chunks N,N have more causes tried"
MOST_HYPOTHESES = 4  # in a terminal


def report_of(judged: Judged, sha256: str, left: Sequence[Left] = (), sampled_of: int | None = None) -> Report:
    """
    sha256      of the checkpoint
    left        what of the file can't be judged
    sampled_of  the number of usable rollouts in the file, if these are a sample of them
    """
    figures = {**figures_of(judged, left, sampled_of), "model": sha256}
    verdict = verdict_of(judged)
    wrong = verdict in (*WRONG_VERDICTS, MISMATCH)
    of = "" if sampled_of is None else f" (a sample of {sampled_of})"
    judged_words = f"{plural(figures['rollouts'], 'rollout')}{of}, {plural(figures['tokens'], 'answer token')}"
    sides = {name: f"{side.verdict}: {'; '.join(side.reasons)}" for name, side in judged.sides.items()}
    is_unexplained = any(side.verdict is Verdict.BUG and side.cause is None for side in judged.sides.values())
    return Report(
        command="rollouts",
        verdict=verdict,
        exit_code=WRONG if wrong else OPEN if verdict == Verdict.INCONCLUSIVE else RIGHT,
        means=MEANS[verdict],
        findings=findings_of(judged, verdict),
        facts={"judged": judged_words, **sides, "checkpoint": sha256},
        next_steps=[MORE] if is_unexplained else [],
        not_tested=[
            *(f"{each.count} left out ({each.kind}), first {each.first}" for each in left),
            *(f"{rollout.id} not computed: {why}" for rollout, why in judged.failed),
        ],
        sections=[section for section in sections_of(figures) if section.blocks],
        figures=figures,
    )


def verdict_of(judged: Judged) -> str:
    """The worst of the sides; MISMATCH if each is right and they report different things, INCONCLUSIVE if neither
    reported anything.
    """
    verdicts = [side.verdict for side in judged.sides.values()]
    for verdict in (Verdict.BUG, Verdict.DRIFT):
        if verdict in verdicts:
            return str(verdict)
    if all(side.fit is not None for side in judged.sides.values()) and judged.meaning_words():
        return MISMATCH
    return str(Verdict.EXACT if Verdict.EXACT in verdicts else Verdict.INCONCLUSIVE)


def findings_of(judged: Judged, verdict: str) -> list[Finding]:
    """Why; of EXACT only what was fitted because the file does not say it."""
    if verdict == MISMATCH:
        return [Finding("mismatch", f"the trainer's differ from the sampler's: {judged.meaning_words()}")]
    if verdict == Verdict.EXACT:
        fitted = [side for side in judged.sides.values() if AT in side.reading]
        return [Finding("reading", f"{side.name}: {side.reasons[1]}", evidence={"side": side.name}) for side in fitted]
    return [
        Finding("cause" if side.cause else "reason", f"{name}: {side.reasons[0]}", evidence={"side": name})
        for name, side in judged.sides.items()
        if side.verdict == verdict
    ]


# --- as numbers


def figures_of(judged: Judged, left: Sequence[Left] = (), sampled_of: int | None = None) -> dict[str, Any]:
    """For programs; the tables show them."""
    return {
        "rollouts": len(judged.scores),
        "sampled_of": sampled_of,
        "tokens": sum(each.size for each in judged.scores),
        "left_out": [{"kind": each.kind, "count": each.count, "first": each.first} for each in left],
        "not_computed": [{"id": rollout.id, "why": why} for rollout, why in judged.failed],
        "sides": {name: side_figures(side) for name, side in judged.sides.items()},
        "meaning": judged.meaning_words(),
        "measures": {f"{first} - {second}": measures_of(judged, first, second) for first, second in PAIRS},
    }


def side_figures(side: Side) -> dict[str, Any]:
    fit = side.fit
    figures: dict[str, Any] = {"verdict": str(side.verdict), "reasons": list(side.reasons), "cause": side.cause}
    if fit is None:
        return figures
    return figures | {
        "reported": int(np.count_nonzero(fit.reported)),
        "expected_reading": side.expected,
        "reading": fit.reading,
        "format": fit.format_name,
        "rms": plain(fit.rms),
        "worst": plain(float(np.max(np.abs(fit.ratios[fit.reported]), initial=0.0))),
        "wrong": fit.num_wrong,
        "excluded_choices": len(side.choices),
        "mean_abs_error": plain(mean_abs(fit.errors)),
        "hypotheses": [
            {
                "name": each.name,
                "detail": each.detail,
                "reading": each.reading,
                "format": each.format_name,
                "wrong": each.num_wrong,
                "rms": plain(each.rms),
                "explained": side.share(each),
            }
            for each in side.explained
        ],
    }


def measures_of(judged: Judged, first: str, second: str) -> dict[str, float | None] | None:
    """Of the tokens where both are finite; the truth is that of what the side reports. None without any."""
    a = judged.sides[first].reported
    b = judged.exact[first] if second == "truth" else judged.sides[second].reported
    known = np.isfinite(a) & np.isfinite(b)
    return {name: plain(value) for name, value in measures(a[known], b[known]).items()} if known.any() else None


def mean_abs(values: Float64) -> float:
    """Of those that are finite."""
    finite = values[np.isfinite(values)]
    return mean(np.abs(finite)) if len(finite) else 0.0


def plain(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


# --- as tables


def sections_of(figures: Mapping[str, Any]) -> list[Section]:
    sides = figures["sides"]
    rows = [[name, *cells(side, OF_SIDE)] for name, side in sides.items() if "format" in side]
    table = Table("Each side against the exact log-probabilities", ("side", *OF_SIDE), rows, (0, 1, 2, 3))
    return [
        Section("Sampler and trainer", [table, ERRORS] if rows else []),
        Section("What explains it", list(cause_tables(sides))),
        Section("Their difference", measures_table(figures["measures"])),
    ]


def cells(figures: Mapping[str, Any], columns: Mapping[str, str]) -> list[object]:
    """Numbers as words."""
    values = [figures[name] for name in columns.values()]
    return [number(value) if value is None or isinstance(value, float) else value for value in values]


def cause_tables(sides: Mapping[str, Any]) -> Iterator[Block]:
    """Of sides that are wrong, the hypotheses."""
    for name, side in sides.items():
        rows = [cells(each, OF_CAUSE) for each in side.get("hypotheses", ())]
        if rows and side["verdict"] != Verdict.EXACT:
            yield Table(f"Hypotheses about the {name}", tuple(OF_CAUSE), rows, (0, 1, 2, 3), MOST_HYPOTHESES)
            yield EXPLAINED


def measures_table(by_pair: Mapping[str, Any]) -> list[Block]:
    columns = {name: values for name, values in by_pair.items() if values}
    if not columns:
        return []
    names = next(iter(columns.values()))
    rows = [[name, *(number(values[name]) for values in columns.values())] for name in names]
    return [Table("How far apart they are, in nats and shares", ("measure", *columns), rows)]
