"""What our engine's cache has to hold, from reference.py: it is read after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.cache import Cache
from lfm2np.engine.engine import Engine
from lfm2np.engine.sampler import Chosen
from lfm2np.engine.step import StepResult
from lfm2np.errors import ProofError
from lfm2np.truth import reference
from lfm2np.truth.weights import AttentionWeights, ShortConvWeights
from scheduler import FREED, BatchPlan, Request, ScheduledTokens, Scheduler, check

Array = NDArray[Any]
Contents = tuple[list[tuple[Array, ...]], list[Array]]  # as expected_cache gives them
MOST_KNOWN = 100  # sequences whose contents are kept


class AuditedEngine(Engine):
    """Checks after each step that every block is free, owned or cached exactly once, and that what was published holds
    what the reference computes for its prefix; `verify` reads all of the memory."""

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        super().__init__(model, **options)
        self.audit = Audit(model, self.cache, self.scheduler)

    def _compute(self, plan: BatchPlan) -> StepResult:
        self._planned = plan, [self.scheduler.requests[entry.request_id] for entry in plan.scheduled]
        return super()._compute(plan)

    def _report(self, chosen: dict[str, list[Chosen]]) -> None:
        self.audit.check_step(*self._planned)
        super()._report(chosen)

    def verify(self) -> int:
        """How many cached blocks and running requests equal the reference; ProofError for a difference.

        A cached block must hold what its prefix demands, a running request's blocks and live state what its computed
        tokens do. Call it between steps.
        """
        self._require_idle("verify()")
        return self.audit.check_memory()


class Audit:
    """What an engine published, with the token prefix behind each key; the reference says what must lie there."""

    def __init__(self, model: LoadedModel, cache: Cache, scheduler: Scheduler) -> None:
        self._model, self._cache, self._scheduler = model, cache, scheduler
        self._pools = [(group.window is not None, group.pool) for group in scheduler.memory.groups]
        # For each pool: key -> block, tokens from position 0 on.
        self._published: dict[bool, dict[bytes, tuple[int, list[int]]]] = {windowed: {} for windowed, _ in self._pools}
        self._known: dict[tuple[int, ...], Contents] = {}

    def check_step(self, plan: BatchPlan, requests: Sequence[Request]) -> None:
        """After a step: every block is free, owned or cached exactly once, and what it published is right.

        requests  those of the plan's entries
        """
        check(self._scheduler)
        for is_windowed, pool in self._pools:
            published = self._published[is_windowed]
            for entry, request in zip(plan.scheduled, requests, strict=True):
                self._check_entry(entry, request, is_windowed, pool.block_of)
            gone = [key for key, (block, _) in published.items() if pool.block_of.get(key) != block]
            for key in gone:
                del published[key]

    def _check_entry(
        self, entry: ScheduledTokens, request: Request, is_windowed: bool, block_of: Mapping[bytes, int]
    ) -> None:
        """What one request published in one pool by this step."""
        size, published = self._cache.block_size, self._published[is_windowed]
        new: dict[int, int] = {}
        for index in range(entry.start // size, min(entry.stop // size, len(request.block_keys))):
            key = request.block_keys[index]
            block = block_of.get(key)
            if block is not None and published.get(key, (None,))[0] != block:
                published[key] = block, request.token_ids[: (index + 1) * size]
                new[index] = block
        if new:
            contents = self._contents(request.token_ids[: (max(new) + 1) * size])
            check_blocks(self._cache, contents, new, is_windowed)

    def check_memory(self) -> int:
        """All that is cached, and what each running request has computed; how many blocks and requests that were."""
        size, count = self._cache.block_size, 0
        for is_windowed, published in self._published.items():
            count += len(published)
            for block, ids in sorted(
                published.values(), key=lambda entry: -len(entry[1])
            ):  # the longest tell of others
                check_blocks(self._cache, self._contents(ids), {len(ids) // size - 1: block}, is_windowed)
        running = [request for request in self._scheduler.running if not self._scheduler.awaits_moves(request)]
        for request in running:
            assert request.slot is not None
            computed = request.token_ids[: request.num_computed_tokens]
            if computed:
                check_request(self._cache, self._contents(computed), len(computed), request.tables, request.slot)
        return count + len(running)

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


def check_blocks(cache: Cache, contents: Contents, blocks: Mapping[int, int], is_windowed: bool = False) -> None:
    """ProofError unless published blocks of a pool hold, bit for bit, what their prefix demands.

    blocks       index in the sequence -> block; `contents` reach at least to the end of the last
    is_windowed  of the pool of windowed layers, whose blocks have no checkpoint
    """
    entries, columns = contents
    for index, block in blocks.items():
        start, stop = index * cache.block_size, (index + 1) * cache.block_size
        for layer, (held, expected) in enumerate(zip(cache.blocks, entries, strict=True)):
            if cache.is_windowed[layer] == is_windowed and any(
                array[block].tobytes() != truth[start:stop].tobytes()
                for array, truth in zip(held, expected, strict=True)
            ):
                raise ProofError(f"block {block}: keys or values of attention layer {layer} differ from the reference")
        for layer, u in enumerate(() if is_windowed else columns):
            held_state = cache.checkpoints[block, layer]
            if held_state.tobytes() != state_after(u, stop, len(held_state)).tobytes():
                raise ProofError(f"block {block}: the checkpoint of convolution layer {layer} differs")


def check_request(
    cache: Cache, contents: Contents, num_computed: int, tables: Sequence[Sequence[int]], slot: int
) -> None:
    """ProofError unless a running request's blocks and live state hold what its computed tokens demand, and no other.

    num_computed  the first tokens of `contents`: what a rejected draft left behind would show here
    tables        of each cache group
    """
    entries, columns = contents
    for layer, (held, expected) in enumerate(zip(cache.blocks, entries, strict=True)):
        table = tables[cache.is_windowed[layer]]
        first = table.count(FREED) * cache.block_size
        blocks = np.array([block for block in table if block != FREED], np.int64)
        for array, truth in zip(held, expected, strict=True):
            mine = array[blocks].reshape(-1, *array.shape[2:])[: num_computed - first]
            if mine.tobytes() != truth[first:num_computed].tobytes():
                raise ProofError(f"slot {slot}: keys or values of attention layer {layer} differ from the reference")
    for layer, u in enumerate(columns):
        held_state = cache.states[slot, layer]
        if held_state.tobytes() != state_after(u, num_computed, len(held_state)).tobytes():
            raise ProofError(f"slot {slot}: the live state of convolution layer {layer} differs from the reference")


def state_after(u: Array, count: int, size: int) -> Array:
    """The last `size` columns [size, D] of the first `count` of u [T, D], after zeros."""
    padded = np.concatenate([np.zeros((size, u.shape[1]), u.dtype), u])
    return padded[count : count + size]
