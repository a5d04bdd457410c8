"""Every command and every piece of code in README and docs/ does what the page shows: pytest -m docs tests/docs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import run_pages

pytestmark = pytest.mark.docs


LONG = (  # take 20 seconds and more, and begin first
    *("learn/6-cost.md", "engine/5-property-suite.md", "engine/14-schedulers.md"),
    *("engine/15-rollouts.md", "engine/18-simulate.md", "engine/11-compare.md"),
)
PAGES = sorted(run_pages.pages(), key=lambda page: page not in [run_pages.DOCS / name for name in LONG])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(run_pages.CHECKOUT)))
def test_the_page_shows_what_happens(page: Path) -> None:
    done = subprocess.run([sys.executable, run_pages.__file__, str(page)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)  # what was not run, and why
