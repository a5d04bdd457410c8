"""The network of reference.py over several whole sequences in one flat array: no padding, and no cache to keep.

What step.py does for one step of the engine, for sequences that are there from their first token to their last. It
shares no line with step.py on purpose: the oracle's truth comes from here, and faults are put in there.
T tokens of S sequences, each a run of rows; only attention and the convolution look at which row is whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np import reference
from lfm2np.checkpoint.config import ModelConfig
from lfm2np.checkpoint.stored import StoredTensor, widen
from lfm2np.checkpoint.weights import AttentionWeights, LayerWeights, ModelWeights, ShortConvWeights
from lfm2np.errors import NumericsError
from lfm2np.numerics import Numerics
from lfm2np.numerics.machine import require_ieee
from lfm2np.numerics.rope import rotary_table

Array = NDArray[Any]


@dataclass(eq=False)
class Run:
    """One sequence's rows of the flat batch, and why its numbers are of no use, if they are not."""

    rows: slice
    error: NumericsError | None = None


def hidden_states(
    weights: ModelWeights, config: ModelConfig, numerics: Numerics, sequences: Sequence[Sequence[int]]
) -> tuple[Array, list[Run]]:
    """Final hidden states [T, D] of sequences from position 0 on, one after another, and the run of each.

    An overflow that attention meets is the `error` of its own run; those in the logits are for the caller to see.
    """
    require_ieee()
    runs, rotary = runs_of(sequences, config)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        x = embedded(weights.embedding, numerics, sequences)
        for layer in weights.layers:
            x = block(layer, config, numerics, x, rotary, runs)
        return numerics.rms_norm(x, weights.final_norm, config.norm_eps), runs


def runs_of(sequences: Sequence[Sequence[int]], config: ModelConfig) -> tuple[list[Run], tuple[Array, Array]]:
    """The run of each sequence, and the angles of all positions, as `rotary_table` gives them."""
    lengths = [len(one) for one in sequences]
    runs = [Run(slice(start, stop)) for start, stop in pairwise(np.cumsum([0, *lengths]).tolist())]
    positions = np.concatenate([np.arange(length) for length in lengths])  # [T]
    return runs, rotary_table(positions, config.head_dim, config.rope_theta)


def embedded(embedding: StoredTensor, numerics: Numerics, sequences: Sequence[Sequence[int]]) -> Array:
    """The rows of all tokens, [T, D]."""
    ids = np.array([token for one in sequences for token in one], np.int64)  # [T]
    return numerics.embed(widen(embedding.values[ids], embedding.dtype))


def block(
    layer: LayerWeights,
    config: ModelConfig,
    numerics: Numerics,
    x: Array,
    rotary: tuple[Array, Array],
    runs: list[Run],
) -> Array:
    """reference.block of each sequence: [T, D] -> [T, D]."""
    normed = numerics.rms_norm(x, layer.operator_norm, config.norm_eps)
    if isinstance(layer.operator, ShortConvWeights):
        mixed = short_conv(layer.operator, numerics, normed, runs)
    else:
        mixed = attention(layer.operator, config, numerics, normed, rotary, runs)
    x = numerics.add(mixed, x)
    normed = numerics.rms_norm(x, layer.ffn_norm, config.norm_eps)
    return numerics.add(x, reference.feed_forward(layer.feed_forward, config, numerics, normed))


def short_conv(weights: ShortConvWeights, numerics: Numerics, x: Array, runs: list[Run]) -> Array:
    """reference.short_conv of each sequence, zeros before its first token: [T, D] -> [T, D]."""
    u, gate_out = reference.gated_input(weights, numerics, x)
    history = np.zeros_like(u, shape=(weights.taps.shape[1] - 1, u.shape[1]))  # [L-1, D]
    windows = [np.concatenate([history, u[one.rows]]) for one in runs]
    mixed = numerics.convolve_ragged(windows, weights.taps, weights.taps_bias)
    return numerics.linear(numerics.multiply(gate_out, mixed), weights.out_proj, weights.out_bias)


def attention(
    weights: AttentionWeights,
    config: ModelConfig,
    numerics: Numerics,
    x: Array,
    rotary: tuple[Array, Array],
    runs: list[Run],
) -> Array:
    """reference.attention of each sequence over itself: [T, D] -> [T, D]."""
    queries, keys, values = reference.queries_keys_values(weights, config, numerics, x, rotary)
    mixed = np.zeros_like(queries)
    for one in runs:
        if one.error:
            continue
        try:
            mixed[one.rows] = numerics.attend(queries[one.rows], keys[one.rows], values[one.rows], weights.scale)
        except NumericsError as error:
            one.error = error
    return numerics.linear(mixed.reshape(len(x), -1), weights.out_proj)
