"""A report as JUnit XML: its cases, and a last one for the verdict over all of them."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from lfm2np.oracle.report.as_text import visible
from lfm2np.oracle.report.report import OPEN, WRONG, Case, Report, environment

MOST_LINES = 20  # in the text of one failure


def as_junit(report: Report, command_line: str = "") -> str:
    """A failure is what is wrong; what can't be judged is skipped, with the reason."""
    name = f"lfm2np {report.command}"
    suite = Element("testsuite", name=name)
    properties = SubElement(suite, "properties")
    for key, value in {**report.facts, **environment(), "command": command_line}.items():
        SubElement(properties, "property", name=visible(key), value=visible(value))
    for case in (*report.cases, verdict_case(name, report)):
        add_case(suite, case, report.verdict)
    for key, path in (("tests", "testcase"), ("failures", "testcase/failure"), ("skipped", "testcase/skipped")):
        suite.set(key, str(len(suite.findall(path))))
    suite.set("errors", "0")
    indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(suite, encoding="unicode") + "\n"


def verdict_case(name: str, report: Report) -> Case:
    words = [finding.sentence for finding in report.findings] or [report.verdict]
    failed = words[0] if report.exit_code == WRONG else None
    skipped = f"{report.verdict}: {'; '.join(words)}" if report.exit_code == OPEN else None
    return Case(name, "verdict", failed, skipped, words)


def add_case(suite: Element, case: Case, verdict: str) -> None:
    test = SubElement(suite, "testcase", classname=visible(case.group), name=visible(case.name))
    if case.failed is not None:
        failure = SubElement(test, "failure", type=visible(verdict), message=visible(case.failed))
        left = len(case.lines) - MOST_LINES
        lines = [*case.lines[:MOST_LINES], *([f"... {left} more"] if left > 0 else [])]
        failure.text = "\n".join(map(visible, lines))
    elif case.skipped is not None:
        SubElement(test, "skipped", message=visible(case.skipped))
