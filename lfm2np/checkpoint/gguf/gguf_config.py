"""`ModelConfig` from the keys of a GGUF file of the architectures `lfm2` and `lfm2moe`.

Source: conversion/lfm2.py (what the converter writes), src/models/lfm2.cpp, lfm2moe.cpp and llama-model.cpp (what
llama.cpp makes of it). A key of the architecture that is not known here, or has another type than llama.cpp takes, is
refused: it may ask for another computation. What has no key is what the architecture always does: no biases in
convolutions, weights of experts divided by their sum, with a bias for their choice.

Numbers that are float32 in the file are taken as the shortest decimal that rounds to them: 1e-05, not
9.999999747378752e-06, so that the file and the checkpoint that it was made of are one model. An engine that reads the
float32 reads the same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lfm2np.checkpoint.gguf.container import Container, Value
from lfm2np.checkpoint.strict_json import naming
from lfm2np.errors import ConfigError
from lfm2np.truth.config import ATTENTION, CONV, MixtureConfig, ModelConfig
from lfm2np.truth.config_values import REALS, SIZES
from lfm2np.values import plain, same, show

ARCHITECTURES = ("lfm2", "lfm2moe")
NOT_KNOWN = {  # architectures of networks that are implemented, of which no source at hand says how GGUF stores them
    "lfm3": "GGUF's keys for it are not known to this version; load the safetensors",
}
KEYS = {  # our names, without the architecture's prefix; layout.py names dimensions so
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "feed_forward_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
    "conv_L_cache": "shortconv.l_cache",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_dense_layers": "leading_dense_block_count",
}
OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_dense_layers")
ONLY: dict[str, tuple[object, ...]] = {
    # Keys that would change the computation, and the values under which they don't; absent is fine.
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "rope.scaling.type": ("none",),
    "expert_gating_func": (2,),  # sigmoid
    "expert_weights_norm": (True,),
    "expert_weights_scale": (1.0,),
    "expert_group_count": (0, 1),
}
HEAD_DIM_AGAIN = ("attention.value_length", "rope.dimension_count")
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_ids": "eos_token_id", "pad_token_id": "padding_token_id"}


@dataclass(frozen=True)
class _Keys:
    """The keys of one file, by their names without the architecture's prefix."""

    path: Path
    prefix: str
    found: Mapping[str, Value]

    def value(self, key: str) -> Value:
        name = f"{self.prefix}.{key}"
        if name not in self.found:
            raise ConfigError(f"{self.path}: {name}: absent, expected it in a file of the architecture {self.prefix}")
        return self.found[name]

    def wrong(self, key: str, expected: str) -> ConfigError:
        value = self.value(key)
        return ConfigError(f"{self.path}: {self.prefix}.{key}: {show(value.value)} ({value.kind}), expected {expected}")

    def size(self, name: str) -> int:
        low, high = SIZES[name]
        stored = self.value(KEYS[name])
        if stored.kind != "uint32" or not low <= stored.value <= high:
            raise self.wrong(KEYS[name], f"a uint32 from {low} to {high}")
        return int(stored.value)

    def real(self, name: str) -> float:
        low, high = REALS[name]
        stored = self.value(KEYS[name])
        if stored.kind != "float32" or not low <= stored.value <= high:
            raise self.wrong(KEYS[name], f"a float32 from {low} to {high}")
        return float(str(np.float32(stored.value)))

    def layers(self, name: str, count: int) -> list[int]:
        """A number for each layer, of a list or of one for all."""
        stored, most = self.value(KEYS[name]), SIZES[name][1]
        listed = stored.kind in ("array of uint32", "array of int32")
        values = stored.value if listed else [stored.value] * count
        fits = (listed or stored.kind == "uint32") and len(values) == count and all(0 <= v <= most for v in values)
        if not fits:
            raise self.wrong(KEYS[name], f"a uint32 up to {most}, or an array of {count}, one a layer")
        return list(values)


def config_of(container: Container) -> ModelConfig:
    """ConfigError names the file and the key."""
    path = container.paths[0]
    architecture = container.keys.get("general.architecture")
    if architecture is None or architecture.value not in ARCHITECTURES:
        shown = "absent" if architecture is None else show(architecture.value)
        if architecture is not None and isinstance(architecture.value, str) and architecture.value in NOT_KNOWN:
            raise ConfigError(f"{path}: architecture {shown}: {NOT_KNOWN[architecture.value]}")
        raise ConfigError(f"{path}: general.architecture: {shown}, expected {' or '.join(ARCHITECTURES)}")
    keys = _Keys(path, architecture.value, container.keys)
    _require_known(keys)
    with naming(path):
        return _build(keys, "output.weight" not in container.tensors)


def _build(keys: _Keys, tied: bool) -> ModelConfig:
    layers = keys.size("num_hidden_layers")
    heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    key_value_heads = keys.layers("num_key_value_heads", layers)
    used = set(key_value_heads) - {0}
    if len(used) > 1:
        raise keys.wrong(KEYS["num_key_value_heads"], "one number in all layers with attention, 0 in the others")
    return ModelConfig(
        model_type="lfm2_moe" if keys.prefix == "lfm2moe" else "lfm2",
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=used.pop() if used else heads,
        head_dim=_head_dim(keys, hidden, heads),
        feed_forward_size=keys.size("feed_forward_size"),
        conv_L_cache=keys.size("conv_L_cache"),
        conv_bias=False,
        layer_types=tuple(ATTENTION if count else CONV for count in key_value_heads),
        norm_eps=keys.real("norm_eps"),
        rope_theta=keys.real("rope_theta"),
        max_position_embeddings=keys.size("max_position_embeddings"),
        tie_word_embeddings=tied,
        bos_token_id=_token_id(keys, "bos_token_id"),
        eos_token_ids=tuple(token_id for token_id in [_token_id(keys, "eos_token_ids")] if token_id is not None),
        pad_token_id=_token_id(keys, "pad_token_id"),
        mixture=_mixture(keys) if keys.prefix == "lfm2moe" else None,
    )


def _mixture(keys: _Keys) -> MixtureConfig:
    keys.value("expert_gating_func")  # which llama.cpp demands
    return MixtureConfig(
        **{name: keys.size(name) for name in OF_EXPERTS},
        use_expert_bias=True,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )


def _head_dim(keys: _Keys, hidden: int, heads: int) -> int:
    if f"{keys.prefix}.{KEYS['head_dim']}" in keys.found:
        head_dim = keys.size("head_dim")
    elif hidden % heads:
        raise keys.wrong(KEYS["hidden_size"], f"a multiple of {keys.prefix}.{KEYS['num_attention_heads']}={heads}")
    else:
        head_dim = hidden // heads
    for key in HEAD_DIM_AGAIN:
        if f"{keys.prefix}.{key}" in keys.found and keys.value(key).value != head_dim:
            raise keys.wrong(key, f"{head_dim}, the size of a head")
    return head_dim


def _token_id(keys: _Keys, name: str) -> int | None:
    """A key of the tokenizer's; ModelConfig checks its range."""
    key = f"tokenizer.ggml.{TOKENS[name]}"
    stored = keys.found.get(key)
    if stored is not None and stored.kind != "uint32":
        raise ConfigError(f"{keys.path}: {key}: {show(stored.value)} ({stored.kind}), expected a uint32")
    return None if stored is None else int(stored.value)


def _require_known(keys: _Keys) -> None:
    of_experts: Sequence[str] = [KEYS[name] for name in OF_EXPERTS]
    for name in keys.found:
        if not name.startswith(f"{keys.prefix}."):
            continue
        key = name.removeprefix(f"{keys.prefix}.")
        if key in ONLY:
            if not any(same(keys.value(key).value, allowed) for allowed in ONLY[key]):
                raise keys.wrong(key, f"{show(ONLY[key][0])} or no such key: another is not implemented")
        elif key not in (*KEYS.values(), *HEAD_DIM_AGAIN) or (keys.prefix == "lfm2" and key in of_experts):
            raise keys.wrong(plain(key), f"a key that {keys.prefix} is known to have")
