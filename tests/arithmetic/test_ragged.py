"""Several requests at once are each request alone, however their cache is cut into parts and the work into pieces."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threads import threads

from lfm2np.arithmetic import exact
from lfm2np.arithmetic.attention import Span, batches, over_spans
from lfm2np.arithmetic.ieee import FLOAT32
from lfm2np.arithmetic.matrix import AttentionScale
from lfm2np.engine.cache import MOST_RUNS, block_runs

GROUPS, SHARED, HEAD_DIM = 2, 3, 8
SCALE = AttentionScale(np.zeros(HEAD_DIM, np.int32), np.zeros((GROUPS, HEAD_DIM), np.int32))


def request(rng: np.random.Generator, tokens: int, context: int) -> tuple[Any, ...]:
    keys, values = (rng.normal(size=(context, GROUPS, HEAD_DIM)).astype(np.float32) for _ in range(2))
    queries = rng.normal(size=(tokens, GROUPS * SHARED, HEAD_DIM)).astype(np.float32)
    return queries, keys, values * np.float32(2.0) ** rng.integers(-9, 9, (context, 1, 1))


def cut(rng: np.random.Generator, entries: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The entries in up to four parts, none of them empty."""
    count = len(entries[0])
    borders = sorted({0, count, *(int(integer) for integer in rng.integers(0, count + 1, 3))})
    return [tuple(array[a:b] for array in entries) for a, b in itertools.pairwise(borders)]


@pytest.mark.rounding
@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=6),
    st.sampled_from([1, 50, 2000, 2**16]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 20 * HEAD_DIM, 2**18]),
)
def test_attention_of_a_batch_has_the_bits_of_each_request_alone(
    seed: int, sizes: list[tuple[int, int]], most: int, count: int, small: int
) -> None:
    rng = np.random.default_rng(seed)
    requests = [request(rng, tokens, tokens + before) for tokens, before in sizes]
    alone = [exact.attend(*arguments, SCALE) for arguments in requests]
    queries = np.concatenate([arguments[0] for arguments in requests])
    stops = np.cumsum([0, *(tokens for tokens, _ in sizes)])
    rows = [slice(int(a), int(b)) for a, b in itertools.pairwise(stops)]
    with pytest.MonkeyPatch.context() as patch, threads(count):
        patch.setattr("lfm2np.arithmetic.attention.SCORES", most)
        patch.setattr("lfm2np.arithmetic.attention.SMALL_PRODUCT", small)
        cached = [cut(rng, exact.cache_entries(keys, values, SCALE)) for _, keys, values in requests]
        assert exact.attend_ragged(queries, rows, cached, SCALE).tobytes() == np.concatenate(alone).tobytes()
        plain = [[(keys, values)] for _, keys, values in requests]
        rounded = FLOAT32.attend_ragged(queries, rows, plain, SCALE)
    assert np.allclose(rounded, np.concatenate(alone), rtol=1e-3, atol=1e-3)


def test_requests_of_one_token_are_computed_side_by_side_and_others_where_they_were_asked_for() -> None:
    def span(tokens: int, context: int) -> Span:
        return Span(slice(0, tokens), [(np.zeros((context, GROUPS, HEAD_DIM)),)], context)

    both = threading.Barrier(2)
    calls = []

    def compute(span: Span, kind: str) -> None:
        if kind == "small":
            both.wait(timeout=30)
        calls.append((span, kind, threading.current_thread()))

    spans = [span(1, 9), span(3, 9), span(1, 10), span(1, 11)]
    kinds = ["small", "prompt", "small", "long"]
    with pytest.MonkeyPatch.context() as patch, threads(2):
        patch.setattr("lfm2np.arithmetic.attention.SMALL_PRODUCT", 10 * HEAD_DIM)
        over_spans(compute, spans, iter(kinds))
    assert {(first, kind) for first, kind, _ in calls} == set(zip(spans, kinds, strict=True)) and len(calls) == len(
        spans
    )
    assert len({thread for _, kind, thread in calls if kind == "small"}) == 2
    assert {thread for _, kind, thread in calls if kind != "small"} == {threading.current_thread()}


def test_rows_of_no_request_get_zeros() -> None:
    rng = np.random.default_rng(1)
    queries, keys, values = request(rng, 5, 5)
    parts = [exact.cache_entries(keys[:2], values[:2], SCALE)]
    mixed = exact.attend_ragged(queries, [slice(1, 3)], [parts], SCALE)
    assert not mixed[[0, 3, 4]].any()
    assert mixed[1:3].tobytes() == exact.attend(queries[1:3], keys[:2], values[:2], SCALE).tobytes()
    assert not exact.attend_ragged(queries, [], [], SCALE).any()


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50)), max_size=12), st.integers(1, 4))
def test_a_batch_of_scores_stays_within_a_piece(sizes: list[tuple[int, int]], heads: int) -> None:
    spans = [Span(slice(0, tokens), [], context) for tokens, context in sizes]
    groups = list(batches(iter(spans), heads, 300))
    assert [span for batch in groups for span in batch] == spans
    for batch in groups:
        size = heads * sum(span.tokens for span in batch) * max(span.context for span in batch)
        assert size <= 300 or len(batch) == 1


@pytest.mark.rounding
@given(st.integers(0, 2**32), st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(1, 4), st.booleans())
def test_convolution_of_a_batch_has_the_bits_of_each_request_alone(
    seed: int, lengths: list[int], taps: int, biased: bool
) -> None:
    rng = np.random.default_rng(seed)
    weights, bias = rng.normal(size=(6, taps)).astype(np.float32), rng.normal(size=6).astype(np.float32)
    windows = [rng.normal(size=(taps - 1 + length, 6)).astype(np.float32) for length in lengths]
    optional_bias = bias if biased else None
    for arithmetic in (exact, FLOAT32):
        alone = [
            arithmetic.convolve(window[: taps - 1], window[taps - 1 :], weights, optional_bias) for window in windows
        ]
        assert arithmetic.convolve_ragged(windows, weights, optional_bias).tobytes() == np.concatenate(alone).tobytes()


@given(st.lists(st.integers(0, 12), max_size=14, unique=True))
def test_runs_read_the_blocks_of_a_table_in_order(table: list[int]) -> None:
    pool = np.arange(13 * 3).reshape(13, 3)
    runs = block_runs(table)
    assert len(runs) <= MOST_RUNS
    read = [pool[run] for run in runs]
    assert np.array_equal(np.concatenate([pool[:0], *read]), pool[table])
    if len(table) > 1 and len(runs) == 1 and isinstance(runs[0], slice):
        assert np.shares_memory(read[0], pool), "neighbours are read where they lie"
