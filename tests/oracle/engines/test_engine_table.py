"""Recipes are whole, records become rows, and the page has the table that the results make."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from campaign import put_between
from engines_here import NUMPY
from judging import Job, shown
from recipe import HERE, OUTCOMES, Recipe, Variant
from recipes import RECIPES
from results import BEGIN, END, is_known, read, table
from run import PAGE, RESULTS

PAIRS = [(recipe, variant) for recipe in RECIPES for variant in recipe.variants]
NAMES = [f"{recipe.name}/{variant.name}" for recipe, variant in PAIRS]


def record(**fields: Any) -> dict[str, Any]:
    """What a run of our own engine may leave; its command is the recipe's, unless another is given."""
    head = {"engine": "ours", "variant": "right", "format": "float32", "run": 1, "kind": "check", "cases": "", **fields}
    job = Job(NUMPY, NUMPY.variant("right"), head["format"], 1, head["cases"], float(head["kind"] == "fuzz"))
    verdict = {"pins": {}, "versions": {"numpy": "2.0"}, "command": shown(job), "verdict": "EXACT"}
    numbers = {"counts": {"EXACT": 1234}, "rms": 0.75, "worst": 2.55, "flips": 0, "asked": 10}
    return {**head, **verdict, **numbers, "suspects": [], "reasons": ["fine"], "unanswered": [], **fields}


def rows(*records: dict[str, Any]) -> list[list[str]]:
    lines = table(records, [NUMPY]).split("\n")[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize(("recipe", "variant"), PAIRS, ids=NAMES)
def test_a_recipe_is_whole(recipe: Recipe, variant: Variant):
    assert recipe.pins
    assert set(recipe.shown) <= {*recipe.pins, *recipe.programs, "gguf"}
    assert {variant.expected, variant.finds} <= {*OUTCOMES.values(), "untold", ""}
    assert ("{port}" in variant.target) == ("{port}" in variant.start)
    assert (HERE.parent / variant.model / "config.json").exists()
    for name in re.findall(r"{here}/(\S+)", f"{variant.target} {variant.start}"):
        assert (HERE / name).exists()
    if variant.report:
        assert {"issue.md", "reproduce.py"} <= {path.name for path in (HERE / "reports" / variant.report).iterdir()}


@pytest.mark.parametrize(("recipe", "variant"), PAIRS, ids=NAMES)
def test_the_command_that_is_shown_is_filled_in_and_names_nothing_of_this_machine(recipe: Recipe, variant: Variant):
    for minutes in (0.0, 1.0) if variant.fuzz is not None else (0.0,):
        command = shown(Job(recipe, variant, variant.formats[0], 1, fuzz_minutes=minutes))
        assert "{" not in command
        assert str(HERE) not in command
        assert ("PORT" in command) == ("{port}" in variant.target)
        assert f"--format {variant.formats[0]}" in command


RIGHT = ["1,234 positions", "EXACT, 3 runs", "RMS 0.75, worst 2.5 times the noise"]
BUG = {"run": 2, "verdict": "BUG", "suspects": ["right cold, wrong warm"], "counts": {"EXACT": 9, "BUG": 3}, "flips": 3}
ROWS = {  # of records of one question, what stands behind engine, variant and format
    "runs that agree": ([{}, {"run": 2, "worst": 3.0}, {"run": 3}], RIGHT),
    "runs that differ, of which the wrong one is shown": (
        [{}, BUG, {"run": 3}],
        ["12 positions", "EXACT in 2 of 3 runs, **BUG** in 1 of 3 runs", "right cold, wrong warm; 3 positions BUG"],
    ),
    "a refusal, with its words": (
        [{"verdict": "refused", "reasons": ["ValueError: a|b"]}],
        ["nothing", "refused, 1 run", r"ValueError: a\|b"],
    ),
    "other experts": (
        [{"verdict": "ROUTE", "counts": {"EXACT": 4321, "ROUTE": 2}, "rerouted": 1234}],
        ["4,323 positions", "ROUTE, 1 run", f"{RIGHT[2]}, 1,234 tokens went to other experts"],
    ),
}


@pytest.mark.parametrize(("records", "expected"), ROWS.values(), ids=ROWS)
def test_records_of_one_question_are_one_row(records: list[dict[str, Any]], expected: list[str]):
    (row,) = rows(*(record(**fields) for fields in records))
    assert row[3:] == expected


def test_a_run_is_known_by_its_whole_key():
    job = Job(NUMPY, NUMPY.variant("right"), "float32", 1)
    assert is_known(job.key, [record()])
    for other in ({"run": 2}, {"format": "bfloat16"}, {"pins": {"numpy": "1"}}, {"cases": "borders"}, {"command": "x"}):
        assert not is_known(job.key, [record(**other)])


def test_a_line_that_is_torn_is_named(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"engine": "ou')
    with pytest.raises(ValueError, match=r"results\.jsonl:1: .*remove the line"):
        read(path)


def test_the_page_has_the_table_that_the_results_make():
    text = PAGE.read_text(encoding="utf-8")
    assert put_between(text, BEGIN, table(read(RESULTS), RECIPES), END) == text, (
        "python fixtures/engines/run.py --table"
    )
