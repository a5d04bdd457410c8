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
from processes import last_words
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


@pytest.mark.slow
def test_a_wrong_engine_that_is_expected_to_be_wrong_is_no_news(tmp_path: Path):
    code, records = ran(tmp_path, "--engines", "ours/wrong", *QUICK)
    assert (code, [record["verdict"] for record in records]) == (0, ["BUG"])
    assert records[0]["suspects"]


def test_a_variant_prepares_the_checkpoint_in_its_own_way(tmp_path: Path):
    code, (record,) = ran(tmp_path, "--engines", "ours/unprepared", *QUICK)
    assert (code, record["reasons"]) == (0, ["no trained in float32 here"])


def test_the_last_words_of_a_log_are_its_last_error_not_where_to_read_of_it(tmp_path: Path):
    lines = [
        "Value error, no Triton [type=value_error]",
        "    For further information visit https://e.dev/value_error",
        "",
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    assert last_words(tmp_path / "log") == "error, no Triton [type=value_error]"


@pytest.mark.slow
def test_what_is_known_is_not_run_again_and_other_pins_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ("--engines", "ours/dies", "--times", "2", *QUICK)
    _, records = ran(tmp_path, *arguments)
    assert [record["run"] for record in records] == [1, 2]
    assert ran(tmp_path, *arguments) == (0, records)
    for record in records:
        record["pins"] = {"numpy": "0.1"}
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(ran(tmp_path, *arguments)[1]) == 4


def test_an_outcome_that_is_not_expected_is_told_and_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The environment that is given lacks what is pinned."""
    code, (record,) = ran(tmp_path, "--engines", "other")
    assert (code, record["verdict"]) == (1, "refused")
    assert "no-such-distribution is missing, expected 1.0.0" in record["reasons"][0]
    assert "other/alone float32 check 1: expected right, came refused" in capsys.readouterr().err


@pytest.mark.slow
def test_fuzzing_is_a_row_of_its_own(tmp_path: Path):
    formats = ("--formats", "float32", "--fuzz-minutes", "0.02")
    code, records = ran(tmp_path, "--engines", "ours/right", *QUICK, *formats)
    assert (code, [record["kind"] for record in records]) == (0, ["check", "fuzz"])
    assert records[1]["verdict"] == "no finding"
    assert records[1]["traces"] > 0


@pytest.mark.parametrize("arguments", [["--engines", "mine"], ["--engines", "ours/alone"]])
def test_an_unknown_name_is_told_with_those_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    assert ran(tmp_path, *arguments) == (3, [])
    assert "ours/dies, ours/right" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="what is left behind is looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("what", [[], ["--fuzz-minutes", "5"]])
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path, number: signal.Signals, what: list[str]):
    words = [sys.executable, str(HERE / "engines_here.py"), str(tmp_path), "--engines", "ours/right", *QUICK, *what]
    words += ["--formats", "float32", "--cache", str(tmp_path / "cache"), "--results", str(tmp_path / "results.jsonl")]
    path = os.pathsep.join([str(HERE.parents[1] / "fixtures" / "engines"), *sys.path])
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE) as process:
        if what:  # the first line tells that the check is done
            assert process.stdout is not None
            assert process.stdout.readline()
        until = time.monotonic() + 100
        while not any(map(is_server, marked(tmp_path))) and time.monotonic() < until:
            time.sleep(0.05)
        assert any(map(is_server, marked(tmp_path)))
        time.sleep(1.0 if what else 0.0)  # until `lfm2np fuzz` knows that it has started it
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
