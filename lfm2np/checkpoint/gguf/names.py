"""The tensors of a GGUF file under our names, each of the shape that the file's keys state.

llama.cpp calls the last norm token_embd_norm, keeps the taps of a convolution as [D, L], and holds a layer's experts
as one tensor. It turns pairs (i, i + E/2) of a head by RoPE (LLAMA_ROPE_TYPE_NEOX), as transformers does, so rows of
queries and keys stand in their order: conversion/lfm2.py permutes none. Source: src/models/lfm2.cpp, lfm2moe.cpp.
"""

from __future__ import annotations

import re

from lfm2np.checkpoint.gguf.container import Container
from lfm2np.checkpoint.gguf.gguf_config import in_keys
from lfm2np.checkpoint.layout import Place, collected
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import layout_of

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_A_LAYER = {
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.gate.weight": "ffn_gate_inp.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.w1.weight": "ffn_gate_exps.weight",
    "feed_forward.experts.w3.weight": "ffn_up_exps.weight",
    "feed_forward.experts.w2.weight": "ffn_down_exps.weight",
}
LAYER = re.compile(r"model\.layers\.([0-9]+)\.(?:(feed_forward\.experts\.)([0-9]+)\.)?(.+)")


def place_of(name: str) -> Place:
    layer = LAYER.fullmatch(name)
    if layer is None:
        return Place(TOP[name])
    number, folder, expert, part = layer.groups(default="")
    axes = (0, 2) if part == "conv.conv.weight" else None
    return Place(f"blk.{number}.{IN_A_LAYER[folder + part]}", int(expert) if expert else None, axes=axes)


def named_tensors(container: Container, config: ModelConfig) -> dict[str, StoredTensor]:
    """Our name -> tensor, all of them. CheckpointError for one that is missing, unexpected or of another shape."""

    def spelled(text: str) -> str:
        return in_keys(text, container.keys["general.architecture"].value)

    plan = {}
    for name, dims in layout_of(config).items():
        by_key = tuple((size, spelled(origin)) for size, origin in dims)
        plan[name] = _place_in(container, name, config), by_key
    return collected(container.tensors, plan, config, str(container.path), spelled)


def _place_in(container: Container, name: str, config: ModelConfig) -> Place:
    """With queries, keys and values in one tensor where the file has that, as the converter's --fuse-qkv writes it."""
    place = place_of(name)
    matched = re.fullmatch(r"(blk\.[0-9]+\.attn_)([qkv])\.weight", place.name)
    if matched is None or any(f"{matched[1]}{part}.weight" in container.tensors for part in "qkv"):
        return place
    fused = f"{matched[1]}qkv.weight"
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    first = {"q": 0, "k": heads * size, "v": (heads + groups) * size}[matched[2]]
    total = ((heads + 2 * groups) * size, "rows of queries, keys and values")
    return Place(fused, None, first, total) if fused in container.tensors else place
