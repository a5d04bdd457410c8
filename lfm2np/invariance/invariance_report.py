"""Reports of a check against itself: text, JSON, JUnit and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from lfm2np.fuzz.trace import as_json as trace_as_json
from lfm2np.invariance.asked import OUT_OF_TIME, Checked, Held
from lfm2np.invariance.rounding_spread import Outcome, Score, Spread, least_limit
from lfm2np.oracle.reports.page import bullets, foreign, page, table
from lfm2np.oracle.reports.report_parts import environment, visible

HEADS = ("relation", "verdict", "positions", "equal bits", "largest", "mean", "KL", "other tokens")
SUITE = "lfm2np check --against"


@dataclass(frozen=True)
class Report:
    """One engine against itself, or two and what lies between them. `folders`: of findings, by relation."""

    engines: tuple[Checked, ...]
    between: Held | None = None
    folders: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def held(self) -> list[Held]:
        return [*(each for checked in self.engines for each in checked.held), *([self.between] if self.between else [])]

    @property
    def broken(self) -> list[Held]:
        return [each for each in self.held if each.outcome is Outcome.BROKEN]

    @property
    def is_judged(self) -> bool:
        """Whether it can be said that all holds, of what was asked. Not where a question is not answered even alone or
        other tokens came of which nothing says by how much."""
        is_open = any(each.score and each.score.flips for each in self.unknown)
        any_judged = any(each.outcome not in (Outcome.UNKNOWN, Outcome.NOT_ASKED) for each in self.held)
        return any_judged and not is_open and not any(checked.unanswered for checked in self.engines)

    @property
    def unknown(self) -> list[Held]:
        return [each for each in self.held if each.outcome is Outcome.UNKNOWN]


def cells(held: Held) -> list[str]:
    score = held.score
    if score is None:
        return [held.relation.name, str(held.outcome), *[""] * 6]
    share = f"{100 * score.equal / score.positions:.1f} %" if score.positions else ""
    numbers = [nats(score.largest), nats(score.mean), nats(score.kl)]
    return [held.relation.name, str(held.outcome), str(score.positions), share, *numbers, str(score.flips)]


def nats(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def lines_of(held: Held) -> list[str]:
    """What is to be said beside the table."""
    if held.broken is not None:
        return [
            f"{held.relation.name}: {held.broken.what}; in {held.rounds[0]} of {held.rounds[1]} rounds of other tokens"
        ]
    return [f"{held.relation.name}: {held.why}"] if held.why else []


def spread_words(spread: Spread) -> str:
    if not spread.is_measured:
        return f"not measured: hardly any batch moves a bit; a position may be off by {spread.limit:.2g} nat"
    return f"{spread.nats:.2g} nat, of one logit between two runs; a position may be off by {spread.limit:.2g}"


def head_of(checked: Checked) -> list[tuple[str, str]]:
    demand = "equal bits" if checked.is_bitwise else spread_words(checked.spread)
    asked = f"{checked.requests} requests, {checked.tokens} tokens, in {checked.seconds:.0f} s"
    return [("engine", checked.engine), ("format", checked.format_name), ("spread", demand), ("asked", asked)]


def as_text(report: Report) -> str:
    lines: list[str] = []
    for checked in report.engines:
        lines += [f"{name:<8}  {value}" for name, value in head_of(checked)]
        lines += ["", *grid([HEADS, *map(cells, checked.held)]), ""]
    if report.between is not None:
        lines += ["the two engines, each request alone, against the larger spread", ""]
        lines += [*grid([HEADS, cells(report.between)]), ""]
    lines += [f"not answered: {line}" for checked in report.engines for line in checked.unanswered]
    lines += [line for held in report.held for line in lines_of(held)]
    lines += [line for checked in report.engines for line in hint(checked)]
    lines += [f"{name}: {folder}" for name, folder in report.folders]
    return "\n".join([*lines, *report.notes, verdict_words(report)])


def verdict_words(report: Report) -> str:
    """The last line, which also says what was left out."""
    late = sum(each.why == OUT_OF_TIME for each in report.held)
    left = f"; not asked, as time was over: {late}" if late else ""
    broken = [each.relation.name for each in report.broken]
    if broken:
        return f"BROKEN: {', '.join(broken)}{left}"
    unanswered = sum(len(checked.unanswered) for checked in report.engines)
    if unanswered:
        return f"INCONCLUSIVE: not answered though it was asked alone: {unanswered}"
    if not report.is_judged:
        names = ", ".join(each.relation.name for each in report.unknown) or "everything"
        return f"INCONCLUSIVE: not judged: {names}{left}"
    count = sum(each.outcome in (Outcome.EQUAL, Outcome.WITHIN, Outcome.TOKENS) for each in report.held)
    return f"holds: {count} of {len(report.held)} relations{left}; a wrong answer that is always the same does not show"


def hint(checked: Checked) -> list[str]:
    """Another format that would explain what is broken."""
    scores = [each.score for each in checked.broken if each.score is not None]
    if not scores or checked.is_bitwise or any(score.noise is None or score.flips for score in scores):
        return []
    largest = max(score.noise or 0.0 for score in scores)
    now = least_limit(checked.format_name)
    named = [name for name in ("float16", "bfloat16") if max(largest, now) < least_limit(name)]
    return [f"{named[0]} would explain all of it: is --format {checked.format_name} right?"] if named else []


def grid(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        words = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(words).rstrip())
    return lines


def held_as_json(held: Held) -> dict[str, Any]:
    fields: dict[str, Any] = {"relation": held.relation.name, "outcome": str(held.outcome)}
    if held.score is not None:
        fields |= asdict(held.score)
        fields |= {"rounds": held.rounds[1], "broken_rounds": held.rounds[0]}
    if held.why:
        fields["why"] = held.why
    if held.broken is not None:
        fields["what"] = held.broken.what
        if held.broken.trace is not None:
            fields["trace"] = trace_as_json(held.broken.trace)
    return fields


def as_json(report: Report) -> dict[str, Any]:
    engines = [
        {
            "engine": checked.engine,
            "format": checked.format_name,
            "bitwise": checked.is_bitwise,
            "spread": checked.spread.nats,
            "spread_measured": checked.spread.is_measured,
            "traces": checked.traces,
            "requests": checked.requests,
            "tokens": checked.tokens,
            "seconds": round(checked.seconds, 1),
            "unanswered": list(checked.unanswered),
            "relations": [held_as_json(each) for each in checked.held],
        }
        for checked in report.engines
    ]
    between = None if report.between is None else held_as_json(report.between)
    verdict = verdict_words(report)
    return {"verdict": verdict, "engines": engines, "between": between, "findings": dict(report.folders)}


def as_junit(report: Report, command: str) -> str:
    """A relation is a test case."""
    suite = Element("testsuite", name=SUITE)
    properties = SubElement(suite, "properties")
    for name, value in {**environment(), "command": command}.items():
        SubElement(properties, "property", name=visible(name), value=visible(value))
    named = [(visible(checked.engine), each) for checked in report.engines for each in checked.held]
    named += [("two engines", report.between)] if report.between else []
    for engine, held in named:
        case = SubElement(suite, "testcase", classname=engine, name=held.relation.name)
        if held.outcome is Outcome.BROKEN and held.broken is not None:
            failure = SubElement(case, "failure", type=str(held.outcome), message=visible(held.broken.what))
            failure.text = visible(f"{held.relation.sentence}\n{score_words(held.score)}")
        elif held.outcome in (Outcome.NOT_ASKED, Outcome.UNKNOWN):
            SubElement(case, "skipped", message=visible(held.why or str(held.outcome)))
    suite.set("tests", str(len(named)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    suite.set("errors", "0")
    indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(suite, encoding="unicode") + "\n"


def score_words(score: Score | None) -> str:
    if score is None:
        return ""
    return (
        f"{score.equal} of {score.positions} positions have equal bits; largest difference {nats(score.largest)} nat, "
        f"mean {nats(score.mean)}, KL {nats(score.kl)}, other tokens {score.flips}"
    )


def as_html(report: Report, command: str) -> str:
    header = f"<h1>An engine against itself</h1>\n<p>{foreign(verdict_words(report))}</p>\n"
    sections = []
    for number, checked in enumerate(report.engines):
        facts = bullets([f"{name}: {foreign(value)}" for name, value in head_of(checked)])
        rows = [[foreign(cell) for cell in cells(held)] for held in checked.held]
        sections.append(
            (f"engine-{number}", foreign(checked.engine), facts + table("Relations", HEADS, {"": rows}, (0, 1)))
        )
    if report.between is not None:
        row = [foreign(cell) for cell in cells(report.between)]
        sections.append(("between", "The two engines", table("Each request alone", HEADS, {"": [row]}, (0, 1))))
    words = [f"not answered: {line}" for checked in report.engines for line in checked.unanswered]
    words += [line for held in report.held for line in lines_of(held)] + [": ".join(each) for each in report.folders]
    sections.append(("what", "What was seen", bullets([foreign(line) for line in words])))
    sentences = {each.relation.name: each.relation.sentence for each in report.held}
    sections.append(
        ("relations", "The relations", bullets([f"{foreign(a)}: {foreign(b)}" for a, b in sentences.items()]))
    )
    again = bullets([foreign(f"{name}: {value}") for name, value in environment().items()])
    sections.append(("again", "Versions, and how to do it again", again + f"<pre>{foreign(command, 4000)}</pre>\n"))
    return page("lfm2np check --against", header, sections, "")
