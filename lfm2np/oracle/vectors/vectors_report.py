"""What `lfm2np vectors verify` found, as a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lfm2np.oracle import vectors_plain
from lfm2np.oracle.report.report import RIGHT, WRONG, Case, Finding, Report, Section, Table
from lfm2np.oracle.vectors.golden import Difference
from lfm2np.oracle.vectors.set_files import VectorSet
from lfm2np.oracle.vectors_plain import BUG, DRIFT, EXACT, INCONCLUSIVE, TIE, Judged

MOST_SHOWN = 20
SEVERITY = (BUG, DRIFT, INCONCLUSIVE, TIE, EXACT)
MEANS = {
    EXACT: "Every token is the expected one, and every reported error is one that the declared format explains.",
    TIE: "Some tokens differ from the expected ones, where the declared format can't tell the two apart.",
    INCONCLUSIVE: "Answers are missing, or too short: the engine can't be shown to be right or wrong.",
    DRIFT: "Log-probabilities are further off than the declared format explains.",
    BUG: "Tokens are further behind the expected ones than the declared format explains.",
}


def counted(known: VectorSet) -> dict[str, int]:
    document = known.document
    positions = [position for vector in document["vectors"] for position in vector["positions"]]
    return {
        "vectors": len(document["vectors"]),
        "positions": len(positions),
        "may_tie": sum(position["result"] == "may_tie" for position in positions),
        "tensors": len(known.tensors),
        "scripts": len(document["scripts"]),
    }


def summary(known: VectorSet) -> str:
    counts = counted(known)
    ties = f"{counts['may_tie']} of them may tie"
    rest = f"{counts['tensors']} tensors, {counts['scripts']} scripts"
    return f"{counts['vectors']} vectors, {counts['positions']} positions ({ties}), {rest}"


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
    ordered = sorted(judged, key=lambda each: SEVERITY.index(each.verdict))
    verdict = ordered[0].verdict if ordered else INCONCLUSIVE
    shown = [each for each in ordered if each.verdict != EXACT]
    rows = [[each.verdict, each.id, "-" if each.position is None else each.position, each.detail] for each in shown]
    return Report(
        command="vectors verify",
        verdict=verdict,
        exit_code=vectors_plain.result(judged),
        means=MEANS[verdict],
        findings=[
            Finding(each.verdict.lower(), each.detail, place_of(each)) for each in shown[:1] if each.verdict != TIE
        ],
        facts={"format": format_name, "judged": vectors_plain.summary(judged, answers)},
        not_tested=vectors_plain.not_tested(document, answers),
        sections=[
            Section(
                "Positions that are not exact",
                [Table("", ("verdict", "vector", "position", "why"), rows, (0, 1, 3))] if rows else [],
            )
        ],
        figures={"positions": [each._asdict() for each in judged]},
        cases=cases_of(judged),
    )


def place_of(judged: Judged) -> str:
    return judged.id if judged.position is None else f"{judged.id} position {judged.position}"


def cases_of(judged: Sequence[Judged]) -> list[Case]:
    """One a vector, or a vector in a script, by its worst position."""
    by_id: dict[str, list[Judged]] = {}
    for each in judged:
        by_id.setdefault(each.id, []).append(each)
    cases = []
    for name, positions in by_id.items():
        worst = min(positions, key=lambda each: SEVERITY.index(each.verdict))
        words = f"{worst.verdict}: {worst.detail}"
        is_wrong, is_open = worst.verdict in (BUG, DRIFT), worst.verdict == INCONCLUSIVE
        lines = [f"{place_of(each)}: {each.verdict} {each.detail}" for each in positions if each.verdict != EXACT]
        cases.append(Case("vectors", name, words if is_wrong else None, words if is_open else None, lines))
    return cases
