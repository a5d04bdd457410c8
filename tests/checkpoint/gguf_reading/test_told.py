"""What the command line says of a GGUF file, and which commands take one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks_drawn import quantised_tensors
from builders import raw_config, raw_mixture
from gguf_file import Tensor, gguf_bytes, model_keys

from lfm2np.checkpoint.config_json import parse_config
from lfm2np.commands.cli import main

pytestmark = pytest.mark.slow

WIDE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 40}
DENSE = parse_config(raw_config(**WIDE), "config.json")


def write(path: Path, dtype: str, **changes: Tensor) -> Path:
    path.write_bytes(gguf_bytes(model_keys(DENSE), quantised_tensors(DENSE, dtype, exponents=(8, 11)) | changes))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line on stderr of a command that fails."""
    assert main([*arguments]) != 0
    return capsys.readouterr().err.splitlines()[-1]


def test_info_tells_types_and_that_nothing_is_rounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path / "x.gguf", "Q4_K")
    lines = said(capsys, "info", "--model", str(path)).splitlines()
    assert f"{'tensors':<30}13 Q4_K, 8 F32" in lines and f"{'model':<30}{path}" in lines
    assert f"{'weights that grids round':<30}none: exact arithmetic holds every bit of every matrix" in lines
    report: dict[str, Any] = json.loads(said(capsys, "info", "--json", "--model", str(path)))
    assert report["types"] == {"Q4_K": 13, "F32": 8}
    assert all(bound["rounded_weights"] == 0 == bound["largest_rounding"] for bound in report["bounds"])
    assert {bound["slices"] for bound in report["bounds"]} == {2}


def test_info_tells_how_much_the_grids_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """float32 weights, whose second slice ends at 36 bits."""
    values = np.ones((256, 256), "<f4")
    values[3, 5:8] = 3 * 2.0**-37, 2.0**-40, 0.0
    ones = {"blk.0.shortconv.out_proj.weight": Tensor("F32", (256, 256), values.tobytes())}
    values[3, 9] += 2.0**-23  # more than 11 bits: two slices
    path = write(tmp_path / "x.gguf", "Q8_0", **ones)
    short = json.loads(said(capsys, "info", "--json", "--model", str(path)))["bounds"][1]
    assert (short["slices"], short["rounded_weights"]) == (1, 2)
    assert short["largest_rounding"] == 3 * 2.0**-38  # of 2, the power of two above 1
    ones = {"blk.0.shortconv.out_proj.weight": Tensor("F32", (256, 256), values.tobytes())}
    path = write(tmp_path / "x.gguf", "Q8_0", **ones)
    fine = json.loads(said(capsys, "info", "--json", "--model", str(path)))["bounds"][1]
    assert (fine["slices"], fine["rounded_weights"], fine["largest_rounding"]) == (2, 2, 2.0**-38)
    lines = said(capsys, "info", "--model", str(path)).splitlines()
    summary = "2 of 862,208, by less than 2**-37 of the largest in their row (exact)"
    assert f"{'weights that grids round':<30}{summary}" in lines


def test_experts_count_as_the_matrices_that_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = parse_config(raw_mixture(**WIDE, moe_intermediate_size=256), "config.json")
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes(model_keys(config), quantised_tensors(config, "Q6_K")))
    report = json.loads(said(capsys, "info", "--json", "--model", str(path)))
    assert report["types"]["Q6_K"] == 1 + 8 + 3 + 2 * 4 * 3  # embedding, operators, a dense layer, two of 4 experts


@pytest.mark.rounding
def test_commands_take_a_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(write(tmp_path / "x.gguf", "IQ4_XS"))
    digest = said(capsys, "info", "--digest", "--model", path).strip()
    assert len(bytes.fromhex(digest)) == 32
    assert json.loads(said(capsys, "info", "--digest", "--json", "--model", path))["sha256"] == digest
    arguments = ["--model", path, "--prompt-ids", "1,2,3"]
    assert json.loads(said(capsys, "generate", *arguments, "--max-tokens", "2", "--json"))["model"] == path
    assert json.loads(said(capsys, "score", *arguments, "--json"))["model"] == path
    dump = str(tmp_path / "dump.safetensors")
    said(capsys, "record", "lfm2np:", *arguments, "--max-tokens", "2", "-o", dump)
    assert "nothing" in said(capsys, "locate", dump, "--model", path).lower()


@pytest.mark.rounding
def test_the_small_engine_runs_a_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """That of the tutorial, which rounds the weights to float32."""
    path = str(write(tmp_path / "x.gguf", "Q4_K"))
    printed = said(capsys, "check", "lfm2np.teaching.tutorial:right", "--model", path, "--cases", "short-prompts")
    assert printed.startswith("verdict") and "BUG" not in printed and "DRIFT" not in printed


RECORDED = {"record": ("--prompt-ids", "1,2", "-o", "x"), "check": ("--cases", "short-prompts")}


def test_what_a_gguf_cannot_do_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(write(tmp_path / "x.gguf", "Q8_0"))
    for command in ("record", "check"):
        line = told(capsys, command, "transformers:", *RECORDED[command], "--model", path)
        assert path in line and "a checkpoint directory, not " in line and line.endswith("(transformers:DIR)")
    assert "TokenizerError" in (line := told(capsys, "generate", "--model", path, "--prompt", "a"))
    assert line.endswith(
        "no tables of a tokenizer in it and no tokenizer.json beside it; name a directory that has one"
    )
    missing = str(tmp_path / "y.gguf")
    assert told(capsys, "info", "--model", missing) == (
        f"lfm2np: CheckpointError: {missing}: not a directory, expected one with config.json and model.safetensors, "
        "or a GGUF file"
    )
