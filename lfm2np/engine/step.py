"""The network of reference.py over one ragged batch: all tokens of a step in one flat array, no padding.

T tokens in this step, of S requests, each a run of rows. What one operation may look at decides how it is batched:

    one product over all tokens   projections, feed-forward, router, head
    one product per expert        the experts of a mixture, each over the tokens of the step that chose it
    row by row                    norms, rotation, gates
    per request                   attention (its own blocks), convolution (its own last L-1 inputs), sampling

Only the last class reads the plan's blocks and slots: `attend` and `convolve`. All else is reference.py. Nothing of the
step's tokens enters the cache here: their keys, values and inputs u are returned, and `commit` writes those of the
tokens that stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.arithmetic.shapes import require_context, require_finite_rows
from lfm2np.engine.cache import Cache, Segment, block_runs, commit, move, read_tokens
from lfm2np.errors import NumericsError
from lfm2np.truth import reference
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.processor import require_ieee
from lfm2np.truth.reference import Mixing, final_states
from lfm2np.truth.weights import AttentionWeights, ModelWeights, ShortConvWeights
from lfm2np.values import Progress
from scheduler import FREED, BatchPlan

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class StepResult:
    """Logits [rows, V] from `first_logits` on, by request; the requests whose numbers overflowed; what to commit."""

    logits: dict[str, Array]
    errors: dict[str, NumericsError]
    segments: list[Segment]


def forward(
    weights: ModelWeights,
    config: ModelConfig,
    numerics: Numerics,
    cache: Cache,
    plan: BatchPlan,
    progress: Progress | None = None,
) -> StepResult:
    """One step: the plan's moves, then one pass over all its tokens. An overflow harms only its own request.

    `progress(done, total)` counts layers.
    """
    require_ieee()
    move(cache, plan.moves)
    if not plan.scheduled:
        return StepResult({}, {}, [])
    segments = make_segments(plan)
    ids = np.array([token for segment in segments for token in segment.entry.token_ids], np.int64)  # [T]
    positions = np.concatenate([np.arange(segment.entry.start, segment.entry.stop) for segment in segments])  # [T]
    mixing = Mixing(partial(convolve, numerics, cache, segments), partial(attend, numerics, cache, segments))
    states = final_states(weights, config, numerics, ids, positions, mixing, progress)
    logits = wanted_logits(weights, numerics, states, segments)
    errors = {segment.entry.request_id: segment.error for segment in segments if segment.error}
    return StepResult(logits, errors, segments)


def forward_again_without_drafts(
    weights: ModelWeights, config: ModelConfig, numerics: Numerics, cache: Cache, plan: BatchPlan, result: StepResult
) -> StepResult:
    """Computes requests that failed with drafts once more without: a wrong guess may overflow where the truth does not.

    Returns the step with these in the place of those that failed.
    """
    failed = [entry for entry in plan.scheduled if entry.num_drafts and entry.request_id in result.errors]
    if not failed:
        return result
    plain = tuple(entry.without_drafts(cache.block_size) for entry in failed)
    again = forward(weights, config, numerics, cache, replace(plan, moves=(), scheduled=plain))
    computed_again = {segment.entry.request_id: segment for segment in again.segments}
    return StepResult(
        logits=result.logits | again.logits,
        errors={name: error for name, error in result.errors.items() if name not in computed_again} | again.errors,
        segments=[computed_again.get(segment.entry.request_id, segment) for segment in result.segments],
    )


def commit_step(cache: Cache, result: StepResult, num_answered: Mapping[str, int]) -> None:
    """Writes what stays of a step: by request id how many tokens came of it, 0 if it is missing there.

    Requests whose numbers overflowed leave nothing.
    """
    for segment in result.segments:
        segment.count = segment.entry.num_kept(num_answered.get(segment.entry.request_id, 0))
    commit(cache, [segment for segment in result.segments if not segment.error])


def make_segments(plan: BatchPlan) -> list[Segment]:
    segments, first = [], 0
    for entry in plan.scheduled:
        rows = slice(first, first + len(entry.token_ids))
        segments.append(Segment(entry, rows, block_runs(entry.block_table), block_runs(entry.window_table)))
        first = rows.stop
    return segments


def convolve(numerics: Numerics, cache: Cache, segments: list[Segment], weights: ShortConvWeights, u: Array) -> Array:
    """Each request after its own live state: u [T, D] -> [T, D]."""
    for segment in segments:
        history = cache.states[segment.entry.slot, weights.number]  # [L-1, D]
        segment.conv_inputs.append(np.concatenate([history, u[segment.rows]]))
    return numerics.convolve_ragged([segment.conv_inputs[-1] for segment in segments], weights.taps, weights.taps_bias)


def attend(
    numerics: Numerics,
    cache: Cache,
    segments: list[Segment],
    weights: AttentionWeights,
    queries: Array,
    keys: Array,
    values: Array,
) -> Array:
    """Each request over its own blocks: queries [T, H, E], keys and values [T, G, E] -> [T, H, E]."""
    find_overflows(numerics, segments, queries, keys, values)
    entries = numerics.cache_entries(keys, values, weights.scale)
    sound, cached = [], []
    for segment in segments:
        if not segment.error:
            segment.cache_entries.append(tuple(array[segment.rows] for array in entries))
            sound.append(segment.rows)
            cached.append(cached_tokens(cache, weights.number, segment))
    return numerics.attend_ragged(queries, sound, cached, weights.scale)


def cached_tokens(cache: Cache, layer: int, segment: Segment) -> list[tuple[Array, ...]]:
    """What a request's new rows attend to in this layer, in parts: in its blocks, then its own new entries."""
    start, new = segment.entry.start, segment.cache_entries[layer]
    if not cache.is_windowed[layer]:
        return read_tokens(cache, layer, segment.runs, start, new)
    freed = segment.entry.window_table.count(FREED) * cache.block_size
    return read_tokens(cache, layer, segment.window_runs, start - freed, new)


def find_overflows(numerics: Numerics, segments: list[Segment], queries: Array, keys: Array, values: Array) -> None:
    """Notes whose queries [T, H, E], keys or values [T, G, E] are not finite, and puts 0 in their place."""
    longest = max(segment.entry.stop for segment in segments)
    if longest <= numerics.longest_context and all(np.isfinite(array).all() for array in (queries, keys, values)):
        return
    for segment in segments:
        operands = {"keys": keys[segment.rows], "values": values[segment.rows], "queries": queries[segment.rows]}
        try:
            require_context(segment.entry.stop, numerics.longest_context)
            require_finite_rows(**operands)
        except NumericsError as error:
            segment.error = segment.error or error
            for operand in operands.values():
                operand[...] = 0.0


def wanted_logits(
    weights: ModelWeights, numerics: Numerics, states: Array, segments: list[Segment]
) -> dict[str, Array]:
    """One product over the rows that need logits; by request [rows, V]."""
    wanted = [segment for segment in segments if not segment.error and segment.entry.first_logits < segment.entry.stop]
    if not wanted:
        return {}
    skip = [segment.entry.first_logits - segment.entry.start for segment in wanted]
    chosen = np.concatenate([states[segment.rows][first:] for segment, first in zip(wanted, skip, strict=True)])
    with np.errstate(all="ignore"):
        rows = numerics.linear(chosen, weights.head)  # [wanted rows, V]
    logits, start = {}, 0
    for segment in wanted:
        stop = start + segment.entry.stop - segment.entry.first_logits
        try:
            logits[segment.entry.request_id] = reference.require_finite_logits(rows[start:stop], numerics)
        except NumericsError as error:
            segment.error = error
        start = stop
    return logits
