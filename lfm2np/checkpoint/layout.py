"""Which tensors a model has, and of which shape; and experts that are stored fused, taken apart.

Source: transformers models/lfm2 and models/lfm2_moe, parameter names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from lfm2np.checkpoint.config import ModelConfig
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import CheckpointError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FUSED = ("gate_up_proj", "down_proj")  # as transformers holds an lfm2_moe's experts: [E, 2F, D], w1 then w3; [E, D, F]

Dim = tuple[int, str]  # a dimension and the key of config.json it comes from


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor the model needs; `lm_head.weight` only where the head is not tied.

    Random checkpoints are drawn in this order.
    """
    return {name: tuple(size for size, _ in dims) for name, dims in layout_of(config).items()}


def parameter_count(config: ModelConfig) -> int:
    """Numbers in all expected tensors; a tied head counts once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def layout_of(config: ModelConfig) -> dict[str, tuple[Dim, ...]]:
    """Every tensor with the origin of each dimension. Source: transformers models/lfm2, parameter names."""
    hidden = (config.hidden_size, "hidden_size")
    layout: dict[str, tuple[Dim, ...]] = {EMBEDDING: ((config.vocab_size, "vocab_size"), hidden)}
    for index, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{index}"
        layout[f"{prefix}.operator_norm.weight"] = (hidden,)
        layout[f"{prefix}.ffn_norm.weight"] = (hidden,)
        operator = _conv_layout(config) if kind == "conv" else _attention_layout(config)
        layout |= {f"{prefix}.{name}": dims for name, dims in (_feed_forward_layout(config, index) | operator).items()}
    layout["model.embedding_norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        layout[HEAD] = layout[EMBEDDING]
    return layout


def _feed_forward_layout(config: ModelConfig, layer: int) -> dict[str, tuple[Dim, ...]]:
    """Of an lfm2_moe one tensor an expert; checkpoints that hold them fused are taken apart (experts.py)."""
    hidden, mixture = (config.hidden_size, "hidden_size"), config.mixture
    if mixture is None or not config.is_sparse(layer):
        return _gated_layout("feed_forward", hidden, (config.feed_forward_size, "feed_forward_size"))
    experts = (mixture.num_experts, "num_experts")
    layout: dict[str, tuple[Dim, ...]] = {"feed_forward.gate.weight": (experts, hidden)}
    if mixture.use_expert_bias:
        layout["feed_forward.expert_bias"] = (experts,)
    width = (mixture.moe_intermediate_size, "moe_intermediate_size")
    for expert in range(mixture.num_experts):
        layout |= _gated_layout(f"feed_forward.experts.{expert}", hidden, width)
    return layout


def _gated_layout(prefix: str, hidden: Dim, width: Dim) -> dict[str, tuple[Dim, ...]]:
    return {
        f"{prefix}.w1.weight": (width, hidden),
        f"{prefix}.w2.weight": (hidden, width),
        f"{prefix}.w3.weight": (width, hidden),
    }


def _conv_layout(config: ModelConfig) -> dict[str, tuple[Dim, ...]]:
    hidden, triple = (config.hidden_size, "hidden_size"), (3 * config.hidden_size, "3*hidden_size")
    layout: dict[str, tuple[Dim, ...]] = {
        "conv.in_proj.weight": (triple, hidden),
        "conv.conv.weight": (hidden, (1, "depthwise"), (config.conv_L_cache, "conv_L_cache")),
        "conv.out_proj.weight": (hidden, hidden),
    }
    if config.conv_bias:
        layout |= {"conv.in_proj.bias": (triple,), "conv.conv.bias": (hidden,), "conv.out_proj.bias": (hidden,)}
    return layout


def _attention_layout(config: ModelConfig) -> dict[str, tuple[Dim, ...]]:
    hidden, head_dim = (config.hidden_size, "hidden_size"), (config.head_dim, "head_dim")
    queries = (config.num_attention_heads * config.head_dim, "num_attention_heads*head_dim")
    keys = (config.num_key_value_heads * config.head_dim, "num_key_value_heads*head_dim")
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.out_proj.weight": (hidden, queries),
        "self_attn.q_layernorm.weight": (head_dim,),
        "self_attn.k_layernorm.weight": (head_dim,),
    }


def taken_apart(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors with fused experts as views, one tensor an expert.

    CheckpointError for fused ones of another shape, or beside single ones of their layer.
    """
    found = dict(tensors)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.feed_forward.experts"
        fused = [name for name in FUSED if f"{prefix}.{name}" in found]
        if not fused or not config.is_sparse(layer):
            continue  # one in a dense layer is refused as unexpected
        for name in fused:
            require_fused(found, f"{prefix}.{name}", config)
        for name in fused:
            found |= experts_of(found.pop(f"{prefix}.{name}"), prefix, name)
    return found


def require_fused(tensors: Mapping[str, StoredTensor], name: str, config: ModelConfig) -> None:
    tensor, mixture = tensors[name], config.mixture
    assert mixture is not None
    prefix, _, what = name.rpartition(".")
    single = [other for other in tensors if other.startswith(f"{prefix}.") and other.split(".")[-1] == "weight"]
    if single:
        raise CheckpointError(
            f"{tensor.source}: {name} stands beside {single[0]}, expected the experts fused or one tensor each"
        )
    width = (mixture.moe_intermediate_size, "moe_intermediate_size")
    twice, hidden = (2 * width[0], "2*moe_intermediate_size"), (config.hidden_size, "hidden_size")
    rows, columns = (twice, hidden) if what == FUSED[0] else (hidden, width)
    require_shape(tensor, ((mixture.num_experts, "num_experts"), rows, columns))


def experts_of(fused: StoredTensor, prefix: str, what: str) -> dict[str, StoredTensor]:
    """w1 and w3, or w2, of each expert."""
    found = []
    for expert, values in enumerate(fused.values):
        half = len(values) // 2
        parts = {"w1": values[:half], "w3": values[half:]} if what == FUSED[0] else {"w2": values}
        for name, part in parts.items():
            found.append(replace(fused, name=f"{prefix}.{expert}.{name}.weight", values=part))
    return {one.name: one for one in found}


def require_shape(tensor: StoredTensor, dims: tuple[Dim, ...]) -> None:
    """CheckpointError unless the tensor has these dimensions; it names those that differ and where they come from."""
    shape, expected = tensor.values.shape, tuple(size for size, _ in dims)
    if shape == expected:
        return
    differing = dims if len(shape) != len(dims) else [d for d, size in zip(dims, shape, strict=True) if d[0] != size]
    origins = ", ".join(f"{origin}={size}" for size, origin in differing)
    raise CheckpointError(f"{tensor.source}: {tensor.name}: shape {shape}, expected {expected} from {origins}")
