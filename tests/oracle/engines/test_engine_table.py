"""Recipes are whole, records become rows, and the page has the table that the results make."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from campaign import put_between
from engines_here import GIVEN, NUMPY
from engines_here import RECIPES as OURS
from judging import MOST_REASONS, Job, checked, shown
from recipe import HERE, OUTCOMES, Recipe, Variant
from recipes import RECIPES
from results import BEGIN, END, is_known, is_news, read, table
from run import PAGE, RESULTS, main

from lfm2np.oracle.judging.verdict import Verdict

PAIRS = [(recipe, variant) for recipe in RECIPES for variant in recipe.variants]
NAMES = [f"{recipe.name}/{variant.name}" for recipe, variant in PAIRS]


def record(**fields: Any) -> dict[str, Any]:
    """What a run of our own engine may leave; its command is the recipe's, unless another is given."""
    head = {"engine": "ours", "variant": "right", "format": "float32", "run": 1, "kind": "check", "cases": "", **fields}
    job = Job(NUMPY, NUMPY.variant("right"), head["format"], 1, head["cases"], float(head["kind"] == "fuzz"))
    verdict = {"pins": {}, "versions": {"numpy": "2.0"}, "command": shown(job), "verdict": "EXACT"}
    numbers = {"counts": {"EXACT": 1234}, "rms": 0.75, "worst": 2.55, "flips": 0, "asked": 10}
    return {**head, **verdict, **numbers, "suspects": [], "reasons": ["fine"], "unanswered": [], **fields}


@pytest.mark.parametrize(("recipe", "variant"), PAIRS, ids=NAMES)
def test_a_recipe_is_whole_and_names_nothing_of_this_machine(recipe: Recipe, variant: Variant):
    assert recipe.pins
    assert set(recipe.shown) <= {*recipe.pins, *recipe.programs, "gguf"}
    assert variant.expected in OUTCOMES.values()
    assert ("{port}" in variant.target) == ("{port}" in variant.start)
    assert (HERE.parent / variant.model / "config.json").exists()
    for name in re.findall(r"{here}/(\S+)", f"{variant.target} {variant.start}"):
        assert (HERE / name).exists()
    if variant.report:
        assert {"issue.md", "reproduce.py"} <= {path.name for path in (HERE / "reports" / variant.report).iterdir()}
    for minutes in (0.0, 1.0) if variant.fuzz is not None else (0.0,):  # the command that is shown
        command = shown(Job(recipe, variant, variant.formats[0], 1, fuzz_minutes=minutes))
        assert "{" not in command
        assert str(HERE) not in command
        assert ("PORT" in command) == ("{port}" in variant.target)
        ours = command.rpartition("lfm2np ")[2]
        assert ours.count("--format ") == 1 and ours.count("--model ") <= 1  # each option is taken once


@pytest.mark.parametrize("script", list((HERE / "reports").glob("*/reproduce.py")), ids=lambda path: path.parent.name)
def test_a_report_does_not_need_this_package(script: Path):
    tree = ast.parse(script.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names}.isdisjoint({"lfm2np", "scheduler", "numpy"})


def test_runs_that_differ_are_one_row_some_cases_named_words_escaped_and_runs_of_other_pins_or_commands_not_shown():
    """All else that a row may say stands on the page."""
    wrong = {"verdict": "BUG", "suspects": ["right cold, wrong warm"], "counts": {"EXACT": 9, "BUG": 3}, "flips": 3}
    differing = [record(), record(run=2, **wrong), record(run=3)]
    refused = record(format="bfloat16", verdict="refused", reasons=["ValueError: a|b"])
    others = [record(pins={"numpy": "1"}), record(command="lfm2np check of old")]  # of a recipe as it was once
    shown = table([record(cases="short-prompts"), refused, *differing, *others], [NUMPY]).split("\n")
    _, _, differ, some, other = shown
    assert "12 | EXACT in 2 of 3, **BUG** in 1 of 3 | right cold, wrong warm; 3 BUG" in differ
    assert "1,234 of `--cases short-prompts`" in some and r"a\|b" in other


def test_every_verdict_has_an_outcome():
    assert set(Verdict) <= set(OUTCOMES)


def test_a_run_is_known_by_its_whole_key():
    job = Job(NUMPY, NUMPY.variant("right"), "float32", 1)
    assert is_known(job.key, [record()])
    for other in ({"run": 2}, {"format": "bfloat16"}, {"pins": {"numpy": "1"}}, {"cases": "borders"}, {"command": "x"}):
        assert not is_known(job.key, [record(**other)])


@pytest.mark.parametrize(
    ("expected", "kind", "verdict", "news"),
    [
        ("right", "check", "TIE", False),
        ("right", "check", "INCONCLUSIVE", True),
        ("right", "fuzz", "finding", True),
        ("wrong", "check", "EXACT", True),
        ("wrong", "fuzz", "no finding", False),
        ("refused", "check", "EXACT", True),
        ("untold", "check", "INCONCLUSIVE", False),
    ],
)
def test_news_is_what_is_not_known(expected: str, kind: str, verdict: str, news: bool):
    assert is_news(record(kind=kind, verdict=verdict), Variant("any", "transformers:", expected)) is news


def test_a_line_that_is_torn_is_named(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"engine": "ou')
    with pytest.raises(ValueError, match=r"results\.jsonl:1: .*remove the line"):
        read(path)


def test_the_table_goes_between_its_marks_and_nowhere_else():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put_between(page, BEGIN, "new", END) == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="once each"):
        put_between("before", BEGIN, "new", END)


def test_the_page_has_the_table_that_the_results_make():
    text = PAGE.read_text(encoding="utf-8")
    assert put_between(text, BEGIN, table(read(RESULTS), RECIPES), END) == text, (
        "python fixtures/engines/run.py --table"
    )


# --- the runner, on engines of our own


FOLDER = Path(__file__).parent
QUICK = ["--cases", "short-prompts"]


def ran(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, object]]]:
    """Exit code, and the records that are there then."""
    results = tmp_path / "results.jsonl"
    code = main([*arguments, *GIVEN, "--cache", str(tmp_path / "cache"), "--results", str(results)], OURS)
    lines = results.read_text().splitlines() if results.exists() else []
    return code, [json.loads(line) for line in lines]


def test_a_record_counts_all_unusable_answers_and_names_the_first_kinds():
    kinds = [{"count": number, "message": f"kind {number}"} for number in range(1, MOST_REASONS + 3)]
    names = ("counts", "rms", "worst", "flips", "rerouted", "asked", "suspects")
    report = {"verdict": "BUG", "findings": [], "figures": {**dict.fromkeys(names), "unanswered": kinds}}
    unanswered = checked(subprocess.CompletedProcess([], 1, json.dumps(report), ""))["unanswered"]
    assert unanswered[:-1] == [[number, f"kind {number}"] for number in range(1, MOST_REASONS + 1)]
    assert unanswered[-1] == [2 * MOST_REASONS + 3, "others"]


@pytest.mark.night
def test_a_right_engine_and_one_that_dies_at_its_start_are_rows_as_expected(tmp_path: Path):
    code, records = ran(tmp_path, "--engines", "ours/right,ours/dies", "--formats", "float32", *QUICK)
    assert code == 0
    assert [record["verdict"] for record in records] == ["EXACT", "refused"]
    assert records[0]["counts"] and records[0]["versions"]
    assert "CHECKOUT/fixtures/engines/no-such-model" in records[1]["reasons"][0]
    assert not any(str(folder) in json.dumps(records) for folder in (tmp_path, FOLDER.parents[1]))


@pytest.mark.slow
def test_a_variant_prepares_the_checkpoint_in_its_own_way(tmp_path: Path):
    code, (record,) = ran(tmp_path, "--engines", "ours/unprepared", *QUICK)
    assert (code, record["reasons"]) == (0, ["no trained in float32 here"])


@pytest.mark.slow
def test_an_outcome_that_is_not_expected_is_told_and_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The environment that is given lacks what is pinned."""
    code, (record,) = ran(tmp_path, "--engines", "other")
    assert (code, record["verdict"]) == (1, "refused")
    assert "no-such-distribution is missing, expected 1.0.0" in record["reasons"][0]
    assert "other/alone float32 check 1: expected right, came refused" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--engines", "mine"], ["--engines", "ours/alone"]])
def test_an_unknown_name_is_told_with_those_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    assert ran(tmp_path, *arguments) == (3, [])
    assert "ours/dies, ours/right" in capsys.readouterr().err


@pytest.mark.night
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="what is left behind is looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path, number: signal.Signals):
    words = [sys.executable, str(FOLDER / "engines_here.py"), str(tmp_path), "--engines", "ours/right", *QUICK]
    words += ["--formats", "float32", "--cache", str(tmp_path / "cache"), "--results", str(tmp_path / "results.jsonl")]
    path = os.pathsep.join([str(FOLDER.parents[1] / "fixtures" / "engines"), *sys.path])
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
