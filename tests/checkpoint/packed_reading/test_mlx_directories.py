"""Whole models in directories as mlx-lm writes them: every format, dense and sparse, streamed, tied or not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from builders import Stored
from mlx_files import config_of, quantised_tensors, raw_of, theirs, told, write
from test_lfm3_packed import in_files

import lfm2np
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.commands.cli import main
from lfm2np.truth.layers import expected_tensors

PROMPT = [1, 7, 12, 3, 30, 21]
FIXTURES = Path(__file__).parents[3] / "fixtures"


@pytest.mark.parametrize(
    "directory",
    [*(FIXTURES / name for name in ("trained", "moe", "lfm3")), *sorted((FIXTURES / "torture").glob("lfm3_*"))],
    ids=lambda path: path.name,
)
def test_the_numbers_of_a_fixture_with_taps_as_mlx_has_them_give_its_logits(directory: Path, tmp_path: Path):
    config = load_config(directory)
    ours: dict[str, Stored] = {}
    for key, tensor in open_checkpoint(directory, config).items():
        values = tensor.array.swapaxes(1, 2) if len(tensor.shape) == 3 else tensor.array
        ours[key] = (tensor.dtype, tensor.shape, np.ascontiguousarray(values).tobytes())
    tensors = theirs(ours, config)
    raw = json.loads((directory / "config.json").read_text())
    path = write(tmp_path / "x", raw, in_files(tensors) if config.model_type == "lfm3" else tensors)
    prompt = [token % config.vocab_size for token in PROMPT]
    assert lfm2np.load(path).logits(prompt).tobytes() == lfm2np.load(directory).logits(prompt).tobytes()


def test_modules_have_their_own_formats(tmp_path: Path):
    """Routers of 8 bits among experts of 4, as mlx-lm writes them; one operator of mxfp4, one not quantised."""
    raw = raw_of(mixture=True)
    overrides = {"feed_forward.gate": ("affine", 8, 64), "0.conv.in_proj": ("mxfp4", 4, 32), "2.conv.out_proj": None}
    modules = {
        "model.layers.1.feed_forward.gate": {"group_size": 64, "bits": 8},
        "model.layers.2.feed_forward.gate": {"group_size": 64, "bits": 8, "mode": "affine"},
        "model.layers.0.conv.in_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        "model.layers.2.conv.out_proj": False,
        "model.layers.0.conv.out_proj": True,
    }
    tensors = quantised_tensors(config_of(raw), ("affine", 4, 32), others=overrides)
    path = write(tmp_path / "x", raw | told("affine", 4, 32, **modules), tensors)
    loaded = read_tensors(path, read_config(path))
    assert loaded["model.layers.1.feed_forward.gate.weight"].dtype == "affine-8bit-g64"
    assert loaded["model.layers.0.conv.in_proj.weight"].dtype == "mxfp4-g32"
    assert loaded["model.layers.2.conv.out_proj.weight"].dtype == "BF16"
    assert loaded["model.layers.2.feed_forward.experts.3.w2.weight"].dtype == "affine-4bit-g32"
    assert np.isfinite(lfm2np.load(path).logits(PROMPT)).all()


def test_a_tied_head_that_is_there_must_be_the_embedding(tmp_path: Path):
    raw = raw_of(False)
    tensors = quantised_tensors(config_of(raw), ("affine", 4, 32))
    for kind in ("weight", "scales", "biases"):
        tensors[f"lm_head.{kind}"] = tensors[f"model.embed_tokens.{kind}"]
    path = write(tmp_path / "x", raw | told("affine", 4, 32), tensors)
    assert read_tensors(path, read_config(path)).keys() == expected_tensors(read_config(path)).keys()
    (_, shape, scales), (dtype, _, biases) = tensors["lm_head.scales"], tensors["lm_head.biases"]
    for changes in (
        {"lm_head.biases": (dtype, shape, b"\x01" + biases[1:])},
        {"lm_head.scales": ("F16", shape, scales), "lm_head.biases": ("F16", shape, biases)},  # other numbers
    ):
        write(path, raw | told("affine", 4, 32), tensors | changes)
        with pytest.raises(lfm2np.CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            lfm2np.load(path)


def test_info_counts_what_three_slices_do_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One weight in 2**55 of the largest of its row, which float64 holds and 52 bits do not."""
    raw = raw_of(False)
    tensors = quantised_tensors(config_of(raw), ("affine", 8, 32), "F32")
    name, random = "model.layers.0.conv.out_proj", np.random.default_rng(5)
    codes = random.integers(1, 255, (64, 64)).astype("u1")
    codes[:, 0] = 0
    tensors[f"{name}.weight"] = ("U32", (64, 16), codes.tobytes())
    scales, biases = np.ones((64, 2), "<f4"), np.zeros((64, 2), "<f4")
    scales[3, 1], biases[3, 1] = 0.0, 2.0**-50
    for kind, values in (("scales", scales), ("biases", biases)):
        tensors[f"{name}.{kind}"] = ("F32", (64, 2), values.tobytes())
    path = write(tmp_path / "x", raw | told("affine", 8, 32), tensors)
    assert main(["info", "--json", "--model", str(path)]) == 0
    bound = json.loads(capsys.readouterr().out)["bounds"][1]
    assert bound["tensors"] == [f"{name}.weight"] and bound["slices"] == 3
    assert bound["rounded_weights"] == 32 and bound["largest_rounding"] < 2.0**-52


def test_what_config_json_does_not_announce_is_not_taken_for_quantised(tmp_path: Path):
    raw = raw_of(False)
    path = write(tmp_path / "x", raw, quantised_tensors(config_of(raw), ("affine", 4, 32)))
    with pytest.raises(lfm2np.CheckpointError, match=r"26 unexpected beside .*: model.embed_tokens.biases, "):
        lfm2np.load(path)
