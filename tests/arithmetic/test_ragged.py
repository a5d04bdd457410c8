"""Several requests at once are each request alone, however their cache is cut into parts and the work into pieces."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threads import threads

from lfm2np.arithmetic.attention import Span, batches, over_spans
from lfm2np.engine.cache import MOST_RUNS, block_runs

GROUPS, SHARED, HEAD_DIM = 2, 3, 8


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


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50)), max_size=12), st.integers(1, 4))
def test_a_batch_of_scores_stays_within_a_piece(sizes: list[tuple[int, int]], heads: int) -> None:
    spans = [Span(slice(0, tokens), [], context) for tokens, context in sizes]
    groups = list(batches(iter(spans), heads, 300))
    assert [span for batch in groups for span in batch] == spans
    for batch in groups:
        size = heads * sum(span.tokens for span in batch) * max(span.context for span in batch)
        assert size <= 300 or len(batch) == 1


@given(st.lists(st.integers(0, 12), max_size=14, unique=True))
def test_runs_read_the_blocks_of_a_table_in_order(table: list[int]) -> None:
    pool = np.arange(13 * 3).reshape(13, 3)
    runs = block_runs(table)
    assert len(runs) <= MOST_RUNS
    read = [pool[run] for run in runs]
    assert np.array_equal(np.concatenate([pool[:0], *read]), pool[table])
    if len(table) > 1 and len(runs) == 1 and isinstance(runs[0], slice):
        assert np.shares_memory(read[0], pool), "neighbours are read where they lie"
