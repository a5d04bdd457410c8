"""A report as one page for any browser: no script, no request, foreign text escaped."""

from __future__ import annotations

from importlib import resources

from lfm2np.oracle.report.as_text import visible
from lfm2np.oracle.report.markup import Markup, document, element, joined, table
from lfm2np.oracle.report.report import OPEN, RIGHT, WRONG, Block, Code, Report, Section, Table, environment

STYLE = (resources.files("lfm2np.oracle.report") / "report.css").read_text(encoding="utf-8")
PAGE_ROWS = 100  # of one table
MOST_COMMAND = 4000  # characters
SIGNS = {RIGHT: "\u25cf", WRONG: "\u2715", OPEN: "\u25a1"}  # beside the word: colour is never alone
TONES = {RIGHT: "exact", WRONG: "bug", OPEN: "inconclusive"}


def as_html(report: Report, command_line: str = "") -> str:
    """The first screen says verdict, why, where and what next; then the sections; then versions and the command."""
    sections = [*report.sections, *closing(report, command_line)]
    links = [element("a", section.heading, href=f"#section-{index}") for index, section in enumerate(sections)]
    return document(
        f"{report.verdict} - lfm2np {report.command}",
        STYLE,
        element("header", first_screen(report)),
        element("nav", bullets(links), aria_label="Sections"),
        element("main", [drawn(section, index) for index, section in enumerate(sections)]),
    )


def first_screen(report: Report) -> Markup:
    looks = report.exit_code if report.looks is None else report.looks
    findings = [foreign(finding.sentence) for finding in report.findings]
    verdict = element(
        "div",
        element("p", report.means) if report.means else None,
        bullets(findings),
        class_=f"verdict {TONES[looks]}",
    )
    facts = [joined(f"{name}: ", foreign(value)) for name, value in report.facts.items()]
    return joined(
        element("h1", f"lfm2np {report.command}: {SIGNS[looks]} {report.verdict}"),
        verdict,
        element("p", "What next: ", "; ".join(report.next_steps)) if report.next_steps else None,
        bullets(facts),
    )


def closing(report: Report, command_line: str) -> list[Section]:
    missing = [Section("Not tested", [Code(report.not_tested)])] if report.not_tested else []
    versions = Table("Versions", ("what", "version"), list(environment().items()), (0, 1))
    again = [Code([visible(command_line, MOST_COMMAND)])] if command_line else []
    return [*missing, Section("Versions and command", [versions, *again])]


def drawn(section: Section, index: int) -> Markup:
    heading = element("h2", section.heading, id=f"section-{index}-heading")
    blocks = [drawn_block(block) for block in section.blocks] or element("p", "None.")
    return element("section", heading, blocks, id=f"section-{index}", aria_labelledby=f"section-{index}-heading")


def drawn_block(block: Block) -> Markup:
    match block:
        case str():
            return element("p", foreign(block))
        case Code():
            return element("pre", foreign("\n".join(block.lines), lines=True))
        case Table():
            return drawn_table(block)


def drawn_table(shown: Table) -> Markup:
    rows = [[foreign(str(cell)) for cell in row] for row in shown.rows[:PAGE_ROWS]]
    left = len(shown.rows) - len(rows)
    more = element("p", f"... {left:,} more; --json has them all.") if left else None
    return joined(table(shown.title, shown.header, rows, words=shown.words), more)


def foreign(text: str, lines: bool = False) -> Markup:
    """Text from outside: control characters as numbers, right-to-left text in its place."""
    kept = "\n".join(map(visible, text.split("\n"))) if lines else visible(text)
    return element("bdi", kept)


def bullets(items: list[Markup]) -> Markup | None:
    return element("ul", [element("li", item) for item in items]) if items else None
