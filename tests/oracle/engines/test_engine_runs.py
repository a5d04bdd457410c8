"""The runner of fixtures/engines/, on engines of our own: what becomes of a right one, a wrong one, one that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines_here import GIVEN, RECIPES
from run import main

HERE = Path(__file__).parent
QUICK = ["--cases", "short-prompts"]


def ran(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, object]]]:
    """Exit code, and the records that are there then."""
    results = tmp_path / "results.jsonl"
    code = main([*arguments, *GIVEN, "--cache", str(tmp_path / "cache"), "--results", str(results)], RECIPES)
    lines = results.read_text().splitlines() if results.exists() else []
    return code, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_right_engine_and_one_that_dies_at_its_start_are_rows_as_expected(tmp_path: Path):
    code, records = ran(tmp_path, "--engines", "ours/right,ours/dies", "--formats", "float32", *QUICK)
    assert code == 0
    assert [record["verdict"] for record in records] == ["EXACT", "refused"]
    assert records[0]["counts"] and records[0]["versions"]
    assert "CHECKOUT/fixtures/engines/no-such-model" in records[1]["reasons"][0]
    assert not any(str(folder) in json.dumps(records) for folder in (tmp_path, HERE.parents[1]))


def test_a_variant_prepares_the_checkpoint_in_its_own_way(tmp_path: Path):
    code, (record,) = ran(tmp_path, "--engines", "ours/unprepared", *QUICK)
    assert (code, record["reasons"]) == (0, ["no trained in float32 here"])


def test_an_outcome_that_is_not_expected_is_told_and_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The environment that is given lacks what is pinned."""
    code, (record,) = ran(tmp_path, "--engines", "other")
    assert (code, record["verdict"]) == (1, "refused")
    assert "no-such-distribution is missing, expected 1.0.0" in record["reasons"][0]
    assert "other/alone float32 check 1: expected right, came refused" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--engines", "mine"], ["--engines", "ours/alone"]])
def test_an_unknown_name_is_told_with_those_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    assert ran(tmp_path, *arguments) == (3, [])
    assert "ours/dies, ours/right" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="what is left behind is looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path, number: signal.Signals):
    words = [sys.executable, str(HERE / "engines_here.py"), str(tmp_path), "--engines", "ours/right", *QUICK]
    words += ["--formats", "float32", "--cache", str(tmp_path / "cache"), "--results", str(tmp_path / "results.jsonl")]
    path = os.pathsep.join([str(HERE.parents[1] / "fixtures" / "engines"), *sys.path])
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE) as process:
        until = time.monotonic() + 100
        while not any(map(is_server, marked(tmp_path))) and time.monotonic() < until:
            time.sleep(0.05)
        assert any(map(is_server, marked(tmp_path)))
        process.send_signal(number)
        assert process.wait(100) == 130
    assert marked(tmp_path) == []


def is_server(command: str) -> bool:
    """Itself, not who was told to start it."""
    return "served.py" in command and not any(word in command for word in ("-m lfm2np", "sh -c"))


def marked(tmp_path: Path) -> list[str]:
    """Command lines of processes with our mark in their environment."""
    commands = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={tmp_path}".encode() in (folder / "environ").read_bytes():
                commands.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended, or is another's
    return commands
