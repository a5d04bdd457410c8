"""The pages are built once for all tests of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from run_pages import CHECKOUT, DOCS


def sphinx(source: Path, to: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """As docs/README.md says, with conf.py of docs/."""
    command: Sequence[str] = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", str(DOCS)]
    return subprocess.run(
        [*command, *options, str(source), str(to)], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n auto --dist loadgroup` one process builds the pages, and others run what they show meanwhile."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if "built" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group("built"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built pages. A warning is an error."""
    to = tmp_path_factory.mktemp("docs")
    done = sphinx(DOCS, to)
    assert done.returncode == 0, done.stderr
    return to
