"""What `lfm2np vectors verify` found, as a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from lfm2np.oracle.report.report import RIGHT, WRONG, Finding, Report
from lfm2np.oracle.vectors.golden import Difference
from lfm2np.oracle.vectors.set_files import VectorSet

MOST_SHOWN = 20


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


def report_of(known: VectorSet, differences: Sequence[Difference]) -> Report:
    """`figures`: the counts of the set, and `differences`, each with vector, position, what, found and expected."""
    findings = [
        Finding("difference", f"{each.what}: {each.found}, expected {each.expected}", each.where)
        for each in differences[:MOST_SHOWN]
    ]
    if len(differences) > MOST_SHOWN:
        findings.append(Finding("difference", f"{len(differences) - MOST_SHOWN} more differences"))
    return Report(
        command="vectors verify",
        verdict="DIFFERENT" if differences else "EXACT",
        exit_code=WRONG if differences else RIGHT,
        means="The set and the model disagree." if differences else "Every number is bit for bit as computed here.",
        findings=findings,
        facts={"set": summary(known)},
        figures={**counted(known), "differences": [asdict(each) for each in differences]},
    )
