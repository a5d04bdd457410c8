"""Tiny random LFM2 checkpoints of every odd shape: real directories, which any engine can load.

Weights come from PCG64's raw integers, which NumPy keeps for ever, so a shape and a seed name the same bytes anywhere.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from lfm2np.checkpoint.config_json import parse_config
from lfm2np.checkpoint.names import in_file
from lfm2np.engine.loading import Model, load
from lfm2np.truth.config import ATTENTION, CONV, SLIDING, ModelConfig
from lfm2np.truth.layers import expected_tensors


@dataclass(frozen=True)
class TinyModel:
    """One shape. With `overflows` the last token of the vocabulary makes any sequence that it stands in overflow.

    With `experts` it is an lfm2_moe, whose dense layers know no `auto_adjust` and no `multiplier`.
    """

    layers: str = "cA"  # c short convolution, A attention, S attention in a window (LFM3 only)
    taps: int = 3
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 4
    hidden_size: int = 8
    feed_forward: int = 12
    auto_adjust: bool = False
    conv_bias: bool = False
    tied: bool = True
    theta: float = 100.0
    eps: float = 1e-5
    multiplier: float = 1.0  # of the feed-forward's width, if auto_adjust
    vocab_size: int = 24
    overflows: bool = False
    positions: int = 96  # the longest context
    seed: int = 0
    experts: int = 0  # of each layer from `dense_layers` on; 0: every layer is dense
    experts_a_token: int = 2
    expert_width: int = 4
    dense_layers: int = 1
    expert_bias: bool = True
    normalised: bool = True
    scaling: float = 1.0
    fused: bool = False  # the experts' tensors, in the file
    lfm3: bool = False  # which the fields below are about
    window: int = 3
    sandwich: bool = True
    gated: bool = True
    attention_bias: bool = False
    local_theta: float = 10.0
    rotated: float = 0.5  # of a head's pairs, in full attention


@dataclass(frozen=True)
class Checkpoint:
    """A given directory, where otherwise models are drawn."""

    path: str

    @property
    def vocab_size(self) -> int:
        return loaded(self).config.vocab_size

    @property
    def positions(self) -> int:
        return loaded(self).config.max_position_embeddings


AnyModel = TinyModel | Checkpoint


EOS_TOKEN_ID = 2
LETTERS = {"c": CONV, "A": ATTENTION, "S": SLIDING}
# Of experts: the spread moves the choice of a third of all tokens; bfloat16 is too coarse for it so far from 0 (in
# GLM-5.2 it is at 7: SGLang 31213).
BIAS_SPREAD, BIAS_OFFSET = np.float32(0.25), np.float32(2.0)


def raw_config(tiny: TinyModel) -> dict[str, object]:
    return {
        **(_mixture_keys(tiny) if tiny.experts else _lfm3_keys(tiny) if tiny.lfm3 else _dense_keys(tiny)),
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.feed_forward,
        "num_hidden_layers": len(tiny.layers),
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "conv_L_cache": tiny.taps,
        "conv_bias": tiny.conv_bias,
        "layer_types": [LETTERS[letter] for letter in tiny.layers],
        "max_position_embeddings": tiny.positions,
        "norm_eps": tiny.eps,
        "rope_parameters": _ropes(tiny),
        "tie_word_embeddings": tiny.tied,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
        "dtype": "float32",
    }


def _ropes(tiny: TinyModel) -> dict[str, object]:
    if not tiny.lfm3:
        return {"rope_type": "default", "rope_theta": tiny.theta}
    full = {"rope_type": "proportional", "rope_theta": tiny.theta, "partial_rotary_factor": tiny.rotated}
    return {ATTENTION: full, SLIDING: {"rope_type": "default", "rope_theta": tiny.local_theta}}


def _lfm3_keys(tiny: TinyModel) -> dict[str, object]:
    return {
        "architectures": ["Lfm3ForCausalLM"],
        "model_type": "lfm3",
        "sliding_window": tiny.window,
        "use_sandwich_norm": tiny.sandwich,
        "use_attention_gate": tiny.gated,
        "attention_bias": tiny.attention_bias,
    }


def _dense_keys(tiny: TinyModel) -> dict[str, object]:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": tiny.auto_adjust,
        "block_multiple_of": 4,
        "block_ffn_dim_multiplier": tiny.multiplier,
    }


def _mixture_keys(tiny: TinyModel) -> dict[str, object]:
    return {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "num_experts": tiny.experts,
        "num_experts_per_tok": tiny.experts_a_token,
        "moe_intermediate_size": tiny.expert_width,
        "num_dense_layers": tiny.dense_layers,
        "use_expert_bias": tiny.expert_bias,
        "norm_topk_prob": tiny.normalised,
        "routed_scaling_factor": tiny.scaling,
    }


def config_of(tiny: TinyModel) -> ModelConfig:
    return parse_config(raw_config(tiny), "config.json")


def weights_of(tiny: TinyModel) -> dict[str, NDArray[np.float32]]:
    """All tensors by name; sizes chosen so that every mechanism moves the logits by tenths, not by rounding."""
    bits = np.random.PCG64(tiny.seed)
    tensors = {}
    for name, shape in expected_tensors(config_of(tiny)).items():
        raw = bits.random_raw(int(np.prod(shape))) >> np.uint64(40)  # 24 bits
        u = (raw.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)).reshape(shape)  # [-1, 1)
        if "norm" in name:
            values = np.float32(1.0) + np.float32(0.5) * u
        elif name.endswith((".bias", "conv.conv.weight")):
            values = u
        elif name.endswith("expert_bias"):
            values = u * BIAS_SPREAD + BIAS_OFFSET
        else:
            values = u * np.float32(2.5 / shape[-1] ** 0.5)
        if name == "model.embed_tokens.weight":
            values = values * np.float32(1.5)
        tensors[name] = np.ascontiguousarray(values)
    if tiny.overflows:
        _let_last_token_overflow(tensors)
    return tensors


def stored_tensors(tiny: TinyModel) -> dict[str, NDArray[np.float32]]:
    """As they stand in the file: one tensor each, or a layer's experts as transformers holds them.

    gate_up_proj [experts, 2 * width, hidden] has each expert's w1, then its w3; down_proj [experts, hidden, width] w2.
    """
    tensors = weights_of(tiny)
    if tiny.lfm3:
        return {in_file(name): values for name, values in tensors.items()}
    if not tiny.fused or not tiny.experts:
        return tensors
    for layer in range(tiny.dense_layers, len(tiny.layers)):
        prefix = f"model.layers.{layer}.feed_forward.experts."
        w1, w2, w3 = (
            [tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(tiny.experts)]
            for part in ("w1", "w2", "w3")
        )
        tensors[prefix + "gate_up_proj"] = np.concatenate([np.stack(w1), np.stack(w3)], axis=1)
        tensors[prefix + "down_proj"] = np.stack(w2)
    return tensors


def _let_last_token_overflow(tensors: dict[str, NDArray[np.float32]]) -> None:
    """Channel 0 says "this is the last token", and nothing else writes to it; one feed-forward unit then overflows,
    in a mixture one of every expert."""
    for name, values in tensors.items():
        if name.endswith(("out_proj.weight", "out_proj.bias", "w2.weight")):
            values[0] = 0.0
        if name == "model.embed_tokens.weight":
            values[:, 0] = 0.0
            values[-1, 0] = 100.0
        if name.startswith("model.layers.0.feed_forward.") and name.endswith(("w1.weight", "w3.weight")):
            values[0] = 0.0
            values[0, 0] = 1e20


@cache
def _workspace() -> Path:
    path = Path(tempfile.mkdtemp(prefix="lfm2np-conformance-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@lru_cache(maxsize=4096)
def checkpoint(model: AnyModel) -> Path:
    """The model's directory; a drawn one is written when first asked for, and gone when the process ends."""
    return Path(model.path) if isinstance(model, Checkpoint) else _written(model)


def _written(tiny: TinyModel) -> Path:
    directory = _workspace() / f"{len(list(_workspace().iterdir())):05}"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw_config(tiny)))
    (directory / "tiny.json").write_text(json.dumps(asdict(tiny)))
    save_file(stored_tensors(tiny), directory / "model.safetensors", {"format": "pt"})
    return directory


@lru_cache(maxsize=256)
def loaded(model: AnyModel) -> Model:
    """The reference's own copy of it, in exact arithmetic."""
    return load(checkpoint(model))
