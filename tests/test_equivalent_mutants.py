"""equivalent_mutants.json speaks of lines that stand in the code: a line that changed is judged anew."""

from __future__ import annotations

import json
from pathlib import Path

TOP = Path(__file__).parents[1]
LISTED = json.loads((TOP / "tests" / "equivalent_mutants.json").read_text())


def without_blanks(text: str) -> str:
    return "".join(text.split())


def test_every_line_stands_in_its_file() -> None:
    stale = []
    for file, rows in LISTED.items():
        source = without_blanks((TOP / file).read_text())
        lines = [line for row in rows for line in row.get("lines", [row.get("before")])]
        stale += [f"{file}: {line}" for line in lines if without_blanks(line) not in source]
    assert LISTED and not stale
