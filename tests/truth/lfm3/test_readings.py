"""The label "default" beside a partial rotation: both readings are computed right, and `check` names the other one."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from faults import inject
from lfm3_models import MODELS

import lfm2np
from lfm2np.commands.cli import main
from lfm2np.oracle.locate.dump import content_of
from lfm2np.oracle.recorders.lfm2np_recorder import record
from lfm2np.suite.strategies.tiny_models import checkpoint

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


def checked(
    published: Path,
    folder: Path,
    engine: str,
    judged_by: str,
    capsys: pytest.CaptureFixture[str],
    cases: str = "short-prompts",
) -> tuple[int, str]:
    (folder / "reads_it_so.py").write_text(ENGINE.format(reading=engine))
    sys.path.insert(0, str(folder))
    sys.modules.pop("reads_it_so", None)
    try:
        options = ["--model", str(published), "--rope", judged_by, "--cases", cases]
        code = main(["check", "reads_it_so:factory", *options])
    finally:
        sys.path.remove(str(folder))
    captured = capsys.readouterr()
    return code, captured.out


@pytest.mark.rounding
@pytest.mark.filterwarnings("ignore:.*labelled")
@pytest.mark.parametrize("engine", ["trained", "transformers"])
@pytest.mark.parametrize("judged_by", ["trained", "transformers"])
def test_check_judges_by_either_and_names_the_other_as_the_cause(
    published: Path, tmp_path: Path, engine: str, judged_by: str, capsys: pytest.CaptureFixture[str]
):
    code, out = checked(published, tmp_path, engine, judged_by, capsys)
    if engine == judged_by:
        assert code == 0
        assert "EXACT" in out
        assert "--rope" not in out
        return
    assert code == 1
    share = "0.5 of each head is rotated" if engine == "trained" else "all of each head is rotated"
    (line,) = [line for line in out.splitlines() if f"certain: right with --rope {engine}" in line]
    assert share in line
    assert line.endswith("the engine reads the rotation's label otherwise")


@pytest.mark.rounding
@pytest.mark.filterwarnings("ignore:.*labelled")
def test_the_other_reading_is_no_cause_of_another_bug(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with inject("window-ignored-in-decoding"):
        code, out = checked(published, tmp_path, "transformers", "trained", capsys, "short-prompts,prefixes")
    assert code == 1
    assert "right with --rope" not in out


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
    assert np.abs(lfm2np.load(published).logits(IDS)).max() > 0


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
