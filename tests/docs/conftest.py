"""The pages are built once for all tests of them, in whatever process these run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from html_pages import sphinx
from run_pages import DOCS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process builds the pages while others run what these show: what else needs the built pages comes last."""
    of_built = [item for item in items if "built" in getattr(item, "fixturenames", ())]
    others = [item for item in items if item not in set(of_built)]
    items[:] = [*of_built[:1], *others, *of_built[1:]]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built pages. A warning is an error.

    Processes of pytest-xdist share it.
    """
    import fcntl  # not on Windows, where the other tests of this folder run

    top = tmp_path_factory.getbasetemp()
    to = (top.parent if "PYTEST_XDIST_WORKER" in os.environ else top) / "docs"
    with to.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not to.exists():
            part = to.with_suffix(".part")
            done = sphinx(DOCS, part)
            assert done.returncode == 0, done.stderr
            part.rename(to)
    return to
