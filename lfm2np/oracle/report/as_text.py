"""A report for a terminal: verdict, why and what next; what was judged; tables; how to do it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lfm2np.oracle.report.report import Block, Code, Report, Section, Table, environment

MOST_LINE = 1000  # characters of foreign text
MOST_COMMAND = 4000
LABEL = 11  # columns


def as_text(report: Report, command_line: str = "") -> str:
    """`command_line`: what makes the report again."""
    again = labelled("again", [command_line] if command_line else [], MOST_COMMAND)
    blocks = [
        list(head(report)),
        *(lines for section in report.sections if not section.is_long for lines in paragraphs(section)),
        [*(line for name, value in environment().items() for line in labelled(name, [value])), *again],
    ]
    return "\n\n".join("\n".join(filter(None, lines)) for lines in blocks if any(lines))


def head(report: Report) -> Iterator[str]:
    """The verdict, why, what to do now, what was judged and, a line each, what was not."""
    yield from labelled("verdict", [report.verdict])
    yield from labelled("because", [finding.sentence for finding in report.findings])
    yield from labelled("next", report.next_steps)
    for name, value in report.facts.items():
        yield from labelled(name, [value])
    yield from labelled("not tested", report.not_tested)


def paragraphs(section: Section) -> Iterator[list[str]]:
    """The lines of each block; strings that follow something go with it."""
    lines: list[str] = []
    for block in section.blocks:
        if lines and not isinstance(block, str):
            yield lines
            lines = []
        lines += block_lines(block)
    yield lines


def labelled(name: str, values: Sequence[str], most: int = MOST_LINE) -> Iterator[str]:
    """One line a value, the first behind its name."""
    for value in values:
        yield f"{name:<{LABEL - 1}} {visible(value, most)}"
        name = ""


def block_lines(block: Block) -> list[str]:
    match block:
        case str():
            return [visible(block)]
        case Code():
            return [visible(line) for line in block.lines]
        case Table():
            return table_lines(block)


def table_lines(table: Table) -> list[str]:
    if not table.rows:
        return []
    rows = [[visible(str(cell)) for cell in row] for row in table.rows[: table.shown]]
    left = len(table.rows) - len(rows)
    more = [f"... {left} more: --json and --report FILE.html have them"] if left else []
    return [*([visible(table.title)] if table.title else []), *aligned([table.header, *rows], table.words), *more]


def aligned(rows: Sequence[Sequence[object]], words: Sequence[int]) -> list[str]:
    """A table as lines: the columns in `words` aligned to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def visible(text: str, most: int = MOST_LINE) -> str:
    """Foreign text on one line: what a terminal, a browser or XML would act on becomes its number, <U+202E>."""
    kept = "".join(c if c.isprintable() else f"<U+{ord(c):04X}>" for c in text[:most])
    return kept if len(text) <= most else f"{kept}... ({len(text)} characters)"
