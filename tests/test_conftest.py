"""What conftest.py holds for every test: `rounding` can't be forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDING = """
import lfm2np, pytest

@pytest.fixture(scope="module")
def logits():
    return lfm2np.load(numerics="float32").logits([1, 2])

def test_from_a_fixture(logits): pass

def test_without_a_mark(): lfm2np.load(numerics="bfloat16").logits([1])

@pytest.mark.rounding
def test_with_one(): lfm2np.load(numerics="float64").logits([1])

def test_exact(): lfm2np.load().logits([1])
"""


def output_of(folder: Path, tests: str, *arguments: str) -> str:
    """What pytest prints of these tests in a file of the folder, run as the checkout's own."""
    (folder / "test_some.py").write_text(tests)
    top = Path(__file__).parents[1]
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest", "-c", "pyproject.toml", *arguments]
    paths = os.pathsep.join([str(top / "tests"), str(top), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=top,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.night
def test_a_test_that_rounds_without_the_mark_fails(tmp_path: Path):
    shown = output_of(tmp_path, ROUNDING, str(tmp_path))
    assert "2 failed, 2 passed" in shown, shown
    for name, what in (("from_a_fixture", "rms_norm in float32"), ("without_a_mark", "rms_norm in bfloat16")):
        assert f"FAILED test_some.py::test_{name}" in shown
        assert f"{what}: expected @pytest.mark.rounding, as its bits are the machine's" in shown
