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
from lfm2np.oracle.rollouts.where import in_words, worst_positions, wrong_sequences

Float64 = NDArray[np.float64]
MISMATCH = "MISMATCH"
MEANS = {
    Verdict.EXACT: "Every reported log-probability is within the rounding error of its number format.",
    MISMATCH: "Each side is right by itself, and they report different things.",
    Verdict.INCONCLUSIVE: "Neither side reported log-probabilities, or some sequences could not be judged.",
    Verdict.DRIFT: "Errors of a side are larger than its number format explains, but another format explains them.",
    Verdict.BUG: "No format explains the errors of a side, a named error explains them better, or they are impossible.",
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
OF_WRONG = ("id", "tokens", "wrong", "first", "worst")
OF_WORST = ("id", "position", "token_id", "reported", "exact", "error")
PLACES = "first and position: of the answer, counted from 0; worst and error in units of the format's rounding error."
MORE = "--previous DIR, the checkpoint of the step before, and --chunks N,N have more causes tried"
FIELDS = "the fields pack, and left_padding or group, have leaks between sequences and padding tried"
MOST_HYPOTHESES, MOST_WRONG = 4, 5  # in a terminal


def report_of(judged: Judged, sha256: str, left: Sequence[Left] = (), sampled_of: int | None = None) -> Report:
    """
    sha256      of the checkpoint
    left        what of the file can't be judged
    sampled_of  the number of usable rollouts in the file, if these are a sample of them
    """
    figures = {**figures_of(judged, left, sampled_of), "model": sha256}
    verdict = verdict_of(judged, left)
    wrong = verdict in (*WRONG_VERDICTS, MISMATCH)
    of = "" if sampled_of is None else f" (a sample of {sampled_of})"
    judged_words = f"{plural(figures['rollouts'], 'rollout')}{of}, {plural(figures['tokens'], 'answer token')}"
    sides = {name: f"{side.verdict}: {'; '.join(side.reasons)}" for name, side in judged.sides.items()}
    is_unexplained = any(side.verdict is Verdict.BUG and side.cause is None for side in judged.sides.values())
    lacks = not any(each.rollout.pack or each.rollout.group or each.rollout.left_padding for each in judged.scores)
    return Report(
        command="rollouts",
        verdict=verdict,
        exit_code=WRONG if wrong else OPEN if verdict == Verdict.INCONCLUSIVE else RIGHT,
        means=MEANS[verdict],
        findings=findings_of(judged, verdict, left),
        facts={"judged": judged_words, **sides, "checkpoint": sha256},
        next_steps=[*([FIELDS] if lacks else []), MORE] if is_unexplained else [],
        not_tested=[
            *(f"{each.count} left out ({each.kind}), first {each.first}" for each in left),
            *(f"{rollout.id} not computed: {why}" for rollout, why in judged.failed),
        ],
        sections=[section for section in sections_of(figures) if section.blocks],
        figures=figures,
    )


def verdict_of(judged: Judged, left: Sequence[Left] = ()) -> str:
    """The worst of the sides, BUG if one reports what it can't have computed; MISMATCH if each is right and they report
    different things; INCONCLUSIVE if neither reported anything, or not all of the file can be judged.
    """
    verdicts = [side.verdict for side in judged.sides.values()]
    if Verdict.BUG in verdicts or any(each.is_impossible for each in left):
        return str(Verdict.BUG)
    if Verdict.DRIFT in verdicts:
        return str(Verdict.DRIFT)
    if all(side.fit is not None for side in judged.sides.values()) and judged.meaning_words():
        return MISMATCH
    return str(Verdict.INCONCLUSIVE if left or judged.failed or Verdict.EXACT not in verdicts else Verdict.EXACT)


def findings_of(judged: Judged, verdict: str, left: Sequence[Left] = ()) -> list[Finding]:
    """Why; of EXACT only what was fitted because the file does not say it."""
    if verdict == MISMATCH:
        return [Finding("mismatch", f"the trainer's differ from the sampler's: {judged.meaning_words()}")]
    if verdict == Verdict.EXACT:
        fitted = [side for side in judged.sides.values() if AT in side.reading]
        return [Finding("reading", f"{side.name}: {side.reasons[1]}", evidence={"side": side.name}) for side in fitted]
    findings = [
        Finding("reason", f"impossible values in {plural(each.count, 'sequence')}, first {each.first}")
        for each in left
        if each.is_impossible
    ]
    if verdict == Verdict.INCONCLUSIVE and (count := sum(each.count for each in left) + len(judged.failed)):
        return [Finding("reason", f"{plural(count, 'sequence')} can't be judged: see what was not tested")]
    for name, side in judged.sides.items():
        if side.verdict == verdict:
            where = "" if side.fit is None or side.cause else in_words(judged.scores, side.fit, side.reported)
            words = f"{name}: {'; '.join(filter(None, (side.reasons[0], where)))}"
            findings.append(Finding("cause" if side.cause else "reason", words, evidence={"side": name}))
    return findings


# --- as numbers


def figures_of(judged: Judged, left: Sequence[Left] = (), sampled_of: int | None = None) -> dict[str, Any]:
    """For programs; the tables show them."""
    return {
        "rollouts": len(judged.scores),
        "sampled_of": sampled_of,
        "tokens": sum(each.size for each in judged.scores),
        "left_out": [{"kind": each.kind, "count": each.count, "first": each.first} for each in left],
        "not_computed": [{"id": rollout.id, "why": why} for rollout, why in judged.failed],
        "sides": {name: side_figures(side) | where_figures(judged, side) for name, side in judged.sides.items()},
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
            if not each.is_error or side.gains(each)
        ],
    }


def where_figures(judged: Judged, side: Side) -> dict[str, Any]:
    """Of a side that reports something the sequences with wrong positions, and the worst of these."""
    if side.fit is None:
        return {}
    exact, scores = judged.exact[side.name], judged.scores
    found = {
        "wrong_sequences": wrong_sequences(scores, side.fit),
        "worst_positions": worst_positions(scores, side.fit, side.reported, exact),
    }
    return {
        name: [{key: plain(value) if isinstance(value, float) else value for key, value in row.items()} for row in rows]
        for name, rows in found.items()
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
        Section("Where it is wrong", list(where_tables(sides))),
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


def where_tables(sides: Mapping[str, Any]) -> Iterator[Block]:
    """Of sides with wrong positions."""
    for name, side in sides.items():
        if side.get("wrong_sequences"):
            for title, columns, figure in (
                (f"Sequences in which the {name} is wrong", OF_WRONG, "wrong_sequences"),
                (f"The {name}'s worst log-probabilities, nats", OF_WORST, "worst_positions"),
            ):
                rows = [cells(each, {column: column for column in columns}) for each in side[figure]]
                yield Table(title, columns, rows, (0,), MOST_WRONG)
            yield PLACES


def measures_table(by_pair: Mapping[str, Any]) -> list[Block]:
    columns = {name: values for name, values in by_pair.items() if values}
    if not columns:
        return []
    names = next(iter(columns.values()))
    rows = [[name, *(number(values[name]) for values in columns.values())] for name in names]
    return [Table("How far apart they are, in nats and shares", ("measure", *columns), rows)]
