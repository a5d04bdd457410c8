"""What has to be believed is what `lfm2np info --trust` lists, and nothing else of ours runs; where it is the truth."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lfm2np
from lfm2np.checkpoint.loaded import lfm3_fixture, moe_fixture
from lfm2np.commands.cli import trusted
from lfm2np.errors import RequestError
from lfm2np.truth import integers

BASE = {"truth/reference.py", "truth/integers.py", "truth/elementary.py", "truth/rope.py", "truth/processor.py"}
READING = (
    "checkpoint/",
    "truth/config.py",
    "truth/config_values.py",
    "truth/layers.py",
    "truth/weights.py",
    "errors.py",
    "values.py",
    "system.py",
)


def executed(function: Callable[[], object]) -> set[str]:
    """The files of lfm2np of which any function ran, relative to it; not what a module does when it is imported."""
    top, paths = Path(lfm2np.__file__).parent, set()

    def profile(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(top) and frame.f_code.co_name != "<module>":
            paths.add(path.relative_to(top).as_posix())

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return paths


@pytest.mark.parametrize("fixture", [lfm2np.trained_fixture, moe_fixture, lfm3_fixture])
def test_nothing_but_the_base_and_the_reading_of_files_runs(fixture: Callable[[], Path]):
    ran = executed(lambda: lfm2np.load(fixture(), "integers").logits([1, 17, 42]))
    choosing = {"engine/loading.py", "arithmetic/__init__.py"}  # by name, and who calls the reference
    assert {name for name in ran if not name.startswith(READING)} == BASE | choosing
    assert "arithmetic/pieces.py" in executed(lambda: lfm2np.load(fixture()).logits([1, 17, 42])), "the control"


def test_the_base_is_what_the_command_lists():
    listed = {file.file for file in trusted.trusted_files() if not file.is_reading}
    assert listed == BASE | {"truth/operations.py"}  # which only declares
    assert sum(file.lines for file in trusted.trusted_files() if not file.is_reading) <= 860
    assert all(file.file.startswith(READING) for file in trusted.trusted_files() if file.is_reading)


def test_no_engine_computes_in_integers_and_nothing_is_streamed_or_kept(tmp_path: Path):
    with pytest.raises(
        RequestError, match=r"numerics 'integers' computes one sequence at a time.*expected one of exact"
    ):
        lfm2np.Engine(lfm2np.load(numerics="integers"))
    with pytest.raises(RequestError, match=r"weights 'streamed': expected resident weights"):
        lfm2np.load(numerics="integers", weights="streamed")
    with pytest.raises(RequestError, match=r"prepared .*: expected resident weights"):
        lfm2np.load(numerics="integers", prepared=tmp_path)


def test_the_truth_of_a_model_is_in_integers_as_far_as_the_work_allows(monkeypatch: pytest.MonkeyPatch):
    model = lfm2np.load()
    assert model.truth_of(100).numerics is integers
    assert model.truth_of(100) is model.truth_of(7), "prepared once"
    assert model.truth_of(10**9) is model
    monkeypatch.setattr("lfm2np.checkpoint.loaded.MOST_PARAMETERS", 1000)
    assert model.truth_of(1) is model
    rounding = lfm2np.load(numerics="float64")
    assert rounding.truth_of(1) is rounding
