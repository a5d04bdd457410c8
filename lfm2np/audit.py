"""What the cache has to hold, from reference.py: for `Engine(check=True)` and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np import reference
from lfm2np.cache import Cache
from lfm2np.checkpoint import widen
from lfm2np.errors import ProofError
from lfm2np.loading import Model
from lfm2np.numerics.rope import rotary_table
from lfm2np.weights import ShortConvWeights

Array = NDArray[Any]


def expected_cache(model: Model, token_ids: Sequence[int]) -> tuple[list[tuple[Array, ...]], list[Array]]:
    """Per attention layer the cache entries [T, ...], per convolution layer u [T, D], of a sequence from 0 on."""
    config, numerics, weights = model.config, model.numerics, model.weights
    ids = np.asarray(token_ids, np.int64)
    rotary = rotary_table(np.arange(len(ids)), config.head_dim, config.rope_theta)
    x = numerics.embed(widen(weights.embedding.values[ids], weights.embedding.dtype))
    entries, columns = [], []
    for layer in weights.layers:
        normed = numerics.rms_norm(x, layer.operator_norm, config.norm_eps)
        if isinstance(layer.operator, ShortConvWeights):
            columns.append(reference.gated_input(layer.operator, numerics, normed)[0])
        else:
            _, keys, values = reference.queries_keys_values(layer.operator, config, numerics, normed, rotary)
            entries.append(numerics.cache_entries(keys, values, layer.operator.scale))
        x = reference.block(layer, config, numerics, x, rotary)
    return entries, columns


def check_blocks(model: Model, cache: Cache, token_ids: Sequence[int], blocks: Mapping[int, int]) -> None:
    """ProofError unless published blocks hold, bit for bit, what their prefix demands.

    blocks  index in the sequence -> block; `token_ids` reach at least to the end of the last
    """
    entries, columns = expected_cache(model, token_ids)
    for index, block in blocks.items():
        start, stop = index * cache.block_size, (index + 1) * cache.block_size
        for layer, (held, expected) in enumerate(zip(cache.blocks, entries, strict=True)):
            if any(
                array[block].tobytes() != truth[start:stop].tobytes()
                for array, truth in zip(held, expected, strict=True)
            ):
                raise ProofError(f"block {block}: keys or values of attention layer {layer} differ from the reference")
        for layer, u in enumerate(columns):
            count = cache.checkpoints.shape[2]
            padded = np.concatenate([np.zeros((count, u.shape[1]), u.dtype), u])
            if cache.checkpoints[block, layer].tobytes() != padded[stop : stop + count].tobytes():
                raise ProofError(f"block {block}: the checkpoint of convolution layer {layer} differs")


def check_request(model: Model, cache: Cache, token_ids: Sequence[int], table: Sequence[int], slot: int) -> None:
    """ProofError unless a running request's blocks and live state hold what its computed tokens demand, and no other.

    token_ids  those that are computed: what a rejected draft left behind would show here
    """
    entries, columns = expected_cache(model, token_ids)
    blocks = np.asarray(table, np.int64)
    for layer, (held, expected) in enumerate(zip(cache.blocks, entries, strict=True)):
        for array, truth in zip(held, expected, strict=True):
            mine = array[blocks].reshape(-1, *array.shape[2:])[: len(token_ids)]
            if mine.tobytes() != truth.tobytes():
                raise ProofError(f"slot {slot}: keys or values of attention layer {layer} differ from the reference")
    count = cache.states.shape[2]
    for layer, u in enumerate(columns):
        padded = np.concatenate([np.zeros((count, u.shape[1]), u.dtype), u])
        if cache.states[slot, layer].tobytes() != padded[len(token_ids) :].tobytes():
            raise ProofError(f"slot {slot}: the live state of convolution layer {layer} differs from the reference")
