"""What was located, as a report: a paragraph for the first wrong tensor, a line for each of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from lfm2np.oracle.locate.dump import shortened
from lfm2np.oracle.locate.locate import EMBEDDINGS, Finding
from lfm2np.oracle.locate.locate import Report as Located
from lfm2np.oracle.report import report
from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Code, Report, Section, Table, number, plural

VERDICTS = {RIGHT: "nothing exceeds its bound", WRONG: "WRONG", OPEN: "INCONCLUSIVE"}
MEANS = {
    RIGHT: "Every dumped tensor is what its operation computes from the engine's own inputs, as its format may round.",
    WRONG: "A dumped tensor is not what its operation computes from the engine's own inputs.",
    OPEN: "Too little is dumped to judge it.",
}


def report_of(located: Located, model: str, hints: Sequence[str] = ()) -> Report:
    """`hints`: what else may be done now."""
    exit_code = WRONG if located.findings else RIGHT if located.is_conclusive else OPEN
    if located.narrower and located.findings:
        words = f"every number dumped is a {located.narrower}: if that is what the engine computes in, say --format"
        hints = [words, *hints]
    fields = asdict(located)
    findings = [
        report.Finding(
            "tensor", f"not what its inputs make: {finding.rows}; {finding.channels}", finding.name, evidence
        )
        for finding, evidence in zip(located.findings, fields.pop("findings"), strict=True)
    ]
    open_finding = report.Finding("inconclusive", why_inconclusive(located))
    first = [Section("First wrong tensor", [Code(finding_lines(located.findings[0]))])] if located.findings else []
    errors = [[check.name, number(check.error), "no" if check.is_blunt else "yes"] for check in located.checks]
    table = Table("Largest errors, each by its bound", ("tensor", "error", "judged"), errors, (0, 2))
    return Report(
        command="locate",
        verdict=VERDICTS[exit_code],
        exit_code=exit_code,
        means=MEANS[exit_code],
        findings=[open_finding] if exit_code == OPEN else findings,
        facts=facts_of(located, model),
        next_steps=list(hints),
        not_tested=not_tested(located),
        sections=[*first, Section("Tensors", [table] if errors else [], is_long=True)],
        figures={"model": model, "conclusive": located.is_conclusive, **fields},
    )


def facts_of(located: Located, model: str) -> dict[str, str]:
    rounds = located.rounds_inputs
    largest = max((check.error for check in located.checks), default=0.0)
    return {
        "model": model,
        "dump": f"{plural(located.num_tokens, 'token')}, {located.format}",
        "checked": f"{plural(len(located.checks), 'tensor')} against their inputs; the largest error is {largest:.2g} "
        "of its bound",
        **({} if rounds is None else {"products": f"inputs are {'' if rounds else 'not '}rounded to 8 bits"}),
    }


def not_tested(located: Located) -> list[str]:
    blunt = [check.name for check in located.checks if check.is_blunt]
    unreached = located.unreached if located.checks and not located.findings else ()
    return [
        *([f"{shortened(blunt)}: too little is dumped before"] if blunt else []),
        *([f"{shortened(unreached)}: nothing after is dumped"] if unreached else []),
    ]


def finding_lines(finding: Finding) -> list[str]:
    where = "" if finding.layer is None else f" (layer {finding.layer})"
    values = f"{finding.value:.9g}, expected {finding.expected:.9g} +- {finding.bound:.2g}"
    number = f", {finding.noun} {finding.channel}: {values} ({finding.error:.3g} times that)"
    columns = "experts" if finding.choice else f"{finding.noun}s"
    lines = [
        f"first wrong tensor  {finding.name}{where}",
        f"operation           {finding.operation}",
        *([f"rows                {finding.rows}"] if finding.rows != finding.steps else []),
        *([f"steps               {finding.steps}"] if finding.steps else []),
        f"{columns:<20}{finding.channels}",
        *([f"experts             {finding.experts}"] if finding.experts else []),
        f"largest error       {finding.place}{f': {finding.choice}' if finding.choice else number}",
        f"wrong numbers       {finding.wrong_numbers} of {finding.numbers}",
    ]
    if finding.recomputed:
        them = "it" if len(finding.recomputed) == 1 else "them"
        lines.append(f"or before it, in    {', '.join(finding.recomputed)} (not dumped: dump {them} to tell)")
    return lines


def why_inconclusive(located: Located) -> str:
    judged = [check.name for check in located.checks if not check.is_blunt]
    if located.checks and not judged:
        return f"too little is dumped before {shortened([check.name for check in located.checks])} to judge it"
    return f"no tensor behind {EMBEDDINGS} is dumped: nothing to judge"
