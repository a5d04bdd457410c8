"""`ModelConfig` from the keys of a GGUF file of the architectures `lfm2` and `lfm2moe`.

Source: conversion/lfm2.py (what the converter writes), src/models/lfm2.cpp, lfm2moe.cpp and llama-model.cpp (what
llama.cpp makes of it). A key of the architecture that is not known here, or has another type than llama.cpp takes, is
refused: it may ask for another computation. What has no key is what the architecture always does: no biases in
convolutions, weights of experts divided by their sum, with a bias for their choice. The keys make a config.json, which
is read as any other; its errors name GGUF's keys.

Numbers that are float32 in the file are taken as the shortest decimal that rounds to them: 1e-05, not
9.999999747378752e-06, so that the file and the checkpoint that it was made of are one model. An engine that reads the
float32 reads the same number.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from lfm2np.checkpoint.config_json import parse_config
from lfm2np.checkpoint.gguf.container import Container, Keys
from lfm2np.errors import ConfigError
from lfm2np.truth.config import ATTENTION, CONV, ModelConfig
from lfm2np.truth.config_values import SIZES
from lfm2np.values import same, show

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
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


def in_keys(text: str, prefix: str) -> str:
    """Words of ours, as in an error or in 3*hidden_size, by the names that the file has."""
    ours = KEYS | {"intermediate_size": KEYS["feed_forward_size"], "layer_types": KEYS["num_key_value_heads"]}
    return re.sub(r"[A-Za-z_]+", lambda word: f"{prefix}.{ours[word[0]]}" if word[0] in ours else word[0], text)


def config_of(container: Container) -> ModelConfig:
    """ConfigError names the file and the key."""
    path = container.path
    architecture = container.keys.get("general.architecture")
    if architecture is None or architecture.value not in ARCHITECTURES:
        shown = "absent" if architecture is None else show(architecture.value)
        if architecture is not None and isinstance(architecture.value, str) and architecture.value in NOT_KNOWN:
            raise ConfigError(f"{path}: architecture {shown}: {NOT_KNOWN[architecture.value]}")
        raise ConfigError(f"{path}: general.architecture: {shown}, expected {' or '.join(ARCHITECTURES)}")
    keys = Keys(container, architecture.value, ConfigError)
    _require_known(keys)
    raw = _raw(keys, "output.weight" not in container.tensors)
    try:
        config = parse_config(raw, "")
    except ConfigError as problem:
        raise ConfigError(f"{path}: {in_keys(str(problem).removeprefix(': '), keys.prefix)}") from None
    for key in HEAD_DIM_AGAIN:
        if (stored := keys.stored(key)) is not None and stored.value != config.head_dim:
            raise keys.wrong(key, f"{config.head_dim}, the size of a head")
    return config


def _raw(keys: Keys, tied: bool) -> dict[str, object]:
    """What config.json would say."""
    is_moe = keys.prefix == "lfm2moe"
    names = [name for name in KEYS if is_moe or name not in OF_EXPERTS]
    raw = {name: _number(keys, name) for name in names if name not in ("num_key_value_heads", "head_dim")}
    raw |= {"head_dim": _number(keys, "head_dim")} if keys.stored(KEYS["head_dim"]) else {}
    raw |= {"intermediate_size": raw.pop("feed_forward_size"), "model_type": "lfm2_moe" if is_moe else "lfm2"}
    if not 0 < raw["num_hidden_layers"] <= SIZES["num_hidden_layers"][1]:
        return raw  # refused by that number, of which no list is made
    heads = _layers(keys, "num_key_value_heads", raw["num_hidden_layers"])
    if is_moe:
        keys.value("expert_gating_func", "uint32")  # which llama.cpp demands
    tokens = Keys(keys.container, "tokenizer.ggml", ConfigError)
    return raw | {
        "block_auto_adjust_ff_dim": False,  # the width is the effective one
        "layer_types": [ATTENTION if count else CONV for count in heads],
        "num_key_value_heads": max(heads) or raw["num_attention_heads"],
        "tie_word_embeddings": tied,
        **{name: tokens.optional(key, "uint32") for name, key in TOKENS.items()},
    }


def _number(keys: Keys, name: str) -> Any:
    """Of one of KEYS, of the type that llama.cpp takes."""
    kind = "float32" if name in ("norm_eps", "rope_theta") else "uint32"
    value = keys.value(KEYS[name], kind)
    return float(str(np.float32(value))) if kind == "float32" else value


def _layers(keys: Keys, name: str, count: int) -> list[int]:
    """A number for each layer, of a list or of one for all."""
    most, stored = SIZES[name][1], keys.stored(KEYS[name])
    listed = stored is not None and stored.kind in ("array of uint32", "array of int32")
    values = stored.value if stored is not None and listed else [keys.value(KEYS[name], "uint32")] * count
    if len(values) != count or not all(0 <= v <= most for v in values) or len(set(values) - {0}) > 1:
        same_number = "the same in all layers with attention, 0 in the others"
        raise keys.wrong(KEYS[name], f"a uint32 up to {most}, or an array of {count}, one a layer, {same_number}")
    return list(values)


def _require_known(keys: Keys) -> None:
    of_experts = [KEYS[name] for name in OF_EXPERTS]
    for name, stored in keys.container.keys.items():
        if not name.startswith(f"{keys.prefix}."):
            continue
        key = name.removeprefix(f"{keys.prefix}.")
        if key in ONLY:
            if not any(same(stored.value, allowed) for allowed in ONLY[key]):
                raise keys.wrong(key, f"{show(ONLY[key][0])} or no such key: another is not implemented")
        elif key not in (*KEYS.values(), *HEAD_DIM_AGAIN) or (keys.prefix == "lfm2" and key in of_experts):
            raise keys.wrong(key, f"a key that {keys.prefix} is known to have")
