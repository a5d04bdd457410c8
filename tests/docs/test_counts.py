"""Counts of faults, properties and the like: in tables that a test computes again, and nowhere in prose."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from faults import FAULTS

TOP = Path(__file__).parents[2]
KINDS = "faults|bugs|benign variants|variants|harmless changes|properties|state machines|mutants|tests"
NUMBERS = r"\d[\d,]*|eleven|twelve|\w+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty(?:-\w+)?"
COUNT = re.compile(rf"\b(?:{NUMBERS})\b(?: of the catalogue's)? (?:{KINDS})\b")


def prose() -> Iterator[tuple[str, str]]:
    """Lines of README and docs/ outside tables and code, each with its place."""
    for path in (TOP / "README.md", TOP / "CONTRIBUTING.md", *sorted((TOP / "docs").rglob("*.md"))):
        in_code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            in_code ^= line.startswith("```")
            if not in_code and not line.startswith("|"):
                yield f"{path.relative_to(TOP)}:{number}", line


def test_prose_counts_no_faults_properties_or_tests() -> None:
    """Pinned: 29, 30 and 32 harmless changes, on three pages at once."""
    assert COUNT.search("so 182 bugs of real engines") and COUNT.search("the catalogue's thirty faults")
    assert [f"{where}: {line}" for where, line in prose() if COUNT.search(line)] == []


def rows(page: str, columns: int) -> list[list[str]]:
    text = (TOP / "docs" / page).read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in cells if len(row) == columns and not set(row[0]) <= {"-"}]


def test_the_page_on_faults_counts_what_the_catalogue_holds() -> None:
    cited = Counter(fault.section for fault in FAULTS if fault.seen_in)
    every = Counter(fault.section for fault in FAULTS)
    table = {row[0]: (row[2], row[3]) for row in rows("why/proved.md", 4)[1:]}
    expected = {section: (str(every[section]), str(cited[section])) for section in sorted(every)}
    assert table == {**expected, "all": (str(every.total()), str(cited.total()))}
