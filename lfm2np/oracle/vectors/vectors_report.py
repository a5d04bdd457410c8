"""What `lfm2np vectors verify` found, as a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from lfm2np.oracle import vectors_plain
from lfm2np.oracle.report.report import RIGHT, WRONG, Case, Finding, Report, Section, Table
from lfm2np.oracle.vectors.golden import Difference
from lfm2np.oracle.vectors.set_files import VectorSet
from lfm2np.oracle.vectors_plain import BUG, DRIFT, EXACT, INCONCLUSIVE, TIE, Judged

MOST_SHOWN = 20
MEANS = {  # the worst first
    BUG: "Tokens are further behind the expected ones than the declared format explains.",
    DRIFT: "Log-probabilities are further off than the declared format explains.",
    INCONCLUSIVE: "Answers are missing, or too short: the engine can't be shown to be right or wrong.",
    TIE: "Some tokens differ from the expected ones, where the declared format can't tell the two apart.",
    EXACT: "Every token is the expected one, and every reported error is one that the declared format explains.",
}


def counted(known: VectorSet) -> dict[str, int]:
    vectors = known.document["vectors"]
    results = [position["result"] for vector in vectors for position in vector["positions"]]
    return {
        "vectors": len(vectors),
        "positions": len(results),
        "may_tie": results.count("may_tie"),
        "tensors": len(known.tensors),
        "scripts": len(known.document["scripts"]),
    }


def summary(known: VectorSet) -> str:
    words = "{vectors} vectors, {positions} positions ({may_tie} of them may tie), {tensors} tensors, {scripts} scripts"
    return words.format(**counted(known))


def report_of_set(known: VectorSet, differences: Sequence[Difference]) -> Report:
    """`figures`: the counts of the set, and `differences`, each with vector, position, what, found and expected."""
    findings = [
        Finding("difference", f"{each.what}: {each.found}, expected {each.expected}", each.where)
        for each in differences[:MOST_SHOWN]
    ]
    if len(differences) > MOST_SHOWN:
        findings.append(Finding("difference", f"{len(differences) - MOST_SHOWN} more differences"))
    return Report(
        command="vectors verify",
        verdict="DIFFERENT" if differences else EXACT,
        exit_code=WRONG if differences else RIGHT,
        means="The set and the model disagree." if differences else "Every number is bit for bit as computed here.",
        findings=findings,
        facts={"set": summary(known)},
        figures={**counted(known), "differences": [asdict(each) for each in differences]},
    )


def report_of_answers(
    document: Mapping[str, Any], answers: list[dict[str, Any]], judged: list[Judged], format_name: str
) -> Report:
    """`figures`: `positions`, each with id, position, verdict and detail."""
    worst = sorted(judged, key=severity)
    verdict = worst[0].verdict if judged else INCONCLUSIVE
    rows = [[each.verdict, each.where, each.detail] for each in worst if each.verdict != EXACT]
    table = Table("", ("verdict", "position", "why"), rows, (0, 1, 2))
    return Report(
        command="vectors verify",
        verdict=verdict,
        exit_code=vectors_plain.result(judged),
        means=MEANS[verdict],
        findings=[Finding(verdict.lower(), each.detail, each.where) for each in worst[: verdict not in (EXACT, TIE)]],
        facts={"format": format_name, "judged": vectors_plain.summary(judged, answers)},
        not_tested=vectors_plain.not_tested(document, answers),
        sections=[Section("Positions that are not exact", [table] if rows else [])],
        figures={"positions": [each._asdict() for each in judged]},
        cases=[case_of(name, list(positions)) for name, positions in groupby(judged, lambda each: each.id)],
    )


def severity(judged: Judged) -> int:
    return list(MEANS).index(judged.verdict)


def case_of(name: str, positions: Sequence[Judged]) -> Case:
    """A vector, or a vector in a script, by its worst position."""
    worst = min(positions, key=severity)
    words = f"{worst.verdict}: {worst.detail}"
    failed, skipped = (words if worst.verdict in verdicts else None for verdicts in ((BUG, DRIFT), (INCONCLUSIVE,)))
    lines = [f"{each.where}: {each.verdict} {each.detail}" for each in positions if each.verdict != EXACT]
    return Case("vectors", name, failed, skipped, lines)
