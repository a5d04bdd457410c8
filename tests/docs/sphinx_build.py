"""Builds pages as CONTRIBUTING.md says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from run_pages import CHECKOUT, DOCS


def sphinx(source: Path, to: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """With conf.py of docs/. A warning is an error."""
    command: Sequence[str] = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", str(DOCS)]
    return subprocess.run(
        [*command, *options, str(source), str(to)], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
