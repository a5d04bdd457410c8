"""The arrays of the paged hybrid cache, allocated once; the scheduler's plans say what stands where.

keys and values   per attention layer, N blocks of P tokens, in the form that the arithmetic wants
live states       per convolution layer, one slot a running request: the last L-1 columns of u (constant size)
checkpoints       per convolution layer, one a block: the state after the block's last token, never changed while
                  the block is published
host              copies of swapped-out blocks, and of the live states, which go with a request's last block
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.model.config import ModelConfig
from lfm2np.model.layers import state_shape
from lfm2np.numerics import Numerics
from scheduler import Move, ScheduledTokens, SchedulerConfig

Array = NDArray[Any]
DEFAULT_BYTES = 2**30
MOST_RUNS = 4  # of neighbouring blocks that are read without copying them together


@dataclass(frozen=True, eq=False)
class Cache:
    """Letters: N blocks, P block size, S slots, Q host blocks. One list entry a layer of that kind."""

    block_size: int
    blocks: tuple[tuple[Array, ...], ...]  # per attention layer: arrays [N, P, ...], see Numerics.cache_columns
    states: Array  # [S, convolution layers, L-1, D]
    checkpoints: Array  # [N, convolution layers, L-1, D]; [0, ...] without prefix caching
    host_blocks: tuple[tuple[Array, ...], ...]  # the same as `blocks`, [Q, P, ...]
    host_states: Array  # [Q, convolution layers, L-1, D]

    @property
    def nbytes(self) -> int:
        arrays = [self.states, self.checkpoints, self.host_states]
        arrays += [array for layer in (*self.blocks, *self.host_blocks) for array in layer]
        return sum(array.nbytes for array in arrays)


def make_cache(config: ModelConfig, numerics: Numerics, sizes: SchedulerConfig) -> Cache:
    """All memory that the sizes ask for."""
    attention = len(config.attention_layers)
    columns = numerics.cache_columns(config.num_key_value_heads, config.head_dim)

    def layers(count: int) -> tuple[tuple[Array, ...], ...]:
        shapes = [((count, sizes.block_size, *shape), dtype) for shape, dtype in columns]
        return tuple(tuple(np.zeros(shape, dtype) for shape, dtype in shapes) for _ in range(attention))

    state = state_shape(config)
    dtype = np.float64 if numerics.name == "float64" else np.float32
    return Cache(
        block_size=sizes.block_size,
        blocks=layers(sizes.num_blocks),
        states=np.zeros((sizes.max_num_seqs, *state), dtype),
        checkpoints=np.zeros((sizes.num_blocks if sizes.prefix_caching else 0, *state), dtype),
        host_blocks=layers(sizes.num_host_blocks),
        host_states=np.zeros((sizes.num_host_blocks, *state), dtype),
    )


def bytes_per_block(config: ModelConfig, numerics: Numerics, sizes: SchedulerConfig) -> int:
    """Memory of one block: its keys and values, and its checkpoint."""
    columns = numerics.cache_columns(config.num_key_value_heads, config.head_dim)
    token = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in columns)
    width = 8 if numerics.name == "float64" else 4
    state = int(np.prod(state_shape(config))) * width
    return int(len(config.attention_layers) * token * sizes.block_size + (state if sizes.prefix_caching else 0))


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


def move(cache: Cache, moves: tuple[Move, ...]) -> None:
    """Carries out a plan's moves, one after another: a later one may write where an earlier one read."""
    for planned in moves:
        source, destination = planned.source, planned.destination
        match planned.kind:
            case "copy_block":
                _copy_block(cache.blocks, source, cache.blocks, destination)
            case "save_block":
                _copy_block(cache.blocks, source, cache.host_blocks, destination)
            case "load_block":
                _copy_block(cache.host_blocks, source, cache.blocks, destination)
            case "zero_state":
                cache.states[destination] = 0.0
            case "restore_state":
                cache.states[destination] = cache.checkpoints[source]
            case "copy_state":
                cache.states[destination] = cache.states[source]
            case "save_state":
                cache.host_states[destination] = cache.states[source]
            case "load_state":
                cache.states[destination] = cache.host_states[source]


def _copy_block(
    origin: tuple[tuple[Array, ...], ...], source: int, target: tuple[tuple[Array, ...], ...], destination: int
) -> None:
    for origin_layer, target_layer in zip(origin, target, strict=True):
        for origin_array, target_array in zip(origin_layer, target_layer, strict=True):
            target_array[destination] = origin_array[source]


def block_runs(table: Sequence[int]) -> list[Any]:
    """What reads a request's blocks in order: slices where they lie side by side, else one array of their ids.

    A slice is a view, and an array of ids a copy, which pays where there would be many small slices.
    """
    ids = np.array(table, np.int64)
    borders = [0, *np.flatnonzero(np.diff(ids) != 1) + 1, len(ids)]
    if len(borders) > MOST_RUNS + 1:
        return [ids]
    return [slice(ids[first], ids[first] + stop - first) for first, stop in pairwise(borders) if first < stop]


def read_tokens(
    cache: Cache, layer: int, runs: Sequence[Any], start: int, entries: tuple[Array, ...]
) -> list[tuple[Array, ...]]:
    """Positions 0 to start + t - 1 in order, in parts: those in the blocks of `runs`, then the new entries [t, ...]."""
    parts, left = [], start
    for run in runs:
        if left > 0:
            parts.append(tuple(array[run].reshape(-1, *array.shape[2:])[:left] for array in cache.blocks[layer]))
            left -= len(parts[-1][0])
    return [*parts, entries]


@dataclass(frozen=True, eq=False)
class Kept:
    """What the first `count` of a request's scheduled tokens leave behind."""

    entry: ScheduledTokens
    entries: list[tuple[Array, ...]]  # per attention layer [t, ...], the keys and values of all t scheduled tokens
    windows: list[Array]  # per convolution layer [L-1+t, D], the state before them and their columns of u
    count: int


def commit(cache: Cache, kept: Sequence[Kept]) -> None:
    """The only write of a step, of all its requests together: for each array one assignment, but for checkpoints.

    Rolling rejected drafts back is not to commit them: no block, live state or checkpoint ever holds one (in vLLM
    44296, 52942 and transformers 46937 they stayed in the state). And a step that fails changes no request.
    """
    if not kept:
        return
    places = [token_places(cache, segment.entry, segment.count) for segment in kept]
    blocks, offsets = (np.concatenate(arrays) for arrays in zip(*places, strict=True))
    for index, layer in enumerate(cache.blocks):
        for number, array in enumerate(layer):
            entries = [segment.entries[index][number][: segment.count] for segment in kept]
            array[blocks, offsets] = np.concatenate(entries)
    slots = [segment.entry.slot for segment in kept]
    columns = cache.states.shape[2]
    for index in range(cache.states.shape[1]):
        states = np.stack([segment.windows[index][segment.count : segment.count + columns] for segment in kept])
        cache.states[slots, index] = states
    for segment in kept:
        keep_checkpoints(cache, segment.entry, segment.windows, segment.count)


def token_places(cache: Cache, entry: ScheduledTokens, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Block and offset of each of the first `count` scheduled tokens."""
    positions = np.arange(entry.start, entry.start + count)
    return np.array(entry.block_table, np.int64)[positions // cache.block_size], positions % cache.block_size


def keep_checkpoints(cache: Cache, entry: ScheduledTokens, windows: list[Array], count: int) -> None:
    """The state at the end of each block that the first `count` scheduled tokens filled."""
    columns = cache.states.shape[2]
    for position, block in entry.checkpoints:
        end = position - entry.start  # new columns up to there
        if end <= count:
            for index, window in enumerate(windows):
                cache.checkpoints[block, index] = window[end : end + columns]
