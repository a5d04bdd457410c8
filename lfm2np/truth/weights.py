"""The weights of one model as the network uses them, each field with the tensors that it is made of.

A Matrix of several tensors has them below each other: they share an input, so that they are one product. Tensors are
named within their layer (of an expert: within the expert), as transformers names parameters.
D hidden, H query heads, G key/value heads, E head_dim, F feed-forward, L convolution taps, N experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lfm2np.truth.config import ATTENTION, CONV, SLIDING
from lfm2np.truth.integers import AttentionScale, Weights

Float32 = NDArray[np.float32]
Matrix = Any  # whatever `prepare_matrix` of an arithmetic makes of [outputs, inputs]
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.embedding_norm.weight", "lm_head.weight"


def of(*tensors: str) -> dict[str, tuple[str, ...]]:
    """A field's metadata: the tensors that it is made of. One with a default is None in models that have none."""
    return {"tensors": tensors}


@dataclass(frozen=True, eq=False, kw_only=True)
class ShortConvWeights:
    """in_proj gives gate_in, gate_out and value side by side (the paper's B, C, x).

    number  among the model's layers of this kind: where the cache keeps its state
    """

    number: int
    in_proj: Matrix = field(metadata=of("conv.in_proj.weight"))  # [3D, D]
    taps: Float32 = field(metadata=of("conv.conv.weight"))  # [D, L], tap L-1 meets the newest token
    out_proj: Matrix = field(metadata=of("conv.out_proj.weight"))  # [D, D]
    in_bias: Float32 | None = field(default=None, metadata=of("conv.in_proj.bias"))  # [3D]
    taps_bias: Float32 | None = field(default=None, metadata=of("conv.conv.bias"))  # [D]
    out_bias: Float32 | None = field(default=None, metadata=of("conv.out_proj.bias"))  # [D]


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionWeights:
    """Queries, keys and values are one product.

    number  among the model's layers with attention: where the cache keeps its keys and values
    """

    number: int
    scale: AttentionScale
    kind: str  # full_attention or sliding_attention: see ModelConfig.rope
    qkv_proj: Matrix = field(metadata=of(*(f"self_attn.{part}_proj.weight" for part in "qkv")))  # [(H + 2G) * E, D]
    gate_proj: Matrix | None = field(default=None, metadata=of("self_attn.g_proj.weight"))  # [H, D]
    out_proj: Matrix = field(metadata=of("self_attn.out_proj.weight"))  # [D, H * E]
    qkv_bias: Float32 | None = field(
        default=None, metadata=of(*(f"self_attn.{part}_proj.bias" for part in "qkv"))
    )  # [(H + 2G) * E]
    out_bias: Float32 | None = field(default=None, metadata=of("self_attn.out_proj.bias"))  # [D]
    q_norm: Float32 = field(metadata=of("self_attn.q_layernorm.weight"))  # [E]
    k_norm: Float32 = field(metadata=of("self_attn.k_layernorm.weight"))  # [E]


@dataclass(frozen=True, eq=False)
class FeedForwardWeights:
    """A dense layer's, or one expert's."""

    gate_up_proj: Matrix = field(metadata=of("w1.weight", "w3.weight"))  # [2F, D]
    down_proj: Matrix = field(metadata=of("w2.weight"))  # [D, F]


@dataclass(frozen=True, eq=False, kw_only=True)
class MixtureWeights:
    """`expert(e)` prepares an expert's weights when they are first asked for, and keeps them."""

    expert: Callable[[int], FeedForwardWeights]
    router: Matrix = field(metadata=of("gate.weight"))  # [N, D]
    bias: Float32 | None = field(default=None, metadata=of("expert_bias"))  # [N]


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerWeights:
    operator: ShortConvWeights | AttentionWeights
    feed_forward: FeedForwardWeights | MixtureWeights
    operator_norm: Float32 = field(metadata=of("operator_norm.weight"))  # [D]
    ffn_norm: Float32 = field(metadata=of("ffn_norm.weight"))  # [D]
    post_operator_norm: Float32 | None = field(default=None, metadata=of("post_operator_norm.weight"))  # [D]
    post_ffn_norm: Float32 | None = field(default=None, metadata=of("post_ffn_norm.weight"))  # [D]


class Embedding(Protocol):
    """The embedding [V, D] as it is stored."""

    def rows(self, token_ids: Any) -> Weights:
        """Of these tokens [T] the rows [T, D], widened."""


@dataclass(frozen=True, eq=False)
class ModelWeights:
    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    final_norm: Float32  # [D], called embedding_norm in the checkpoint
    head: Matrix  # [V, D]


OPERATORS: dict[str, type[ShortConvWeights] | type[AttentionWeights]] = {
    CONV: ShortConvWeights,
    ATTENTION: AttentionWeights,
    SLIDING: AttentionWeights,
}


def tensors_of(kind: Any) -> dict[str, tuple[str, ...]]:
    """The fields of one of these classes, or of an instance, that are made of tensors, and of which."""
    return {each.name: each.metadata["tensors"] for each in fields(kind) if "tensors" in each.metadata}


def named_weights(layer: LayerWeights) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each weight that a layer has, experts' apart, with the names of its tensors within the layer."""
    for prefix, weights in (("", layer), ("", layer.operator), ("feed_forward.", layer.feed_forward)):
        for name, parts in tensors_of(weights).items():
            if (value := getattr(weights, name)) is not None:
                yield tuple(prefix + part for part in parts), value
