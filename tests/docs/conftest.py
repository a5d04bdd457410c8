"""The pages are built once for all tests of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_pages import DOCS
from sphinx_build import sphinx


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups: else each process builds the pages
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
