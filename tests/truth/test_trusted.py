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

pytestmark = pytest.mark.slow

LISTED = {file.file: file for file in trusted.trusted_files()}
CHOOSING = {  # run beside them, and change no number of a plain checkpoint
    *("engine/loading.py", "arithmetic/__init__.py"),  # which arithmetic, by its name, and who calls the reference
    *("checkpoint/loaded.py", "checkpoint/files.py", "checkpoint/tensors.py"),  # which kind of file
    "checkpoint/packed/settings.py",  # whether it is quantised, by whom
    "checkpoint/text/tokenizer.py",  # whether ids lie in the vocabulary
}
MOST_LINES = {False: 860, True: 1910}  # of the reference, of reading


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
def test_nothing_runs_but_what_is_listed_and_what_chooses(fixture: Callable[[], Path]):
    lfm2np.load(fixture(), "integers").logits([1])  # what only the first import does
    ran = executed(lambda: lfm2np.load(fixture(), "integers").logits([1, 17, 42]))
    assert ran - LISTED.keys() == CHOOSING
    assert LISTED.keys() - ran <= {"errors.py", "truth/operations.py"}, "only declare"
    assert "arithmetic/pieces.py" in executed(lambda: lfm2np.load(fixture()).logits([1, 17, 42])), "the control"


def test_the_list_stays_short_and_reads_nothing_quantised():
    for is_reading, most in MOST_LINES.items():
        assert sum(file.lines for file in LISTED.values() if file.is_reading == is_reading) <= most
    assert not [name for name in LISTED if name.startswith(("checkpoint/packed", "checkpoint/gguf", "checkpoint/text"))]


def test_no_engine_computes_in_integers_and_nothing_is_streamed():
    with pytest.raises(
        RequestError, match=r"numerics 'integers' computes one sequence at a time.*expected one of exact"
    ):
        lfm2np.Engine(lfm2np.load(numerics="integers"))
    with pytest.raises(RequestError, match=r"weights 'streamed': expected resident weights"):
        lfm2np.load(numerics="integers", weights="streamed")


def test_the_truth_of_a_model_is_in_integers_as_far_as_the_work_allows(monkeypatch: pytest.MonkeyPatch):
    model = lfm2np.load()
    assert model.truth_of(100).numerics is integers
    assert model.truth_of(100) is model.truth_of(7), "prepared once"
    assert model.truth_of(10**9) is model
    monkeypatch.setattr("lfm2np.checkpoint.loaded.MOST_PARAMETERS", 1000)
    assert model.truth_of(1) is model
    rounding = lfm2np.load(numerics="float64")
    assert rounding.truth_of(1) is rounding
