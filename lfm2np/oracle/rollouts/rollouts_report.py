"""The report of rollouts: each side against the exact values, what explains it, their difference, and where it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.judging.verdict import WRONG as WRONG_VERDICTS
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.report.charts import Axis, Dots, scatter_chart, svg
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
from lfm2np.oracle.rollouts.figures import figures_of
from lfm2np.oracle.rollouts.reported_side import SIDES
from lfm2np.oracle.rollouts.rollout import Left
from lfm2np.oracle.rollouts.rollouts import Judged
from lfm2np.oracle.rollouts.scores import OTHERS

Float64 = NDArray[np.float64]
MISMATCH = "MISMATCH"
MEANS = {
    Verdict.EXACT: "Every reported log-probability is within the rounding error of its number format.",
    MISMATCH: "Each side is right by itself, and they report different things.",
    Verdict.INCONCLUSIVE: "Neither side reported log-probabilities.",
    Verdict.DRIFT: "Errors of a side are larger than its number format explains, but another format explains them.",
    Verdict.BUG: "No number format explains the errors of a side, or a named error explains them better.",
}
PARTS = {
    "sampler": "the sampler's error",
    "trainer": "the trainer's error",
    "meaning": "what they mean by it",
}
FIRST_MEASURES = (  # of the table; a terminal shows no others
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "train/train_rollout_logprob_abs_diff",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/ppl_ratio",
    "rollout_corr/chi2_token",
    "token_mult_prob_error",
    "share of ratios outside [0.9, 1.1]",
)
SIDE_HEADER = ("side", "verdict", "reports", "format", "tokens", "RMS", "worst", "wrong", "mean |error|, nats")
CAUSE_HEADER = ("hypothesis", "detail", "reading", "format", "nats a token behind", "explained", "adequate")
ERRORS = "RMS and worst in units of the format's rounding error, worst beyond one rounding step of the logits."
MOST_HYPOTHESES = 4  # in a terminal
SMALLEST = 1e-8  # nats: smaller errors are drawn there
LEAST_LOGPROB, MOST_LOG_RATIO = -20.0, 20.0  # nats, of what is drawn
LOOKS = {SIDES[0]: 0, SIDES[1]: 3}


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
        next_steps=next_steps(judged),
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
        fits = {name: side.fit.reading for name, side in judged.sides.items() if side.fit is not None}
        return [
            Finding("reading", f"the {name}'s are {reading}, which the file does not say", evidence={"side": name})
            for name, reading in fits.items()
            if reading in OTHERS
        ]
    return [
        Finding("cause" if side.cause else "reason", f"{name}: {side.reasons[0]}", evidence={"side": name})
        for name, side in judged.sides.items()
        if side.verdict == verdict
    ]


def next_steps(judged: Judged) -> list[str]:
    """What may find a cause that was not found."""
    if any(side.verdict is Verdict.BUG and side.cause is None for side in judged.sides.values()):
        return ["--previous DIR, the checkpoint of the step before, and --chunks N,N have more causes tried"]
    return []


def sections_of(judged: Judged, figures: Mapping[str, Any]) -> list[Section]:
    return [
        Section("Sampler and trainer", side_blocks(figures["sides"])),
        Section("What explains it", list(causes(figures["sides"], True))),
        Section("Their difference", difference(judged, figures["difference"])),
        Section("Measures", measures_table(figures["measures"])),
        Section("Where the errors are", [*position_figure(judged), *groups(figures["by"])]),
        Section("What else was tried", list(causes(figures["sides"], False)), is_long=True),
    ]


# --- tables


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


def causes(sides: Mapping[str, Any], of_wrong: bool) -> Iterator[Block]:
    """Of sides that are wrong, or of the others: the hypotheses, and what the cause leaves."""
    for name, side in sides.items():
        if (side["verdict"] != Verdict.EXACT) is not of_wrong:
            continue
        rows = [
            [
                *(each["name"], each["detail"], each["reading"], each["format"]),
                *(f"{each['behind_the_best_per_token']:.3f}", f"{each['explained']:.1%}"),
                "yes" if each["adequate"] else "no",
            ]
            for each in side.get("hypotheses", ())
        ]
        if rows:
            yield Table(f"Hypotheses about the {name}", CAUSE_HEADER, rows, (0, 1, 2, 3), MOST_HYPOTHESES)
        if cause := side.get("cause"):
            yield (
                f"{cause['words']} explains {cause['explained']:.1%} of the squared error; what is left is "
                f"{number(cause['rms'])} of {cause['format']}'s rounding error (RMS, {cause['tokens']} tokens)."
            )
            if cause["clipped"]:
                before, after = (sum(cause["clipped"][when].values()) for when in ("before", "after"))
                yield f"Clipped ratios of these tokens: {before:.2%} as they are, {after:.2%} with that mended."


def difference(judged: Judged, parts: Mapping[str, Any] | None) -> list[Block]:
    if parts is None:
        return []
    low, high = parts["clip"]
    below, above = parts["clipped"]["below"], parts["clipped"]["above"]
    words = (
        f"trainer - sampler: {number(parts['mean_abs'])} nats on the average (absolute), at most "
        f"{number(parts['largest'])}; ratio below {low:g}: {below:.2%}, above {high:g}: {above:.2%}"
    )
    if "mean_abs_interval" in parts:
        least, most = map(number, parts["mean_abs_interval"])
        words += f"; in all of the file {least} to {most} (95 %)"
    rows = []
    for name, part_words in PARTS.items():
        part = parts["parts"][name]
        more = f": {parts['meaning']}" if name == "meaning" and parts["meaning"] else ""
        rows.append([part_words + more, f"{part['share']:.1%}", number(part["mean_abs"])])
    table = Table("Its three parts", ("part", "share of the square", "mean |part|, nats"), rows)
    return [words, table, *ratio_figure(judged)]


def measures_table(measures: Mapping[str, Any]) -> list[Block]:
    columns = {name.replace("_", " - "): values for name, values in measures.items() if values}
    names = dict.fromkeys(name for values in columns.values() for name in values)
    first = [name for name in FIRST_MEASURES if name in names]
    rows = [
        [name, *(number(values.get(name)) for values in columns.values())] for name in dict.fromkeys([*first, *names])
    ]
    title = "Under the names of the projects that log them"
    return [Table(title, ("measure", *columns), rows, shown=len(first))] if rows else []


def groups(by: Mapping[str, Any]) -> list[Block]:
    tables: list[Block] = []
    for name, rows in by.items():
        sides = [side for side in SIDES if side in rows[0]]
        columns = [(side, what) for what in ("rms", "wrong") for side in sides]
        header = [f"by {name}", "tokens", "|difference|", *(f"{side} {what}" for side, what in columns)]
        cells = [
            [row["group"], row["tokens"], *map(number, [row["mean_abs_difference"], *(row[s][w] for s, w in columns)])]
            for row in rows
        ]
        tables.append(Table("", header, cells))
    return tables


# --- figures


def position_figure(judged: Judged) -> list[Block]:
    """Each side's error against the token's place in the answer."""
    places = np.array([index + 1.0 for each in judged.scores for index in range(len(each.entropy))])
    dots = []
    for name, side in judged.sides.items():
        if side.fit is not None:
            dots.append(dots_of(name, places, np.maximum(np.abs(side.fit.errors), SMALLEST)))
    title = "Error of a log-probability by the token's place in the answer"
    axes = Axis("token of the answer, from 1", is_log=True), Axis("error, nats", is_log=True)
    return drawn("errors", title, dots, axes)


def ratio_figure(judged: Judged) -> list[Block]:
    ratios = np.exp(np.clip(judged.parts["difference"], -MOST_LOG_RATIO, MOST_LOG_RATIO))
    dots = dots_of("tokens", np.exp(np.maximum(judged.sides[SIDES[0]].reported, LEAST_LOGPROB)), ratios)
    title = "Ratio trainer / sampler by the sampler's probability"
    levels = [(bound, f"{bound:g}") for bound in judged.options.clip if bound]
    return drawn("ratios", title, [dots], (Axis("probability", is_log=True), Axis("ratio", is_log=True)), levels)


def dots_of(name: str, xs: Float64, ys: Float64) -> Dots:
    known = np.isfinite(xs) & np.isfinite(ys)
    points = zip(xs[known].tolist(), ys[known].tolist(), strict=True)
    return Dots(name, [(x, y, "") for x, y in points], LOOKS.get(name, 0))


def drawn(
    name: str, title: str, dots: Sequence[Dots], axes: tuple[Axis, Axis], levels: Sequence[tuple[float, str]] = ()
) -> list[Block]:
    if not any(each.points for each in dots):
        return []
    chart = scatter_chart(name, title, "The numbers stand in the tables.", dots, *axes, levels=levels)
    return [Figure(svg(chart), f"{title}. What is at one spot shares a mark.")]
