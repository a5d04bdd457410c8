"""The report of `locate` in lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from lfm2np.oracle.locate.locate import EMBEDDINGS, Finding, Report

MOST_NAMES = 8


def as_text(report: Report) -> str:
    """A paragraph for the first wrong tensor, a line for each of the others."""
    lines = [f"{report.num_tokens} tokens, {report.format}: {len(report.checks)} tensors checked against their inputs"]
    products = [check.is_rounded for check in report.checks if check.is_rounded is not None]
    if products:
        lines.append(f"inputs rounded to 8 bits: {sum(products)} of {len(products)} products with quantised weights")
    blunt = [check.name for check in report.checks if check.is_blunt]
    if blunt:
        lines.append(f"too little is dumped before these to judge them: {shortened(blunt)}")
    if not report.findings:
        largest = max((check.error for check in report.checks), default=0.0)
        lines.append(f"nothing exceeds its bound; the largest error is {largest:.2g} of it")
        if report.checks and report.unreached:
            lines.append(f"not checked, as nothing after them is dumped: {shortened(report.unreached)}")
        return "\n".join(lines)
    first, *others = report.findings
    lines += finding_lines(first)
    for finding in others:
        lines.append(f"also wrong, given its own inputs: {finding.name}: {finding.rows}; {finding.channels}")
    if report.narrower:
        lines.append(
            f"every number dumped is a {report.narrower}: if that is what the engine computes in, say --format"
        )
    return "\n".join(lines)


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


def why_inconclusive(report: Report) -> str:
    judged = [check.name for check in report.checks if not check.is_blunt]
    if report.checks and not judged:
        return f"too little is dumped before {shortened([check.name for check in report.checks])} to judge it"
    return f"no tensor behind {EMBEDDINGS} is dumped: nothing to judge"


def shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
