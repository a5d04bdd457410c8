"""The arrays of the paged hybrid cache, allocated once; the scheduler's plans say what stands where.

keys and values   per attention layer, N blocks of P tokens, in the form that the arithmetic wants; layers with a window
                  have a pool of their own, whose blocks are freed while a request runs (scheduler/groups.py)
live states       per convolution layer, one slot a running request: the last L-1 inputs u (constant size)
checkpoints       per convolution layer, one a block: the state after the block's last token, never changed while
                  the block is published
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.errors import NumericsError
from lfm2np.truth.config import SLIDING, ModelConfig
from lfm2np.truth.layers import state_shape
from scheduler import FREED, POLICIES, Move, ScheduledTokens, SchedulerConfig

Array = NDArray[Any]
DEFAULT_BYTES = 2**30
MOST_RUNS = 4  # of neighbouring blocks that are read without copying them together


@dataclass(frozen=True, eq=False)
class Cache:
    """Letters: N blocks, P block size, S slots. `blocks` has an entry a layer, states and checkpoints all layers."""

    block_size: int
    is_windowed: tuple[bool, ...]  # per attention layer: whether its blocks are those of the windows' pool
    blocks: tuple[tuple[Array, ...], ...]  # per attention layer: arrays [N, P, ...], see Numerics.cache_columns
    states: Array  # [S, convolution layers, L-1, D]
    checkpoints: Array  # [N, convolution layers, L-1, D]; [0, ...] without prefix caching


def make_cache(config: ModelConfig, numerics: Numerics, sizes: SchedulerConfig) -> Cache:
    """All memory that the sizes ask for."""
    columns = numerics.cache_columns(config.num_key_value_heads, config.head_dim)
    is_windowed = windowed_layers(config, sizes)

    counts = [sizes.num_window_blocks if windowed else sizes.num_blocks for windowed in is_windowed]
    state = state_shape(config)
    dtype = np.float64 if numerics.name == "float64" else np.float32
    return Cache(
        block_size=sizes.block_size,
        is_windowed=is_windowed,
        blocks=tuple(
            tuple(np.zeros((count, sizes.block_size, *shape), dtype) for shape, dtype in columns) for count in counts
        ),
        states=np.zeros((sizes.max_num_seqs, *state), dtype),
        checkpoints=np.zeros((sizes.num_blocks if sizes.prefix_caching else 0, *state), dtype),
    )


def windowed_layers(config: ModelConfig, sizes: SchedulerConfig) -> tuple[bool, ...]:
    """Of the layers with attention, those with a window, if the scheduler plans one: else all share one pool."""
    kinds = [config.layer_types[layer] for layer in config.attention_layers]
    return tuple(kind == SLIDING and sizes.sliding_window is not None for kind in kinds)


def bytes_per_block(config: ModelConfig, numerics: Numerics, sizes: SchedulerConfig, in_windows: bool = False) -> int:
    """Memory of one block: its keys and values, and its checkpoint, which blocks of windowed layers do without."""
    columns = numerics.cache_columns(config.num_key_value_heads, config.head_dim)
    token = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in columns)
    width = 8 if numerics.name == "float64" else 4
    state = int(np.prod(state_shape(config))) * width if sizes.prefix_caching and not in_windows else 0
    return int(windowed_layers(config, sizes).count(in_windows) * token * sizes.block_size + state)


def default_blocks(
    config: ModelConfig, numerics: Numerics, sizes: SchedulerConfig, room_for: Sequence[int] | None = None
) -> int:
    """Enough for max_num_seqs full contexts, within 1 GiB.

    room_for  positions of each request, if they are known: enough for all of them, within 1 GiB, and for the largest
              in any case. The arrays are zeros, which take memory when they are first written (calloc).
    """
    most = max(1, DEFAULT_BYTES // max(1, bytes_per_block(config, numerics, sizes)))
    if not room_for:
        return min(-(-config.max_position_embeddings // sizes.block_size) * sizes.max_num_seqs, most)
    each = [-(-positions // sizes.block_size) for positions in room_for]
    spare = int(sum(each) * sizes.watermark / (1.0 - sizes.watermark))  # that an admission leaves free
    return max(*each, min(sum(each) + spare, most))


def default_window_blocks(config: ModelConfig, numerics: Numerics, sizes: SchedulerConfig, num_blocks: int) -> int:
    """Enough for the windows of max_num_seqs requests and one step, or for as many tokens as `num_blocks` if less.

    A policy that reserves needs room for whole requests: then as many blocks as the other layers have.
    """
    assert sizes.sliding_window is not None
    if POLICIES[sizes.policy].reserves:
        return num_blocks
    window = -(-sizes.sliding_window // sizes.block_size) + 2  # where it begins and ends within blocks; one to copy
    step = -(-sizes.max_num_batched_tokens // sizes.block_size)
    within = max(window + step, DEFAULT_BYTES // max(1, bytes_per_block(config, numerics, sizes, in_windows=True)))
    return min(num_blocks, sizes.max_num_seqs * window + step, within)


def move(cache: Cache, moves: tuple[Move, ...]) -> None:
    """Carries out a plan's moves, one after another: a later one may write where an earlier one read."""
    for planned in moves:
        source, destination = planned.source, planned.destination
        match planned.kind:
            case "copy_block" | "copy_window_block" as kind:
                for is_windowed, layer in zip(cache.is_windowed, cache.blocks, strict=True):
                    if is_windowed == (kind == "copy_window_block"):
                        for array in layer:
                            array[destination] = array[source]
            case "zero_state":
                cache.states[destination] = 0.0
            case "restore_state":
                cache.states[destination] = cache.checkpoints[source]
            case "copy_state":
                cache.states[destination] = cache.states[source]


def block_runs(table: Sequence[int]) -> list[Any]:
    """What reads a request's blocks in order: slices where they lie side by side, else one array of their ids.

    A slice is a view, and an array of ids a copy, which pays where there would be many small slices. Freed ones are
    left out.
    """
    ids = np.array([block for block in table if block != FREED], np.int64)
    borders = [0, *np.flatnonzero(np.diff(ids) != 1) + 1, len(ids)]
    if len(borders) > MOST_RUNS + 1:
        return [ids]
    return [slice(ids[first], ids[first] + stop - first) for first, stop in pairwise(borders) if first < stop]


def read_tokens(
    cache: Cache, layer: int, runs: Sequence[Any], start: int, entries: tuple[Array, ...]
) -> list[tuple[Array, ...]]:
    """Positions up to start + t - 1 in order, in parts: those in the blocks of `runs`, then the new entries [t, ...].

    start  positions that stand in blocks: all before the new ones, or without those in freed blocks
    """
    parts, left = [], start
    for run in runs:
        if left > 0:
            parts.append(tuple(array[run].reshape(-1, *array.shape[2:])[:left] for array in cache.blocks[layer]))
            left -= len(parts[-1][0])
    return [*parts, entries]


@dataclass(eq=False)
class Segment:
    """One request's rows of the flat batch, and what its tokens leave behind, of which the first `count` stay."""

    entry: ScheduledTokens
    rows: slice
    runs: list[Any]  # of its blocks: see block_runs
    window_runs: list[Any]  # of those of windowed layers
    cache_entries: list[tuple[Array, ...]] = field(default_factory=list)  # per attention layer [t, ...]: keys, values
    conv_inputs: list[Array] = field(default_factory=list)  # per convolution layer [L-1+t, D]: the state, then u
    error: NumericsError | None = None
    count: int = 0


def commit(cache: Cache, kept: Sequence[Segment]) -> None:
    """The only write of what a step computed: for each array one assignment for all requests, but for checkpoints.

    Rolling rejected drafts back is not to commit them: no block, live state or checkpoint ever holds one (in vLLM
    44296, 52942 and transformers 46937 they stayed in the state). And a step that fails changes no request.
    """
    if not kept:
        return
    places = {is_windowed: written_places(cache, kept, is_windowed) for is_windowed in dict.fromkeys(cache.is_windowed)}
    for index, (is_windowed, layer) in enumerate(zip(cache.is_windowed, cache.blocks, strict=True)):
        blocks, offsets = places[is_windowed]
        for number, array in enumerate(layer):
            entries = [segment.cache_entries[index][number][: segment.count] for segment in kept]
            array[blocks, offsets] = np.concatenate(entries)
    slots = [segment.entry.slot for segment in kept]
    columns = cache.states.shape[2]  # L-1
    for index in range(cache.states.shape[1]):
        states = np.stack([segment.conv_inputs[index][segment.count : segment.count + columns] for segment in kept])
        cache.states[slots, index] = states
    for segment in kept:
        keep_checkpoints(cache, segment.entry, segment.conv_inputs, segment.count)


def written_places(
    cache: Cache, kept: Sequence[Segment], is_windowed: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Block and offset of each token that stays, in one of the pools."""
    tables = [segment.entry.window_table if is_windowed else segment.entry.block_table for segment in kept]
    pairs = zip(kept, tables, strict=True)
    places = [token_places(cache, table, segment.entry.start, segment.count) for segment, table in pairs]
    blocks, offsets = (np.concatenate(arrays) for arrays in zip(*places, strict=True))
    return blocks, offsets


def token_places(
    cache: Cache, table: Sequence[int], start: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Block and offset of each of `count` tokens from position `start` on."""
    positions = np.arange(start, start + count)
    return np.array(table, np.int64)[positions // cache.block_size], positions % cache.block_size


def keep_checkpoints(cache: Cache, entry: ScheduledTokens, inputs: list[Array], count: int) -> None:
    """The state at the end of each block that the first `count` scheduled tokens filled."""
    columns = cache.states.shape[2]  # L-1
    for position, block in entry.checkpoints:
        end = position - entry.start  # new inputs up to there
        if end <= count:
            for index, window in enumerate(inputs):
                cache.checkpoints[block, index] = window[end : end + columns]
