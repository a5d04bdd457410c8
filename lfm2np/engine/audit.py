"""What the cache has to hold, from reference.py: for `Engine(check=True)` and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np import reference
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.errors import ProofError
from lfm2np.model.weights import AttentionWeights, ShortConvWeights
from lfm2np.network.cache import Cache
from scheduler import BatchPlan, Request, Scheduler, check

Array = NDArray[Any]
Contents = tuple[list[tuple[Array, ...]], list[Array]]  # as expected_cache gives them
MOST_KNOWN = 100  # sequences whose contents are kept


class Audit:
    """What an engine published, with the token prefix behind each key; the reference says what must lie there."""

    def __init__(self, model: LoadedModel, cache: Cache, scheduler: Scheduler) -> None:
        self._model, self._cache, self._scheduler = model, cache, scheduler
        self._published: dict[bytes, tuple[int, list[int]]] = {}  # key -> block, tokens from position 0 on
        self._known: dict[tuple[int, ...], Contents] = {}

    def check_step(self, plan: BatchPlan, requests: Sequence[Request]) -> None:
        """After a step: every block is free, owned or cached exactly once, and what it published is right.

        requests  those of the plan's entries
        """
        check(self._scheduler)
        block_of, size = self._scheduler.pool.block_of, self._cache.block_size
        for entry, request in zip(plan.scheduled, requests, strict=True):
            new: dict[int, int] = {}
            for index in range(entry.start // size, min(entry.stop // size, len(request.block_keys))):
                key = request.block_keys[index]
                block = block_of.get(key)
                if block is not None and self._published.get(key, (None,))[0] != block:
                    self._published[key] = block, request.token_ids[: (index + 1) * size]
                    new[index] = block
            if new:
                check_blocks(self._cache, self._contents(request.token_ids[: (max(new) + 1) * size]), new)
        self._published = {key: entry for key, entry in self._published.items() if block_of.get(key) == entry[0]}

    def check_memory(self) -> int:
        """All that is cached, and what each running request has computed; how many blocks and requests that were."""
        for block, ids in sorted(
            self._published.values(), key=lambda entry: -len(entry[1])
        ):  # the longest tell of others
            check_blocks(self._cache, self._contents(ids), {len(ids) // self._cache.block_size - 1: block})
        running = [request for request in self._scheduler.running if not self._scheduler.awaits_moves(request)]
        for request in running:
            assert request.slot is not None
            computed = request.token_ids[: request.num_computed_tokens]
            if computed:
                check_request(self._cache, self._contents(computed), len(computed), request.block_table, request.slot)
        return len(self._published) + len(running)

    def _contents(self, token_ids: Sequence[int]) -> Contents:
        """Of the sequence, or of a known one that begins with it: exact arithmetic gives both the same bits."""
        wanted = tuple(token_ids)
        for known, contents in self._known.items():
            if known[: len(wanted)] == wanted:
                return contents
        if len(self._known) == MOST_KNOWN:
            del self._known[next(iter(self._known))]
        contents = self._known[wanted] = expected_cache(self._model, wanted)
        return contents


def expected_cache(model: LoadedModel, token_ids: Sequence[int]) -> Contents:
    """Per attention layer the cache entries [T, ...], per convolution layer u [T, D], of a sequence from 0 on."""
    numerics = model.numerics
    entries, columns = [], []
    alone = reference.one_sequence(numerics)

    def convolve(weights: ShortConvWeights, u: Array) -> Array:
        columns.append(u)
        return alone.convolve(weights, u)

    def attend(weights: AttentionWeights, queries: Array, keys: Array, values: Array) -> Array:
        entries.append(numerics.cache_entries(keys, values, weights.scale))
        return alone.attend(weights, queries, keys, values)

    ids = np.asarray(token_ids, np.int64)
    mixing = reference.Mixing(convolve, attend)
    reference.final_states(model.weights, model.config, numerics, ids, np.arange(len(ids)), mixing)
    return entries, columns


def check_blocks(cache: Cache, contents: Contents, blocks: Mapping[int, int]) -> None:
    """ProofError unless published blocks hold, bit for bit, what their prefix demands.

    blocks  index in the sequence -> block; `contents` reach at least to the end of the last
    """
    entries, columns = contents
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


def check_request(cache: Cache, contents: Contents, num_computed: int, table: Sequence[int], slot: int) -> None:
    """ProofError unless a running request's blocks and live state hold what its computed tokens demand, and no other.

    num_computed  the first tokens of `contents`: what a rejected draft left behind would show here
    """
    entries, columns = contents
    blocks = np.asarray(table, np.int64)
    for layer, (held, expected) in enumerate(zip(cache.blocks, entries, strict=True)):
        for array, truth in zip(held, expected, strict=True):
            mine = array[blocks].reshape(-1, *array.shape[2:])[:num_computed]
            if mine.tobytes() != truth[:num_computed].tobytes():
                raise ProofError(f"slot {slot}: keys or values of attention layer {layer} differ from the reference")
    count = cache.states.shape[2]
    for layer, u in enumerate(columns):
        padded = np.concatenate([np.zeros((count, u.shape[1]), u.dtype), u])
        if cache.states[slot, layer].tobytes() != padded[num_computed : num_computed + count].tobytes():
            raise ProofError(f"slot {slot}: the live state of convolution layer {layer} differs from the reference")
