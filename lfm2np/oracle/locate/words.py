"""What `locate` found, in lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from lfm2np.oracle.locate.locate import EMBEDDINGS, Finding, Report

MOST_NAMES = 8


def as_text(report: Report) -> str:
    """A paragraph for the first wrong tensor, a line for each of the others."""
    lines = [f"{report.num_tokens} tokens, {report.format}: {len(report.checks)} tensors held against their inputs"]
    products = [one.is_rounded for one in report.checks if one.is_rounded is not None]
    if products:
        lines.append(f"inputs rounded to 8 bits: {sum(products)} of {len(products)} products with quantised weights")
    blunt = [one.name for one in report.checks if one.is_blunt]
    if blunt:
        lines.append(f"too little before them is dumped to judge {shortened(blunt)}")
    if not report.findings:
        largest = max((one.error for one in report.checks), default=0.0)
        lines.append(f"nothing exceeds its bound; the largest error is {largest:.2g} of it")
        if report.checks and report.unreached:
            lines.append(f"not looked at, as nothing behind them is dumped: {shortened(report.unreached)}")
        return "\n".join(lines)
    first, *others = report.findings
    lines += finding_lines(first)
    for one in others:
        lines.append(f"also wrong, given its own inputs: {one.name}: {one.rows}; {one.channels}")
    if report.narrower:
        lines.append(
            f"every number dumped is a {report.narrower}: if that is what the engine computes in, say --format"
        )
    return "\n".join(lines)


def finding_lines(one: Finding) -> list[str]:
    where = "" if one.layer is None else f" (layer {one.layer})"
    number = f"{one.place}, {one.noun} {one.channel}: {one.value:.9g}, expected {one.expected:.9g} +- {one.bound:.2g}"
    largest = f"{one.place}: {one.choice}" if one.choice else f"{number} ({one.error:.3g} times that)"
    columns = "experts" if one.choice else f"{one.noun}s"
    lines = [
        f"first wrong tensor  {one.name}{where}",
        f"operation           {one.operation}",
        *([f"rows                {one.rows}"] if one.rows != one.steps else []),
        *([f"steps               {one.steps}"] if one.steps else []),
        f"{columns:<20}{one.channels}",
        *([f"experts             {one.experts}"] if one.experts else []),
        f"largest error       {largest}",
        f"wrong numbers       {one.wrong_numbers} of {one.numbers}",
    ]
    if one.recomputed:
        them = "it" if len(one.recomputed) == 1 else "them"
        lines.append(f"or before it, in    {', '.join(one.recomputed)} (not dumped: dump {them} to tell)")
    return lines


def why_inconclusive(report: Report) -> str:
    judged = [one.name for one in report.checks if not one.is_blunt]
    if report.checks and not judged:
        return f"too little is dumped before {shortened([one.name for one in report.checks])} to judge it"
    return f"no tensor behind {EMBEDDINGS} is dumped: nothing to tell from"


def shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
