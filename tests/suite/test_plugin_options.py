"""The options of the plugin: what is wrong is one line, and nobody else's are touched."""

import subprocess
import sys
from pathlib import Path

import pytest


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_nobody_elses_options_are_touched(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    for name in ('--model', '--profile', '--engine', '--scheduler', '--max-num-batched-tokens'):\n"
        "        parser.addoption(name, choices=['mine'])\n"
    )
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(request):\n    assert request.config.getoption('--profile') == 'mine'\n"
    )
    ended = run_pytest(tmp_path, "--profile", "mine", "--model", "mine")
    assert ended.returncode == 0, ended.stdout + ended.stderr
