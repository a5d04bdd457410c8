"""softmax(Q K') V of `exact` over a cache: ragged rows, every sum exact.

Read from the top: one request, several requests, and for spans of queries (attention.py) the scores, their softmax in
units, the values mixed by them. Below stand the grids: of queries and keys, of values, of weights. How the rows of
several requests stand below each other, and on which thread, is attention.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.attention import (
    Parts,
    Span,
    attend_in_batches,
    over_spans,
    own_rows,
    stacked_scores,
    weighted_values,
)
from lfm2np.arithmetic.grids import (
    SUM_BITS,
    Exponents,
    Float32,
    Float64,
    exact_sum,
    exponent_of,
    power_of_two,
    round_to_grid,
    sum_exponent,
    to_units,
)
from lfm2np.arithmetic.pieces import over_pieces, row_size
from lfm2np.arithmetic.shapes import check_attention, require_finite_rows
from lfm2np.truth import elementary
from lfm2np.truth.integers import LOW_SHARE_BITS, MOST_BITS, SHARE_BITS, VALUE_BITS, AttentionScale


def attend(queries: Float32, keys: Float32, values: Float32, scale: AttentionScale) -> Float32:
    """Causal attention: queries [T, H, E] stand at the last T of the C positions of keys and values [C, G, E]."""
    check_attention(queries, keys, values)
    return attend_ragged(queries, [slice(0, len(queries))], [[cache_entries(keys, values, scale)]], scale)


def attend_ragged(queries: Float32, rows: Sequence[slice], cached: Sequence[Parts], scale: AttentionScale) -> Float32:
    """`attend` for several requests: [T, H, E]; rows that belong to no request stay 0.

    Each request has its rows of queries [T, H, E] and the cache entries of its C positions, in consecutive parts. How a
    row is rounded depends only on the positions that it sees, so a chunk equals single steps, and a request in a batch
    equals itself alone.
    """
    on_grids = on_grid(queries, -scale.keys)
    mixed = attend_in_batches(on_grids, rows, cached, partial(attend_spans, scale=scale), scale.window)
    return mixed.astype(np.float32)


def attend_spans(queries: Float64, spans: Sequence[Span], scale: AttentionScale) -> list[Float64]:
    """Queries [G, H/G, T, E] on their grid; for each span [t, H, E].

    Three exact sums, each with its own proof: scores over E (`on_grid`), the denominator over C (`exact_sum`), weighted
    values over C (`share_units`). Hidden positions, and those that fill up a shorter row, weigh 0.
    """
    scores = stacked_scores(queries, spans, scale.window)  # [rows, C], of all spans below each other
    factors, factor_of = value_factors(spans, queries)
    shares, exponents, totals = shares_of(scores, factors, factor_of, queries.shape[-1])
    mixed = mixed_values(shares, spans, queries)  # [rows, 2, E]
    outputs = mixed[:, 0] + mixed[:, 1] * 2.0**-LOW_SHARE_BITS + 0.0  # [rows, E]
    outputs *= power_of_two(exponents + (scale.values - (SHARE_BITS + VALUE_BITS))[factor_of % len(queries)])
    outputs /= totals
    return [
        own.transpose(2, 0, 1, 3).reshape(span.tokens, -1, own.shape[-1])
        for span, own in zip(spans, own_rows(outputs, spans, queries), strict=True)
    ]


def shares_of(
    scores: Float64, factors: Float64, factor_of: NDArray[np.int64], head_dim: int
) -> tuple[Float64, Exponents, Float64]:
    """Scores [rows, C] -> weights as units [rows, 2, C] of 2**exponents [rows, 1]; and the weights' sums [rows, 1].

    A weight is exp(score / sqrt(E) - largest of its row), and in the units also times the power of two of its value:
    row `factor_of[row]` of factors [., C].
    """
    shares = np.empty((len(scores), 2, scores.shape[1]), np.float64)  # of each row its high units, then its low ones
    totals, exponents = np.empty((len(scores), 1), np.float64), np.empty((len(scores), 1), np.int32)

    def compute(rows: slice) -> None:
        weights = scores[rows]
        weights *= 1.0 / math.sqrt(head_dim)
        weights -= weights.max(-1, keepdims=True)
        weights = elementary.exp(weights)
        totals[rows] = exact_sum(weights, signed=False)[:, None]
        weights *= factors[factor_of[rows]]
        exponents[rows] = share_units(weights, shares[rows])

    over_pieces(compute, *scores.shape)
    return shares, exponents, totals


def value_factors(spans: Sequence[Span], queries: Float64) -> tuple[Float64, NDArray[np.int64]]:
    """The powers of two of the values that each group of each span sees [spans * G, C]; which of them are a row's."""
    groups, shared = queries.shape[:2]
    factors = np.full((len(spans), groups, max(span.context for span in spans)), 1.0)

    def fill(span: Span, row_factors: Float64) -> None:
        exponents = np.concatenate([part[2] for part in span.parts])  # [C, G]
        row_factors[:, : span.context] = power_of_two(exponents).T

    over_spans(fill, spans, iter(factors))
    rows = np.repeat([shared * span.tokens for span in spans], groups)
    return factors.reshape(len(rows), -1), np.repeat(np.arange(len(rows)), rows)


def mixed_values(shares: Float64, spans: Sequence[Span], queries: Float64) -> Float64:
    """Shares [rows, 2, C] times the units of the values that each span sees: [rows, 2, E]."""
    mixed = np.empty((len(shares), 2, queries.shape[-1]), np.float64)
    views = (own_rows(array.reshape(len(array), -1), spans, queries) for array in (shares, mixed))

    def mix(span: Span, own_shares: Float64, own_mixed: Float64) -> None:
        both = own_shares.reshape(*own_shares.shape[:2], 2 * span.tokens, -1)[..., : span.context]  # [G, H/G, 2t, C]
        own_mixed[...] = weighted_values(both, [part[1] for part in span.parts]).reshape(own_mixed.shape)

    over_spans(mix, spans, *views)
    return mixed


# --- what the cache holds of a token, and the grids


def cache_columns(groups: int, head_dim: int) -> list[tuple[tuple[int, ...], type]]:
    """Shape and dtype of what the cache holds of one token: keys on their grid, value units, value exponents."""
    return [((groups, head_dim), np.float64), ((groups, head_dim), np.float64), ((groups,), np.int32)]


def cache_entries(keys: Float32, values: Float32, scale: AttentionScale) -> tuple[Float64, Float64, Exponents]:
    """Keys [T, G, E] on their grid, values [T, G, E] as units, their exponents [T, G].

    Each row is rounded by itself, so it does not matter in which step a token came.
    """
    require_finite_rows(keys=keys, values=values)
    units, exponents = value_units(values, scale)
    return on_grid(keys, scale.keys), units, exponents


def on_grid(heads: Float32, shift: Exponents) -> Float64:
    """Queries or keys [T, heads, E], times 2**shift, each row on a grid of b bits: 2b + ceil(log2 E) <= 53."""
    bits = min(MOST_BITS, (SUM_BITS - (heads.shape[-1] - 1).bit_length()) // 2)
    rounded, factors = np.empty(heads.shape), power_of_two(shift)

    def compute(rows: slice) -> None:
        wide = heads[rows].astype(np.float64)
        wide *= factors
        rounded[rows] = round_to_grid(wide, bits)

    over_pieces(compute, len(heads), row_size(heads))
    return rounded


def value_units(values: Float32, scale: AttentionScale) -> tuple[Float64, Exponents]:
    """Values [T, G, E] as integers up to 2**24, each row in its own power of two; those exponents [T, G]."""
    units, exponents = np.empty(values.shape), np.empty(values.shape[:-1], np.int32)
    factors = power_of_two(-scale.values)

    def compute(rows: slice) -> None:
        scaled = values[rows].astype(np.float64)
        scaled *= factors
        exponent = exponent_of(scaled)  # [t, G, 1]
        units[rows], exponents[rows] = to_units(scaled, VALUE_BITS - exponent), exponent[..., 0]

    over_pieces(compute, len(values), row_size(values))
    return units, exponents


def share_units(weights: Float64, units: Float64) -> Exponents:
    """Weights [rows, C], which have the powers of two of their values, as integers units [rows, 2, C], high and low;
    their sum's exponents [rows, 1].

    The sum of a row's weights is below 2**top (nearly: by its grid), one high unit is 2**-28 of that, one low unit
    2**-12 of a high one. So the high units of a row sum to at most 2**28 + C, the low ones are at most 2**11 each,
    and with C <= 2**18 and value units up to 2**24 neither sum of products exceeds 2**53. Hidden positions weigh 0.
    """
    top = sum_exponent(weights)
    weights *= power_of_two(SHARE_BITS - top)
    high, low = units[:, 0], units[:, 1]
    np.rint(weights, out=high)
    weights -= high
    weights *= 2.0**LOW_SHARE_BITS
    np.rint(weights, out=low)
    return top
