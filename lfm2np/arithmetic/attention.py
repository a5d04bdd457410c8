"""What the arithmetics' attention over a cache shares: positions in parts, products by group, the causal mask.

The keys and values of one request come in parts that follow each other, since its blocks need not be neighbours.
Products are per request, those of single tokens on several threads; what happens to each score by itself or within its
row is done for several requests at once, whose scores stand below each other, filled up with minus infinity.
Letters: t queries, the last of C positions; G key/value heads, H query heads, E head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.pieces import SCORES, over_pieces, pieces, row_size

Array = NDArray[Any]
Parts = Sequence[tuple[Array, ...]]  # of the cache entries of C positions, each [c, ...]
SMALL_PRODUCT = 2**18  # numbers of a group's keys, 4,096 positions of 64; OpenBLAS's own threads are as fast beyond


@dataclass(frozen=True, eq=False)
class Span:
    """Queries of one request that are computed together, and all that the last of them sees."""

    rows: slice  # of the step's queries
    parts: Parts
    context: int  # positions in parts

    @property
    def tokens(self) -> int:
        return int(self.rows.stop - self.rows.start)


def attend_in_batches(
    queries: Array,
    rows: Sequence[slice],
    cached: Sequence[Parts],
    compute: Callable[[Array, list[Span]], list[Array]],
    window: int | None = None,
) -> Array:
    """Attention of several requests, each with its rows of queries [T, H, E] and its cached positions: [T, H, E].

    Rows that belong to no request stay 0. `compute` takes queries by group [G, H/G, T, E] and spans whose scores fit in
    a piece together, and returns [t, H, E] for each. With a window a span holds only what one of its queries sees.
    """
    mixed = np.zeros_like(queries)
    if rows:
        tokens, heads, head_dim = queries.shape
        groups = cached[0][0][0].shape[1]
        grouped = queries.reshape(tokens, groups, heads // groups, head_dim).transpose(1, 2, 0, 3)
        most = SCORES // queries.itemsize
        for batch in batches(spans(rows, cached, heads, most, window), heads, most):
            for span, result in zip(batch, compute(grouped, batch), strict=True):
                mixed[span.rows] = result
    return mixed


def spans(rows: Sequence[slice], cached: Sequence[Parts], heads: int, most: int, window: int | None) -> Iterator[Span]:
    """Each request's queries in pieces of at most so many scores.

    One sees the positions up to its last query's, from the first on that its first query sees.
    """
    for request_rows, parts in zip(rows, cached, strict=True):
        tokens, context = request_rows.stop - request_rows.start, sum(len(part[0]) for part in parts)
        for piece in pieces(tokens, heads * context, most):
            stop = context - tokens + piece.stop
            start = 0 if window is None else max(0, context - tokens + piece.start - window + 1)
            queries = slice(request_rows.start + piece.start, request_rows.start + piece.stop)
            seen = parts if (start, stop) == (0, context) else positions_between(parts, start, stop)
            yield Span(queries, seen, stop - start)


def batches(spans: Iterator[Span], heads: int, most: int) -> Iterator[list[Span]]:
    """Neighbours together as long as the rectangle of their scores stays within so many."""
    batch: list[Span] = []
    tokens = widest = 0
    for span in spans:
        tokens, widest = tokens + span.tokens, max(widest, span.context)
        if batch and heads * tokens * widest > most:
            yield batch
            batch, tokens, widest = [], span.tokens, span.context
        batch.append(span)
    if batch:
        yield batch


def stacked_scores(queries: Array, spans: Sequence[Span], window: int | None = None) -> Array:
    """Queries [G, H/G, T, E] times the keys (the first array of each part): [rows, widest C], -inf where hidden."""
    heads = queries.shape[0] * queries.shape[1]
    widest = max(span.context for span in spans)
    stacked = np.empty((heads * sum(span.tokens for span in spans), widest), queries.dtype)

    def compute(span: Span, buffer: Array) -> None:
        scores = buffer[..., : span.context]
        join_scores(queries[:, :, span.rows], [part[0] for part in span.parts], scores)
        if span.tokens > 1:
            hide_later_positions(scores)
            hide_earlier_positions(scores, window)
        buffer[..., span.context :] = -np.inf

    over_spans(compute, spans, own_rows(stacked, spans, queries))
    return stacked


def over_spans(function: Callable[..., object], spans: Sequence[Span], *views: Iterator[Array]) -> None:
    """function(span, its view of each of `views`) once for every span; those whose products are small on THREADS.

    BLAS leaves those to one core, or gains little by dividing them; larger ones it divides well itself.
    """
    small: list[tuple[Any, ...]] = []
    large: list[tuple[Any, ...]] = []
    for call in zip(spans, *views, strict=True):
        (small if has_small_products(call[0]) else large).append(call)

    def compute(numbers: slice) -> None:
        for call in small[numbers]:
            function(*call)

    over_pieces(
        compute, len(small), min((row_size(piece.parts[0][0]) * piece.context for piece, *_ in small), default=0)
    )
    for call in large:
        function(*call)


def has_small_products(span: Span) -> bool:
    """Whether threads of our own gain more than BLAS's: for a single token over no very long context."""
    return span.tokens == 1 and span.context * span.parts[0][0].shape[-1] <= SMALL_PRODUCT


def own_rows(stacked: Array, spans: Sequence[Span], queries: Array) -> Iterator[Array]:
    """A view [G, H/G, t, ...] of each span's rows."""
    groups, shared = queries.shape[:2]
    first = 0
    for span in spans:
        count = groups * shared * span.tokens
        yield stacked[first : first + count].reshape(groups, shared, span.tokens, stacked.shape[-1])
        first += count


def positions_between(parts: Parts, start: int, stop: int) -> list[tuple[Array, ...]]:
    """Positions from `start` to before `stop` of parts that follow each other."""
    kept, first = [], 0
    for part in parts:
        last = first + len(part[0])
        if start < last and first < stop:
            kept.append(tuple(array[max(0, start - first) : stop - first] for array in part))
        first = last
    return kept


def join_scores(queries: Array, keys: Sequence[Array], scores: Array) -> None:
    """Queries [G, H/G, t, E] times the keys [c, G, E] of all parts, into scores [G, H/G, t, C]."""
    groups, shared, tokens, head_dim = queries.shape
    rows, first = queries.reshape(groups, shared * tokens, head_dim), 0
    for part in keys:
        products = rows @ part.transpose(1, 2, 0)
        scores[..., first : first + len(part)] = products.reshape(groups, shared, tokens, -1)
        first += len(part)


def hide_later_positions(scores: Array) -> None:
    """Scores [..., t, C] of the last t positions: those behind a query become minus infinity."""
    tokens, context = scores.shape[-2:]
    later = np.arange(tokens) > np.arange(tokens)[:, None]
    np.copyto(scores[..., context - tokens :], -np.inf, where=later)


def hide_earlier_positions(scores: Array, window: int | None) -> None:
    """Scores [..., t, C] of the last t positions: those outside a query's window become minus infinity."""
    tokens, context = scores.shape[-2:]
    if window is not None:
        positions = np.arange(context - tokens, context)[:, None]
        np.copyto(scores, -np.inf, where=np.arange(context) <= positions - window)


def weighted_values(weights: Array, values: Sequence[Array]) -> Array:
    """Weights [G, H/G, t, C] times the values [c, G, E] of all parts: [G, H/G, t, E]."""
    groups, shared, tokens, context = weights.shape
    rows = weights.reshape(groups, shared * tokens, context)
    total, first = None, 0
    for part in values:
        mixed = rows[..., first : first + len(part)] @ part.transpose(1, 0, 2)
        total = mixed if total is None else total + mixed
        first += len(part)
    assert total is not None
    return total.reshape(groups, shared, tokens, -1)
