"""equivalent_mutants.json speaks of lines that stand in the code: a line that changed is judged anew."""

from __future__ import annotations

import json
from pathlib import Path

TOP = Path(__file__).parents[1]
LISTED = json.loads((TOP / "tests" / "equivalent_mutants.json").read_text())


def without_blanks(text: str) -> str:
    return "".join(text.split())


def test_every_line_stands_in_its_file() -> None:
    """A `before` is a whole line, since a mutant is looked up by it."""
    stale = []
    for file, rows in LISTED.items():
        text = (TOP / file).read_text()
        source, whole = without_blanks(text), {line.strip() for line in text.splitlines()}
        stale += [f"{file}: {row['before']}" for row in rows if "before" in row and row["before"] not in whole]
        lines = [line for row in rows for line in row.get("lines", [])]
        stale += [f"{file}: {line}" for line in lines if without_blanks(line) not in source]
    assert LISTED and not stale
