"""The catalogue of faults: each fits the code, is undone, and `lfm2np faults` says which property catches it."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from internal_properties.catalogue import EVERYTHING as PROPERTIES

import lfm2np
from lfm2np import RequestError
from lfm2np.commands.cli import faults as cli_faults
from lfm2np.commands.cli import main
from lfm2np.suite import fault_trial, faults
from lfm2np.suite.catalogue import ALL
from lfm2np.suite.faults import FAULTS, VARIANTS, Edit, Fault, Variant, inject
from lfm2np.suite.faults.catalogue import edits_of
from lfm2np.suite.faults.inject import find
from lfm2np.suite.runner import Result

EVERYTHING: tuple[Fault | Variant, ...] = (*FAULTS, *VARIANTS)


@pytest.mark.parametrize("one", EVERYTHING, ids=lambda case: case.name)
def test_every_edit_fits_the_code_and_is_undone(one: Fault | Variant):
    before = {edit.where: find(edit.where).__code__ for edit in one.edits}
    with inject(one.name):
        for where, code in before.items():
            assert find(where).__code__ is not code
    with pytest.raises(ZeroDivisionError), inject(one):
        raise ZeroDivisionError
    for where, code in before.items():
        assert find(where).__code__ is code


def test_the_catalogue_covers_every_section():
    names = [one.name for one in EVERYTHING]
    assert len(set(names)) == len(names)
    assert Counter(fault.section for fault in FAULTS).keys() == set("ABCDE")
    assert min(Counter(fault.section for fault in FAULTS).values()) >= 11
    assert len(FAULTS) >= 60
    assert len(VARIANTS) >= 15
    for fault in FAULTS:
        assert fault.edits
        assert fault.sentence.endswith(".")
    for variant in VARIANTS:
        assert variant.edits or variant.sizes or variant.environment


@pytest.mark.parametrize(
    ("edit", "fragment"),
    [
        (Edit("lfm2np.engine.cache:commit", "no such text", ""), "stands there 0 times, expected once"),
        (Edit("lfm2np.engine.cache:commit", "entry", ""), "times, expected once"),
        (Edit("lfm2np.engine.cache:nothing", "", ""), "there is no such function"),
        (Edit("lfm2np.engine.cache:DEFAULT_BYTES", "", ""), "int, expected a function"),
    ],
)
def test_an_edit_that_does_not_fit_is_an_error_and_changes_nothing(edit: Edit, fragment: str):
    first = Edit("lfm2np.engine.cache:move", 'case "zero_state":', 'case "nothing":')
    before = find(first.where).__code__
    with pytest.raises(RequestError, match=fragment), inject(Fault("x", "A", "X.", (), (first, edit))):
        pass
    assert find(first.where).__code__ is before


def test_a_patch_is_an_edit_of_the_lines_that_go_and_stay():
    shared = {"guards": (Edit("m:g", "x", ""),)}
    assert edits_of("m:f\n  if a:\n-     b\n+     c\n+     d", shared) == (
        Edit("m:f", "if a:\n    b", "if a:\n    c\n    d"),
    )
    assert edits_of("guards", shared) == shared["guards"]


@pytest.mark.parametrize(("patch", "fragment"), [("m:f\nb", "'b', expected '- '"), ("guard", "nothing below it")])
def test_a_line_that_is_none_of_a_patch_is_an_error_that_names_it(patch: str, fragment: str):
    with pytest.raises(RequestError, match=fragment):
        edits_of(patch, {"guards": ()})


def test_an_unknown_fault_is_an_error_that_names_it():
    with pytest.raises(RequestError, match="fault 'nothing': not known"), inject("nothing"):
        pass


def test_a_fault_changes_what_the_engine_says_and_only_while_it_is_there():
    def tokens() -> list[tuple[int, ...]]:
        llm = lfm2np.LLM(block_size=2)
        params = lfm2np.SamplingParams(temperature=0.0, max_tokens=6)
        prompts = ["copy: tivu zo sa di ->", "count: 23 to 31 ->"]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    right = tokens()
    with inject("state-never-advanced"):
        assert tokens() != right
    assert tokens() == right


# --- the command


@pytest.mark.slow
def test_the_command_says_which_property_catches_a_fault(capsys: pytest.CaptureFixture[str]):
    names = ["double-bos-in-chats", "evicted-key-still-leads-to-its-block"]
    assert main(["faults", *names, "--json", "--profile", "quick"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [fault["name"] for fault in report["faults"]] == names
    assert report["benign"] == []
    for fault in report["faults"]:
        assert fault["caught"] is True
        assert fault["examples"] >= 1
        assert fault["by"]
    assert main(["faults", names[0], "--show"]) == 0
    text = capsys.readouterr().out
    assert f"| D | {names[0]} |" in text
    assert "from lfm2np.suite.again import *" in text


def answered(caught: bool, capsys: pytest.CaptureFixture[str], name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    row: dict[str, Any] = {"name": name, "caught": caught, "by": "sizes", "examples": 3, "size": 2, "profile": "quick"}
    monkeypatch.setattr(cli_faults, "tried", lambda *_: iter([row]))
    return main(["faults", name])


@pytest.mark.parametrize(("name", "caught"), [("request-seed-ignored", False), ("blocks-of-one-token", True)])
def test_a_fault_that_survives_or_a_variant_that_is_flagged_is_exit_code_1(capsys, monkeypatch, name, caught):
    assert answered(caught, capsys, name, monkeypatch) == 1
    assert name in capsys.readouterr().err
    assert answered(not caught, capsys, name, monkeypatch) == 0


def test_a_process_without_a_verdict_is_never_a_success(monkeypatch: pytest.MonkeyPatch):
    for fault, caught in ((FAULTS[0], False), (VARIANTS[0], True)):
        monkeypatch.setattr(sys, "executable", "/bin/false")
        answer = cli_faults.try_one(fault, "quick")
        assert (answer["name"], answer["caught"]) == (fault.name, caught)
        assert "ended with code 1" in answer["by"]


def test_a_property_that_fails_without_the_fault_too_catches_nothing(monkeypatch: pytest.MonkeyPatch):
    def always(prop: Any, factory: Any, profile: str) -> Result:
        return Result(prop.id, "failed", examples=1)

    def once(prop: Any, factory: Any, profile: str, runs: list[str] = []) -> Result:  # noqa: B006
        runs.append(prop.id)
        return Result(prop.id, "failed" if len(runs) == 1 else "passed", examples=1)

    first = fault_trial.suite()[0].id
    monkeypatch.setattr(fault_trial, "run_property", always)
    assert fault_trial.try_fault(FAULTS[0], "quick") == {
        "caught": False,
        "by": f"{first}, which fails without it, too",
    }
    monkeypatch.setattr(fault_trial, "run_property", once)
    assert fault_trial.try_fault(FAULTS[0], "quick")["by"] == first


def test_nothing_computed_under_a_fault_is_left_when_its_catch_is_tried_without_it(monkeypatch: pytest.MonkeyPatch):
    """A fault of the reference would fail the property once more: by the logits that were kept."""
    sizes: list[int] = []

    def fills(prop: Any, factory: Any, profile: str) -> Result:
        sizes.append(sum(cached.cache_info().currsize for cached in fault_trial.COMPUTED))
        fault_trial.load_once(lfm2np.trained_fixture())
        return Result(prop.id, "failed" if len(sizes) == 1 else "passed", examples=1)

    monkeypatch.setattr(fault_trial, "run_property", fills)
    assert fault_trial.try_fault(FAULTS[0], "quick")["caught"]
    assert sizes[1] == 0


def test_an_installed_copy_tries_the_suite_for_any_engine_and_a_checkout_all(monkeypatch, tmp_path: Path):
    assert fault_trial.suite() == PROPERTIES
    monkeypatch.setattr(fault_trial, "__file__", str(tmp_path / "lfm2np" / "suite" / "fault_trial.py"))
    assert fault_trial.suite() == ALL


def test_the_catalogue_can_be_listed(capsys: pytest.CaptureFixture[str]):
    assert main(["faults", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed["faults"]) == len(FAULTS)
    assert len(listed["benign"]) == len(VARIANTS)
    assert main(["faults", "--list"]) == 0
    text = capsys.readouterr().out
    for fault in (*FAULTS, *VARIANTS):
        assert fault.name in text
        assert fault.sentence in text


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["--jobs", "0"], ["request-seed-ignored", "--profile", "slow"], ["--list", "nothing"]]
)
def test_bad_arguments_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str]):
    try:
        code = main(["faults", *arguments])
    except SystemExit as ending:
        code = ending.code
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_page_has_a_row_for_every_fault_and_variant():
    """Its tables are what `lfm2np faults` printed: none is left out, none survives, none is flagged.

    A variant that has not been run with all examples of `ci` says so.
    """
    text = (Path(__file__).parents[3] / "docs" / "why" / "fault-table.md").read_text(encoding="utf-8")
    faults_in_it = re.findall(r"^\| [A-E] \| (\S+) \|.*\| ([a-z0-9-]+) \| \d+ \| \d* \|$", text, re.MULTILINE)
    assert [name for name, _ in faults_in_it] == [fault.name for fault in FAULTS]
    assert {by for _, by in faults_in_it} <= {prop.id for prop in PROPERTIES}
    variants_in_it = re.findall(r"^\| (\S+) \| (?:no|no, under quick) \|$", text, re.MULTILINE)
    assert variants_in_it == [variant.name for variant in VARIANTS]


def test_no_hook_stands_in_the_engine():
    """An unused fault costs nothing: nothing outside lfm2np/suite/faults and its users knows of it."""
    package = faults.__file__.removesuffix("suite/faults/__init__.py")
    users = {
        path.relative_to(package).parts[0]
        for path in Path(package).rglob("*.py")
        if "lfm2np.suite.faults" in path.read_text()
    }
    assert users == {"suite", "teaching", "commands"}
