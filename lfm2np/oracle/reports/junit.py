"""The report of a check as JUnit XML: one test case per request, and a last one for the overall verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from lfm2np.oracle.check import Checked
from lfm2np.oracle.judging.verdict import WRONG, Position, Verdict
from lfm2np.oracle.reports.report_parts import (
    case_of,
    common_verdict,
    environment,
    error_words,
    gap_words,
    phase,
    visible,
)
from lfm2np.oracle.targets.records import Answer, Ask

SUITE = "lfm2np check"
MOST_POSITIONS = 20  # in the text of one failure


def as_junit(checked: Checked, command: str = "", facts: Mapping[str, str] | None = None) -> str:
    """A failure is a request with a wrong token or log-probability; what can't be judged is skipped."""
    suite = Element("testsuite", name=SUITE)
    properties = SubElement(suite, "properties")
    named = {
        "engine": checked.abilities.engine,
        "format": checked.format,
        **(facts or environment()),
        "command": command,
    }
    for name, value in named.items():
        SubElement(properties, "property", name=visible(name), value=visible(value))
    by_ask: dict[str, list[Position]] = {}
    for position in checked.positions:
        by_ask.setdefault(position.ask.id, []).append(position)
    for ask, answer in checked.pairs:
        add_ask(suite, ask, answer, by_ask.get(ask.id, []))
    for name in checked.not_put:
        skip(
            add_case(suite, case_of(name), name),
            "not sent: the engine takes texts only, and no text encodes to this prompt",
        )
    add_verdict(suite, checked)
    for name, path in (("tests", "testcase"), ("failures", "testcase/failure"), ("skipped", "testcase/skipped")):
        suite.set(name, str(len(suite.findall(path))))
    suite.set("errors", "0")
    indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(suite, encoding="unicode") + "\n"


def add_ask(suite: Element, ask: Ask, answer: Answer, positions: Sequence[Position]) -> None:
    case = add_case(suite, ask.case, ask.id)
    verdict = common_verdict(positions)
    if answer.refuted:
        fail(case, Verdict.BUG, f"no right engine gives this: {answer.error}", [])
    elif answer.error is not None:
        skip(case, f"no usable answer: {answer.error}")
    elif not positions:
        skip(case, "no usable answer: no tokens that could be judged")
    elif verdict is Verdict.INCONCLUSIVE:
        skip(case, "INCONCLUSIVE: no log-probabilities were reported")
    elif verdict in WRONG:
        wrong = [position for position in positions if position.is_wrong]
        lines = [position_line(position) for position in wrong[:MOST_POSITIONS]]
        if len(wrong) > MOST_POSITIONS:
            lines.append(f"... {len(wrong) - MOST_POSITIONS} more")
        fail(case, verdict, f"{len(wrong)} of {len(positions)} positions; {position_line(wrong[0])}", lines)


def add_verdict(suite: Element, checked: Checked) -> None:
    case = add_case(suite, SUITE, "verdict")
    verdict, reasons = checked.total.verdict, checked.total.reasons
    if verdict is Verdict.INCONCLUSIVE:
        skip(case, f"INCONCLUSIVE: {'; '.join(reasons)}")
    elif verdict in WRONG:
        lines = [*reasons, *(checked.cause.lines if checked.cause else ())]
        fail(case, verdict, reasons[0] if reasons else str(verdict), lines)


def position_line(position: Position) -> str:
    token = f"token {position.token_id}, the oracle's {position.best}"
    errors = f"gap {gap_words(position)}, error {error_words(position)}"
    return f"{position.verdict} at row {position.row} ({phase(position)}): {token}, {errors}"


def add_case(suite: Element, case: str, name: str) -> Element:
    return SubElement(suite, "testcase", classname=visible(case), name=visible(name))


def skip(case: Element, why: str) -> None:
    SubElement(case, "skipped", message=visible(why))


def fail(case: Element, verdict: Verdict, message: str, lines: Sequence[str]) -> None:
    failure = SubElement(case, "failure", type=str(verdict), message=visible(message))
    failure.text = "\n".join(map(visible, lines))
