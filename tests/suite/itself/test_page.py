"""docs/engine/17-itself.md has every relation, as relations.py names it, and the table of the recorded runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lfm2np.suite.itself.relations import NEEDS, RELATIONS

pytestmark = pytest.mark.slow

TOP = Path(__file__).parents[3]
PAGE = (TOP / "docs" / "engine" / "17-itself.md").read_text(encoding="utf-8")


def test_every_relation_stands_on_the_page() -> None:
    rows = [f"| `{each.name}` | {each.sentence} |" for each in RELATIONS]
    assert "\n".join(["| relation | must hold |", "|---|---|", *rows]) in PAGE
    assert {need for each in RELATIONS for need in (*each.needs, each.player) if need} == set(NEEDS)


def test_the_table_is_that_of_the_recorded_runs() -> None:
    command = [sys.executable, str(TOP / "fixtures" / "faults_seen.py"), "--table"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert table and table in PAGE
