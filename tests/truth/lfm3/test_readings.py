"""The label "default" beside a partial rotation: both readings are computed right, and `check` names the other one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import inject
from lfm3_models import MODELS

import lfm2np
from lfm2np.commands.cli import main
from lfm2np.oracle.locate.dump import content_of
from lfm2np.oracle.recorders.lfm2np_recorder import record
from lfm2np.suite.strategies.tiny_models import checkpoint

pytestmark = pytest.mark.slow

IDS = [5, 17, 3, 3, 9, 22, 11, 8, 20, 4, 17, 3, 6, 13, 2, 19, 7]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the label of released checkpoints: "default" beside a partial_rotary_factor of 0.5."""
    directory = tmp_path_factory.mktemp("published")
    shutil.copytree(checkpoint(MODELS["all kinds of layers"]), directory, dirs_exist_ok=True)
    raw = json.loads((directory / "config.json").read_text())
    raw["rope_parameters"]["full_attention"]["rope_type"] = "default"
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


ENGINE = """
import warnings
warnings.simplefilter("ignore")
import lfm2np
from lfm2np.suite.adapters import Own

def factory(model, sizes):
    return Own(lfm2np.load(model, rope={reading!r}), sizes)
"""


Checked = Callable[[str, str], tuple[int, str]]


@pytest.fixture
def checked(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Checked:
    """Exit code and output of `check`, of an engine that reads it so, judged by the other reading or the same."""

    def check(engine: str, judged_by: str) -> tuple[int, str]:
        (tmp_path / "reads_it_so.py").write_text(ENGINE.format(reading=engine))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "reads_it_so", raising=False)
        options = ["--model", str(published), "--rope", judged_by, "--cases", "short-prompts"]
        code = main(["check", "reads_it_so:factory", *options])
        return code, capsys.readouterr().out

    return check


@pytest.mark.rounding
@pytest.mark.filterwarnings("ignore:.*labelled")
@pytest.mark.parametrize("engine", ["trained", "transformers"])
@pytest.mark.parametrize("judged_by", ["trained", "transformers"])
def test_check_judges_by_either_and_names_the_other_as_the_cause(checked: Checked, engine: str, judged_by: str):
    code, out = checked(engine, judged_by)
    if engine == judged_by:
        assert code == 0 and "EXACT" in out and "--rope" not in out
        return
    assert code == 1
    share = "0.5 of each head is rotated" if engine == "trained" else "all of each head is rotated"
    (line,) = [line for line in out.splitlines() if f"certain: right with --rope {engine}" in line]
    assert share in line
    assert line.endswith("the engine reads the rotation's label otherwise")


@pytest.mark.rounding
@pytest.mark.filterwarnings("ignore:.*labelled")
def test_the_other_reading_is_no_cause_of_another_bug(checked: Checked):
    with inject("window-ignored-in-decoding"):
        code, out = checked("transformers", "trained")
    assert code == 1 and "right with --rope" not in out


@pytest.mark.filterwarnings("ignore:.*labelled")
def test_commands_read_it_as_asked(published: Path, capsys: pytest.CaptureFixture[str]):
    by_reading = {}
    for reading in ("trained", "transformers"):
        assert main(["info", "--digest", "--model", str(published), "--rope", reading, "--json"]) == 0
        by_reading[reading] = json.loads(capsys.readouterr().out)["sha256"]
        model = lfm2np.load(published, rope=reading)
        assert model.digest() == by_reading[reading]
        assert main(["info", "--model", str(published), "--rope", reading]) == 0
        assert ("all of each head" in capsys.readouterr().out) == (reading == "transformers")
    assert by_reading["trained"] == lfm2np.load(checkpoint(MODELS["all kinds of layers"])).digest()
    assert by_reading["trained"] != by_reading["transformers"]


@pytest.mark.rounding
@pytest.mark.filterwarnings("default:.*labelled")
def test_locate_names_the_other_reading_where_a_rotation_is_wrong(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    dump = tmp_path / "dump.safetensors"
    other = lfm2np.load(published, "float32", rope="transformers")
    dump.write_bytes(content_of(record(other, IDS), "float32"))
    capsys.readouterr()
    assert main(["locate", str(dump), "--model", str(published)]) == 1
    shown = capsys.readouterr()
    assert "q_rotated" in shown.out
    assert shown.err.count("labelled") == 1
    assert "the rotation's label has another reading: --rope transformers" in shown.out
    assert main(["locate", str(dump), "--model", str(published), "--rope", "transformers"]) == 0
    assert "another reading" not in capsys.readouterr().out
