"""The options of the plugin: what is wrong is one line, and nobody else's are touched."""

import subprocess
import sys
from pathlib import Path

import pytest


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)


SUITE = ("--pyargs", "lfm2np.suite")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--block-size", "none"], "--block-size: block_size 'none': expected a whole number of at least 1"),
        (["--max-model-len", "8"], "--max-model-len: max_model_len 8: expected a whole number of at least 32"),
    ],
)
def test_the_plugin_names_wrong_sizes(tmp_path: Path, arguments: list[str], fragment: str):
    ended = run_pytest(tmp_path, *SUITE, "-k", "one-bos", *arguments)
    assert ended.returncode != 0
    assert fragment in ended.stdout + ended.stderr
    assert "INTERNALERROR" not in ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("lacks = {'bias'}", "lacks 'bias': expected names of FEATURES or SIZES"),
        ("sizes = {'block_size': 0}", "sizes of the engine: block_size 0: expected a whole number of at least 1"),
    ],
)
def test_what_an_engine_says_wrongly_of_itself_is_one_line(tmp_path: Path, attribute: str, said: str):
    (tmp_path / "wrong.py").write_text(
        f"class Engine:\n    {attribute}\n    def __init__(self, model, sizes): pass\n    def generate(self): pass\n"
    )
    ended = run_pytest(tmp_path, *SUITE, "--engine", "wrong:Engine", "-k", "equals-reference")
    assert f"\n{said}\n" in ended.stdout
    assert "Traceback" not in ended.stdout


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
