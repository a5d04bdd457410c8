"""LFM2 for one sequence, with no cache: read it top to bottom and believe it.

Whatever else computes the network (batched, paged, chunked) has to equal this file bit for bit.
Sources: the LFM2 report (arXiv 2511.23404); transformers 5.23, models/lfm2/modeling_lfm2.py and, for the mixture of
experts, models/lfm2_moe/modeling_lfm2_moe.py, whose class stands in each docstring. Only `Operations` do arithmetic, so
this text is the same for every number format.

T tokens, V vocabulary, D hidden, H query heads, G key/value heads, E head_dim, F feed-forward, L convolution taps,
N experts, K experts of a token.
Activations are float32 between operations (float64 in the arithmetic of that name).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.errors import NumericsError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.operations import Operations
from lfm2np.truth.processor import require_ieee
from lfm2np.truth.rope import RotaryTable, rotary_table
from lfm2np.truth.weights import (
    AttentionWeights,
    FeedForwardWeights,
    LayerWeights,
    MixtureWeights,
    ModelWeights,
    ShortConvWeights,
)
from lfm2np.values import Progress

Array = NDArray[Any]
Rotary = Mapping[str, tuple[Array, Array]]  # by kind of attention: cosines and sines [T, E/2] of T positions


class Mixing(NamedTuple):
    """The two operations in which tokens meet; all others look at one token at a time, so any tokens may be a batch.

    `one_sequence` has those of one sequence. The engine has others, which know which token belongs to which request.
    """

    convolve: Callable[[ShortConvWeights, Array], Array]  # u [T, D] -> [T, D]
    attend: Callable[[AttentionWeights, Array, Array, Array], Array]  # [T, H, E], twice [T, G, E] -> [T, H, E]


def one_sequence(numerics: Operations) -> Mixing:
    """Each token sees itself and those before it, from position 0 on; zeros stand before the first."""

    def convolve(weights: ShortConvWeights, u: Array) -> Array:
        history = np.zeros_like(u, shape=(weights.taps.shape[1] - 1, u.shape[1]))  # [L-1, D]
        return numerics.convolve(history, u, weights.taps, weights.taps_bias)

    def attend(weights: AttentionWeights, queries: Array, keys: Array, values: Array) -> Array:
        return numerics.attend(queries, keys, values, weights.scale)

    return Mixing(convolve, attend)


def hidden_states(
    weights: ModelWeights,
    config: ModelConfig,
    numerics: Operations,
    token_ids: Sequence[int],
    progress: Progress | None = None,
) -> Array:
    """Final hidden states [T, D] of a sequence from position 0 on, after the last norm (Lfm2Model).

    NumericsError if attention meets a number that is not finite, or this process does not compute by IEEE 754.
    `progress(done, total)` counts layers.
    """
    require_ieee()
    ids = np.asarray(token_ids, np.int64)  # [T]
    return final_states(weights, config, numerics, ids, np.arange(len(ids)), one_sequence(numerics), progress)


def final_states(
    weights: ModelWeights,
    config: ModelConfig,
    numerics: Operations,
    ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    mixing: Mixing,
    progress: Progress | None = None,
    table: RotaryTable = rotary_table,
) -> Array:
    """The network over tokens [T] at these positions: final hidden states [T, D]."""
    rotary = rotary_of(weights.layers, config, positions, table)
    with np.errstate(all="ignore"):  # an overflow ends in `output_logits`
        x = numerics.embed(weights.embedding.rows(ids))  # [T, D]
        for index, layer in enumerate(weights.layers):
            x = block(layer, config, numerics, x, rotary, mixing)
            if progress:
                progress(index + 1, len(weights.layers))
        return numerics.rms_norm(x, weights.final_norm, config.norm_eps)


def rotary_of(
    layers: Sequence[LayerWeights],
    config: ModelConfig,
    positions: NDArray[np.int64],
    table: RotaryTable = rotary_table,
) -> Rotary:
    """For each kind of attention that the layers have."""
    kinds = {layer.operator.kind for layer in layers if isinstance(layer.operator, AttentionWeights)}
    return {kind: table(positions, config.head_dim, config.rope(kind)) for kind in kinds}


def block(
    layer: LayerWeights, config: ModelConfig, numerics: Operations, x: Array, rotary: Rotary, mixing: Mixing
) -> Array:
    """One layer, [T, D] -> [T, D]: an operator, then the feed-forward, each on a residual (Lfm2DecoderLayer).

    LFM3 has a norm behind either, too (Lfm3DecoderLayer).
    """
    normed = numerics.rms_norm(x, layer.operator_norm, config.norm_eps)
    if isinstance(layer.operator, ShortConvWeights):
        mixed = short_conv(layer.operator, numerics, normed, mixing)
    else:
        mixed = attention(layer.operator, config, numerics, normed, rotary, mixing)
    if layer.post_operator_norm is not None:
        mixed = numerics.rms_norm(mixed, layer.post_operator_norm, config.norm_eps)
    x = numerics.add(mixed, x)
    normed = numerics.rms_norm(x, layer.ffn_norm, config.norm_eps)
    fed = feed_forward(layer.feed_forward, config, numerics, normed)
    if layer.post_ffn_norm is not None:
        fed = numerics.rms_norm(fed, layer.post_ffn_norm, config.norm_eps)
    return numerics.add(x, fed)


def short_conv(weights: ShortConvWeights, numerics: Operations, x: Array, mixing: Mixing) -> Array:
    """Gated short convolution, [T, D] -> [T, D] (Lfm2ShortConv): no activation."""
    projected = numerics.linear(x, weights.in_proj, weights.in_bias)  # [T, 3D]
    gate_in, gate_out, value = np.split(projected, 3, axis=-1)  # the paper's B, C, x, each [T, D]
    mixed = mixing.convolve(weights, numerics.multiply(gate_in, value))
    return numerics.linear(numerics.multiply(gate_out, mixed), weights.out_proj, weights.out_bias)


def attention(
    weights: AttentionWeights, config: ModelConfig, numerics: Operations, x: Array, rotary: Rotary, mixing: Mixing
) -> Array:
    """Causal grouped-query attention, [T, D] -> [T, D] (Lfm2Attention): per-head norms BEFORE the rotation.

    LFM3's heads have a gate each, computed from the layer's normed input (Lfm3Attention).
    """
    queries, keys, values = queries_keys_values(weights, config, numerics, x, rotary)
    mixed = mixing.attend(weights, queries, keys, values)  # [T, H, E]
    if weights.gate_proj is not None:
        gates = numerics.sigmoid(numerics.linear(x, weights.gate_proj))  # [T, H]
        mixed = numerics.multiply(mixed, gates[..., None])
    return numerics.linear(mixed.reshape(len(x), -1), weights.out_proj, weights.out_bias)


def queries_keys_values(
    weights: AttentionWeights, config: ModelConfig, numerics: Operations, x: Array, rotary: Rotary
) -> tuple[Array, Array, Array]:
    """Queries [T, H, E], keys and values [T, G, E]; queries and keys normed, then rotated."""
    heads, groups, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    projected = numerics.linear(x, weights.qkv_proj, weights.qkv_bias).reshape(len(x), heads + 2 * groups, head_dim)
    queries, keys, values = np.split(projected, (heads, heads + groups), axis=1)  # [T, H, E], twice [T, G, E]
    table = (*rotary[weights.kind], config.rope(weights.kind).float32_table)
    queries = numerics.rotate(numerics.rms_norm(queries, weights.q_norm, config.norm_eps), *table)
    keys = numerics.rotate(numerics.rms_norm(keys, weights.k_norm, config.norm_eps), *table)
    return queries, keys, values


def feed_forward(
    weights: FeedForwardWeights | MixtureWeights, config: ModelConfig, numerics: Operations, x: Array
) -> Array:
    """Dense, or of each token's own experts, [T, D] -> [T, D]."""
    if isinstance(weights, FeedForwardWeights):
        return gated(weights, numerics, x)
    return mixture_of_experts(weights, config, numerics, x)


def gated(weights: FeedForwardWeights, numerics: Operations, x: Array) -> Array:
    """w2(silu(w1 x) * w3 x), [T, D] -> [T, D] (Lfm2MLP)."""
    gate, up = np.split(numerics.linear(x, weights.gate_up_proj), 2, axis=-1)  # each [T, F]
    return numerics.linear(numerics.swiglu(gate, up), weights.down_proj)


def mixture_of_experts(weights: MixtureWeights, config: ModelConfig, numerics: Operations, x: Array) -> Array:
    """The outputs of each token's experts, by their weights, [T, D] -> [T, D] (Lfm2MoeSparseMoeBlock).

    An expert is one product over all tokens that chose it, as its rows do not depend on each other.
    """
    chosen, gate_weights = route(weights, config, numerics, x)
    outputs = np.zeros((*chosen.shape, x.shape[1]), x.dtype)  # [T, K, D]
    for expert in np.unique(chosen):
        tokens, places = np.nonzero(chosen == expert)
        outputs[tokens, places] = gated(weights.expert(int(expert)), numerics, x[tokens])
    return numerics.combine_experts(outputs, gate_weights)


def route(weights: MixtureWeights, config: ModelConfig, numerics: Operations, x: Array) -> tuple[Array, Array]:
    """Each token's experts and their weights, each [T, K] (Lfm2MoeTopKRouter): the bias chooses, and does not weigh."""
    mixture = config.mixture
    assert mixture is not None
    scores = numerics.sigmoid(numerics.linear(x, weights.router))  # [T, N]
    preferred = scores if weights.bias is None else numerics.add_expert_bias(scores, weights.bias)
    chosen = numerics.top_k(preferred, mixture.num_experts_per_tok)
    chosen_scores = np.take_along_axis(scores, chosen, axis=-1)
    return chosen, numerics.routing_weights(chosen_scores, mixture.norm_topk_prob, mixture.routed_scaling_factor)


def output_logits(weights: ModelWeights, numerics: Operations, states: Array) -> Array:
    """Hidden states [T, D] -> logits [T, V] (Lfm2ForCausalLM). NumericsError where one is not finite."""
    with np.errstate(all="ignore"):
        result = numerics.linear(states, weights.head)
    return require_finite_logits(result, numerics)


def require_finite_logits(result: Array, numerics: Operations) -> Array:
    """The logits [T, V]; NumericsError names the first that is not finite."""
    if not np.isfinite(result).all():
        row, token = np.argwhere(~np.isfinite(result))[0]
        raise NumericsError(
            f"logit of token {token} in row {row} is {result[row, token]}: these weights overflow {numerics.name}"
        )
    return result


def logits(weights: ModelWeights, config: ModelConfig, numerics: Operations, token_ids: Sequence[int]) -> Array:
    """Logits [T, V] of a sequence; row t predicts token t + 1."""
    return output_logits(weights, numerics, hidden_states(weights, config, numerics, token_ids))
