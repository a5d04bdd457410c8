"""LFM3 against transformers' own, on checkpoints of every odd shape; and the two readings of the rotation's label."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import make_goldens
import numpy as np
import pytest
import torch
from lfm3_models import MODELS

import lfm2np
from lfm2np.checkpoint.config import parse_config
from lfm2np.conformance.strategies.models import TinyModel, checkpoint
from lfm2np.model.layers import parameter_count

pytest.importorskip("transformers.models.lfm3", reason="LFM3 is in transformers since 5.23")
from transformers.models.lfm3 import modeling_lfm3

pytestmark = pytest.mark.peers

IDS = np.random.default_rng(0).integers(3, 24, 60).tolist()


def rotary_float64(
    rotary: torch.nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor, layer_type: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lfm3RotaryEmbedding.forward with float64 cosine and sine of the float32 angle."""
    angles = position_ids[..., None].float() * getattr(rotary, f"{layer_type}_inv_freq").float()
    both = torch.cat((angles, angles), dim=-1).double()
    return both.cos(), both.sin()


def softmax_float64(original, x, dim=-1, dtype=None):
    return original(x, dim=dim, dtype=torch.float64)


@contextmanager
def wholly_float64() -> Iterator[None]:
    """Norms, rotations and softmax, which transformers computes in float32 whatever the model's format."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_lfm3.Lfm3RMSNorm, "forward", make_goldens.rms_norm_float64)
        patch.setattr(modeling_lfm3.Lfm3RotaryEmbedding, "forward", rotary_float64)
        softmax = torch.nn.functional.softmax
        patch.setattr(
            torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim=dim, dtype=torch.float64)
        )
        yield


def peer(directory: Path, ids: list[int], dtype: torch.dtype) -> np.ndarray:
    model = make_goldens.load_peer(directory, dtype)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
def test_float64_is_transformers_wholly_in_float64(tiny: TinyModel) -> None:
    """And exact is about as near to it as transformers in float32 is, or nearer."""
    directory = checkpoint(tiny)
    with wholly_float64():
        truth = peer(directory, IDS, torch.float64)
    assert np.abs(lfm2np.load(directory, "float64").logits(IDS) - truth).max() < 1e-11
    single = np.abs(peer(directory, IDS, torch.float32) - truth)
    exact = np.abs(lfm2np.load(directory).logits(IDS) - truth)
    assert exact.mean() <= single.mean()


def test_parameters_are_counted_as_by_transformers() -> None:
    for tiny in MODELS.values():
        model = make_goldens.load_peer(checkpoint(tiny), torch.float32)
        raw = json.loads((checkpoint(tiny) / "config.json").read_text())
        assert parameter_count(parse_config(raw, "config.json")) == model.num_parameters()


def test_transformers_turns_all_of_a_head_that_is_labelled_default(tmp_path: Path) -> None:
    """That reading is `rope="transformers"`; what was trained is what it computes under the label "proportional"."""
    place = tmp_path / "relabelled"
    shutil.copytree(checkpoint(MODELS["wide"]), place)
    raw = json.loads((place / "config.json").read_text())
    raw["rope_parameters"]["full_attention"]["rope_type"] = "default"
    (place / "config.json").write_text(json.dumps(raw))
    with wholly_float64():
        truth = peer(place, IDS, torch.float64)
        trained = peer(checkpoint(MODELS["wide"]), IDS, torch.float64)
    assert np.abs(truth - trained).max() > 0.1
    with pytest.warns(UserWarning, match="labelled"):
        assert np.abs(lfm2np.load(place, "float64", rope="transformers").logits(IDS) - truth).max() < 1e-11
    with pytest.warns(UserWarning, match="labelled"):
        assert np.abs(lfm2np.load(place, "float64").logits(IDS) - trained).max() < 1e-11
