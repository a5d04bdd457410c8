"""Every tensor of a model with its shape, and the products that tensors make up.

Source: transformers models/lfm2 and models/lfm2_moe, parameter names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lfm2np.truth.config import ATTENTION, CONV, ModelConfig
from lfm2np.truth.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    OPERATORS,
    FeedForwardWeights,
    LayerWeights,
    MixtureWeights,
    tensors_of,
)

Dim = tuple[int, str]  # a dimension and the key of config.json that it comes from
Dims = dict[str, tuple[Dim, ...]]


def operator_dims(config: ModelConfig, kind: str) -> Dims:
    """Of the tensors of one of LAYER_TYPES that this model has."""
    hidden, head_dim = (config.hidden_size, "hidden_size"), (config.head_dim, "head_dim")
    queries = (config.num_attention_heads * config.head_dim, "num_attention_heads*head_dim")
    keys = (config.num_key_value_heads * config.head_dim, "num_key_value_heads*head_dim")
    heads = (config.num_attention_heads, "num_attention_heads")
    triple, taps = (3 * config.hidden_size, "3*hidden_size"), (config.conv_L_cache, "conv_L_cache")
    dims: dict[str, Dims] = {
        CONV: {
            "conv.in_proj.weight": (triple, hidden),
            "conv.conv.weight": (hidden, (1, "depthwise"), taps),
            "conv.out_proj.weight": (hidden, hidden),
        },
        ATTENTION: {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.out_proj.weight": (hidden, queries),
            "self_attn.q_layernorm.weight": (head_dim,),
            "self_attn.k_layernorm.weight": (head_dim,),
        },
    }
    if config.conv_bias:
        dims[CONV] |= {"conv.in_proj.bias": (triple,), "conv.conv.bias": (hidden,), "conv.out_proj.bias": (hidden,)}
    if config.use_attention_gate:
        dims[ATTENTION]["self_attn.g_proj.weight"] = (heads, hidden)
    if config.attention_bias:
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "out_proj": hidden}
        dims[ATTENTION] |= {f"self_attn.{name}.bias": (size,) for name, size in sizes.items()}
    return dims[CONV if kind == CONV else ATTENTION]


def feed_forward_dims(config: ModelConfig, layer: int) -> Dims:
    """Of a mixture one tensor for each expert; checkpoints that hold them fused are taken apart by the loader."""
    hidden, mixture = (config.hidden_size, "hidden_size"), config.mixture
    if mixture is None or not config.is_sparse(layer):
        return gated_dims("feed_forward.", hidden, (config.feed_forward_size, "feed_forward_size"))
    experts = (mixture.num_experts, "num_experts")
    dims: Dims = {"feed_forward.gate.weight": (experts, hidden)}
    if mixture.use_expert_bias:
        dims["feed_forward.expert_bias"] = (experts,)
    width = (mixture.moe_intermediate_size, "moe_intermediate_size")
    for expert in range(mixture.num_experts):
        dims |= gated_dims(f"feed_forward.experts.{expert}.", hidden, width)
    return dims


def gated_dims(prefix: str, hidden: Dim, width: Dim) -> Dims:
    return {
        f"{prefix}w1.weight": (width, hidden),
        f"{prefix}w2.weight": (hidden, width),
        f"{prefix}w3.weight": (width, hidden),
    }


def layout_of(config: ModelConfig) -> Dims:
    """Every tensor, with the origin of each dimension; the head only where it is not tied to the embedding."""
    hidden = (config.hidden_size, "hidden_size")
    layout: Dims = {EMBEDDING: ((config.vocab_size, "vocab_size"), hidden)}
    norms = {name: (hidden,) for parts in tensors_of(LayerWeights).values() for name in parts}
    if not config.use_sandwich_norm:
        norms = {name: dims for name, dims in norms.items() if not name.startswith("post_")}
    for index, kind in enumerate(config.layer_types):
        dims = norms | feed_forward_dims(config, index) | operator_dims(config, kind)
        layout |= {f"model.layers.{index}.{name}": sizes for name, sizes in dims.items()}
    layout[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        layout[HEAD] = layout[EMBEDDING]
    return layout


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor. Random checkpoints are drawn in this order."""
    return {name: tuple(size for size, _ in dims) for name, dims in layout_of(config).items()}


def matrix_parts(config: ModelConfig, experts: bool = True) -> Iterator[tuple[str, ...]]:
    """The tensors that make up each Matrix, in the network's order; without `experts` those of experts are left out."""
    shapes = layout_of(config)
    for index, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{index}."
        of_feed_forward = MixtureWeights if config.is_sparse(index) else FeedForwardWeights
        parts = [*tensors_of(OPERATORS[kind]).values()]
        parts += [in_folder("feed_forward.", names) for names in tensors_of(of_feed_forward).values()]
        if experts and config.mixture and config.is_sparse(index):
            for expert in range(config.mixture.num_experts):
                parts += expert_parts(expert)
        for names in parts:
            if len(shapes.get(prefix + names[0], ())) == 2:
                yield in_folder(prefix, names)
    yield (EMBEDDING if config.tie_word_embeddings else HEAD,)


def expert_parts(expert: int) -> list[tuple[str, ...]]:
    """The tensors within their layer that make up each Matrix of an expert."""
    folder = f"feed_forward.experts.{expert}."
    return [in_folder(folder, names) for names in tensors_of(FeedForwardWeights).values()]


def in_folder(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(prefix + name for name in names)


def parameter_count(config: ModelConfig, active: bool = False) -> int:
    """Numbers in all tensors, or in those that one token uses; a tied head counts once.

    The biases of experts are not counted, as in published figures: to transformers they are no parameters but buffers.
    """
    unused = 0
    if active and (mixture := config.mixture) is not None:
        an_expert = 3 * mixture.moe_intermediate_size * config.hidden_size
        unused = len(config.sparse_layers) * (mixture.num_experts - mixture.num_experts_per_tok) * an_expert
    shapes = {name: shape for name, shape in expected_tensors(config).items() if not name.endswith(".expert_bias")}
    return sum(map(math.prod, shapes.values())) - unused


def key_value_numbers(config: ModelConfig) -> int:
    """Numbers that all layers with attention keep of one token."""
    return 2 * len(config.attention_layers) * config.num_key_value_heads * config.head_dim


def state_shape(config: ModelConfig) -> tuple[int, int, int]:
    """[convolution layers, L-1, D]: the last columns that the convolutions of one request keep."""
    return len(config.layers_of(CONV)), config.conv_L_cache - 1, config.hidden_size
