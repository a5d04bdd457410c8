"""The tensors of a GGUF file under our names, each of the shape that the file's keys state.

llama.cpp calls the last norm token_embd_norm, keeps the taps of a convolution as [D, L], and holds a layer's experts
as one tensor. It turns pairs (i, i + E/2) of a head by RoPE (LLAMA_ROPE_TYPE_NEOX), as transformers does, so rows of
queries and keys stand in their order: conversion/lfm2.py permutes none. Source: src/models/lfm2.cpp, lfm2moe.cpp.
"""

from __future__ import annotations

import re
from dataclasses import replace

from lfm2np.checkpoint.gguf.container import Container
from lfm2np.checkpoint.gguf.gguf_config import in_keys
from lfm2np.checkpoint.layout import Place, experts_of, facts_of, part_of, require_names, require_shape, whole_dims
from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import Dim, layout_of

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
LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
EXPERT = re.compile(r"(feed_forward\.experts)\.([0-9]+)\.(.+)")


def place_of(name: str) -> Place:
    if name in TOP:
        return Place(TOP[name])
    layer = LAYER.fullmatch(name)
    assert layer is not None, name
    expert = EXPERT.fullmatch(layer[2])
    if expert is None:
        return Place(f"blk.{layer[1]}.{IN_A_LAYER[layer[2]]}")
    return Place(f"blk.{layer[1]}.{IN_A_LAYER[f'{expert[1]}.{expert[3]}']}", int(expert[2]))


def named_tensors(container: Container, config: ModelConfig) -> dict[str, StoredTensor]:
    """Our name -> tensor, all of them. CheckpointError for one that is missing, unexpected or of another shape."""
    prefix = container.keys["general.architecture"].value

    def by_key(dim: Dim) -> Dim:
        return dim[0], in_keys(dim[1], prefix)

    def facts(name: str) -> str:
        return in_keys(facts_of(name, config), prefix)

    layout = {name: tuple(map(by_key, dims)) for name, dims in layout_of(config).items()}
    places, experts = {name: _place_in(container, name, config) for name in layout}, by_key(experts_of(config))
    in_file = {place.name: whole_dims(place, layout[name], experts) for name, place in places.items()}
    require_names(container.tensors, in_file, str(container.paths[0]), facts)
    tensors = {}
    for name, place in places.items():
        stored, dims = container.tensors[place.name], layout[name]
        if len(dims) != 2 and stored.is_quantised:
            raise stored.wrong(f"{stored.dtype}, expected {', '.join(DTYPES)} of what is no matrix")
        if len(dims) == 3:  # taps [D, 1, L], which llama.cpp holds as [D, L]
            require_shape(stored, (dims[0], dims[2]))
            stored = replace(stored, values=stored.array[:, None, :])
        tensors[name] = part_of(stored, place, name, dims, experts)
    return tensors


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
