"""The report of rollouts: each side against the exact values, what explains it, their difference, and where it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.judging.verdict import WRONG as WRONG_VERDICTS
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.report.charts import Axis, Series, chart, svg
from lfm2np.oracle.report.report import (
    OPEN,
    RIGHT,
    WRONG,
    Block,
    Figure,
    Finding,
    Report,
    Section,
    Table,
    number,
    plural,
)
from lfm2np.oracle.rollouts.exact import AT, SIDES
from lfm2np.oracle.rollouts.judge import Judged, Side
from lfm2np.oracle.rollouts.measures import mean, measures
from lfm2np.oracle.rollouts.rollout import Left

Float64 = NDArray[np.float64]
MISMATCH = "MISMATCH"
MEANS = {
    Verdict.EXACT: "Every reported log-probability is within the rounding error of its number format.",
    MISMATCH: "Each side is right by itself, and they report different things.",
    Verdict.INCONCLUSIVE: "Neither side reported log-probabilities.",
    Verdict.DRIFT: "Errors of a side are larger than its number format explains, but another format explains them.",
    Verdict.BUG: "No number format explains the errors of a side, or a named error explains them better.",
}
PARTS = {"sampler": "the sampler's error", "trainer": "the trainer's error", "meaning": "what they mean by it"}
PAIRS = (SIDES, (SIDES[0], "truth"), (SIDES[1], "truth"))
SIDE_HEADER = ("side", "verdict", "reports", "format", "tokens", "RMS", "worst", "wrong", "mean |error|, nats")
CAUSE_HEADER = ("hypothesis", "detail", "reading", "format", "nats behind", "explained", "adequate")
ERRORS = "RMS and worst in units of the format's rounding error, worst beyond one rounding step of the logits."
MORE = "--previous DIR, the checkpoint of the step before, and --chunks N,N have more causes tried"
MOST_HYPOTHESES = 4  # in a terminal
SMALLEST = 1e-8  # nats: smaller errors are drawn there


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
    return Report(
        command="rollouts",
        verdict=verdict,
        exit_code=WRONG if wrong else OPEN if verdict == Verdict.INCONCLUSIVE else RIGHT,
        means=MEANS[verdict],
        findings=findings_of(judged, verdict),
        facts={"judged": judged_words, **sides, "checkpoint": sha256},
        next_steps=[MORE] if any(side.is_unexplained for side in judged.sides.values()) else [],
        not_tested=[
            *(f"{each.count} left out ({each.kind}), first {each.first}" for each in left),
            *(f"{rollout.id} not computed: {why}" for rollout, why in judged.failed),
        ],
        sections=[section for section in sections_of(judged, figures) if section.blocks],
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
        "tokens": len(judged.parts["difference"]),
        "left_out": [{"kind": each.kind, "count": each.count, "first": each.first} for each in left],
        "not_computed": [{"id": rollout.id, "why": why} for rollout, why in judged.failed],
        "sides": {name: side_figures(side) for name, side in judged.sides.items()},
        "difference": difference_figures(judged),
        "measures": {f"{first} - {second}": measures_of(judged, first, second) for first, second in PAIRS},
    }


def side_figures(side: Side) -> dict[str, Any]:
    fit = side.fit
    figures: dict[str, Any] = {"verdict": str(side.verdict), "reasons": list(side.reasons), "cause": side.cause}
    if fit is None:
        return figures
    best = side.explained[0].fit.log_likelihood if side.explained else 0.0
    return figures | {
        "reported": int(np.count_nonzero(fit.reported)),
        "expected_reading": side.expected,
        "reading": fit.reading,
        "format": fit.format_name,
        "rms": plain(fit.rms),
        "worst": plain(float(np.max(np.abs(fit.ratios[fit.reported]), initial=0.0))),
        "wrong": int(np.count_nonzero(fit.wrong)),
        "excluded_choices": len(side.choices),
        "mean_abs_error": plain(mean_abs(fit.errors)),
        "hypotheses": [
            {
                "name": each.hypothesis.name,
                "detail": each.detail,
                "reading": each.fit.reading,
                "format": each.fit.format_name,
                "nats_behind": best - each.fit.log_likelihood,
                "explained": each.explained,
                "rms": plain(each.fit.rms),
                "adequate": each.is_adequate,
            }
            for each in side.explained
        ],
    }


def difference_figures(judged: Judged) -> dict[str, Any] | None:
    """trainer - sampler and its parts, of the tokens where all are finite; None without any.

    `share` is the part's covariance with the whole over the whole's mean square: they sum to 1.
    """
    parts = {name: values[~np.isnan(values)] for name, values in judged.parts.items()}
    whole = parts.pop("difference")
    if not len(whole):
        return None
    square = float(np.mean(whole**2))
    return {
        "tokens": len(whole),
        "mean": mean(whole),
        "largest_residual": float(np.max(np.abs(whole - sum(parts.values())))),
        "meaning": judged.meaning_words(),
        "parts": {
            name: {"mean_abs": mean_abs(part), "share": float(np.mean(part * whole)) / square if square else 0.0}
            for name, part in parts.items()
        },
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


def sections_of(judged: Judged, figures: Mapping[str, Any]) -> list[Section]:
    sides = figures["sides"]
    return [
        Section("Sampler and trainer", side_blocks(sides)),
        Section("What explains it", list(cause_tables(sides, True))),
        Section("Their difference", [*parts_table(figures["difference"]), *measures_table(figures["measures"])]),
        Section("Where the errors are", position_figure(judged)),
        Section("What else was tried", list(cause_tables(sides, False)), is_long=True),
    ]


def side_blocks(sides: Mapping[str, Any]) -> list[Block]:
    rows = [
        [
            *(name, side["verdict"], side["reading"], side["format"], side["reported"]),
            *(number(side["rms"]), number(side["worst"]), side["wrong"], number(side["mean_abs_error"])),
        ]
        for name, side in sides.items()
        if "format" in side
    ]
    title = "Each side against the exact log-probabilities"
    return [Table(title, SIDE_HEADER, rows, (0, 1, 2, 3)), ERRORS] if rows else []


def cause_tables(sides: Mapping[str, Any], of_wrong: bool) -> Iterator[Block]:
    """Of sides that are wrong, or of the others, the hypotheses."""
    for name, side in sides.items():
        rows = [
            [
                *(
                    each["name"],
                    each["detail"],
                    each["reading"],
                    each["format"],
                    f"{max(0.0, each['nats_behind']):.1f}",
                ),
                *(f"{each['explained']:.1%}", "yes" if each["adequate"] else "no"),
            ]
            for each in side.get("hypotheses", ())
        ]
        if rows and (side["verdict"] != Verdict.EXACT) is of_wrong:
            yield Table(f"Hypotheses about the {name}", CAUSE_HEADER, rows, (0, 1, 2, 3), MOST_HYPOTHESES)


def parts_table(difference: Mapping[str, Any] | None) -> list[Block]:
    if difference is None:
        return []
    rows = []
    for name, words in PARTS.items():
        part = difference["parts"][name]
        more = f": {difference['meaning']}" if name == "meaning" and difference["meaning"] else ""
        rows.append([words + more, f"{part['share']:.1%}", number(part["mean_abs"])])
    header = ("part", "share of the square", "mean |part|, nats")
    return [Table("Three parts of trainer - sampler", header, rows)]


def measures_table(by_pair: Mapping[str, Any]) -> list[Block]:
    columns = {name: values for name, values in by_pair.items() if values}
    if not columns:
        return []
    names = next(iter(columns.values()))
    rows = [[name, *(number(values[name]) for values in columns.values())] for name in names]
    return [Table("How far apart they are, in nats and shares", ("measure", *columns), rows)]


def position_figure(judged: Judged) -> list[Block]:
    """Each side's error against the token's place in the answer."""
    places = np.array([index + 1.0 for each in judged.scores for index in range(each.size)])
    dots: list[Series] = []
    for name, side in judged.sides.items():
        if side.fit is not None:
            known = np.isfinite(side.fit.errors)
            errors = np.maximum(np.abs(side.fit.errors[known]), SMALLEST)
            points = list(zip(places[known].tolist(), errors.tolist(), strict=True))
            dots.append(Series(name, points, 3 * len(dots)))
    if not any(each.points for each in dots):
        return []
    title = "Error of a log-probability by the token's place in the answer"
    axes = Axis("token of the answer, from 1", is_log=True), Axis("error, nats", is_log=True)
    drawing = chart("errors", title, "Sizes of errors, in nats.", dots, *axes)
    return [Figure(svg(drawing), f"{title}. What is at one spot shares a mark.")]
