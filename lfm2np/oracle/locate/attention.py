"""Causal attention between queries, scores, weights and its output, and how far rounding may move each.

Errors may agree across positions, as a repeated token repeats its error: here they add as absolute values.
t queries of a step, the last of the C positions that it sees; H query heads, G key/value heads, E head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from lfm2np.arithmetic.pieces import pieces
from lfm2np.oracle.locate.patterns import Steps
from lfm2np.oracle.locate.spread import (
    EXP_UNITS,
    PIECE,
    SUM_UNIT,
    Array,
    Measured,
    Precision,
    known,
    product,
    rounded,
    together,
)

SCORES, WEIGHTS, ATTENDED = "scores", "weights", "attended"


def mixed_heads(
    given: str,
    made: str,
    precision: Precision,
    steps: Steps,
    window: int | None,
    first: Measured,
    cached: Sequence[Measured],
) -> Measured:
    """From queries [T, H, E], SCORES or WEIGHTS [T, H, T] (`given`) to what is `made`, [T, H * T] or [T, H * E].

    cached  keys, if queries are given, and values, if the output is made: [T, G, E], or as each step found them
    """
    tokens, heads, _ = first.values.shape
    width = cached[-1].values.shape[-1] if made == ATTENDED else tokens
    output = known(np.zeros((tokens, heads, width)))
    output.spread[...] = precision.least
    for rows, seen, found in views(steps, window):
        context = np.arange(seen.start, seen.stop)
        for head in range(heads):
            parts = [  # [C, E]: all positions have a row, or those that each step sees
                x[seen if len(x) == tokens else found][:, head // (heads // x.values.shape[1])] for x in cached
            ]
            for piece in pieces(rows.stop - rows.start, len(context), PIECE):
                at = slice(rows.start + piece.start, rows.start + piece.stop)
                positions = np.arange(at.start, at.stop)[:, None]
                hidden = (context > positions) | (context <= positions - (window or tokens))
                here = first[at, head, seen] if given in (SCORES, WEIGHTS) else first[at, head]
                there = (at, head) if made == ATTENDED else (at, head, seen)
                part = of_one_head(given, made, precision, here, parts, hidden)
                output.values[there], output.spread[there] = part.values, part.spread
    return output.reshape(tokens, -1)


def views(steps: Steps, window: int | None) -> Iterator[tuple[slice, slice, slice]]:
    """Of each step its rows, the positions that these see, and the rows of those in a tensor of what each step found.

    What came before the steps sees itself.
    """
    before, read = slice(0, steps.first), 0
    for rows, seen in zip([before, *steps.spans()], [before, *steps.seen(window)], strict=True):
        found = slice(read, read + seen.stop - seen.start)
        read = found.stop
        if rows.stop > rows.start:
            yield rows, seen, found


def of_one_head(
    given: str, made: str, precision: Precision, here: Measured, cached: Sequence[Measured], hidden: Array
) -> Measured:
    """here [t, E] or [t, C], cached [C, E], hidden [t, C] -> [t, C] or [t, E]."""
    if given == WEIGHTS:
        output, moves = here.values @ cached[-1].values, here.spread @ np.abs(cached[-1].values)
        return rounded(output, precision, moves, mixing_spread(here.values, cached[-1], precision))
    scores = here if given == SCORES else scaled_scores(here, cached[0], precision)
    if made == SCORES:
        scores = rounded(scores.values, precision, scores.spread)
        return Measured(np.where(hidden, 0.0, scores.values), np.where(hidden, precision.least, scores.spread))
    below = np.where(hidden, -np.inf, scores.values)
    share = np.exp(below - below.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    common = np.sqrt((share * np.square(scores.spread)).sum(-1, keepdims=True))
    if made == WEIGHTS:  # dp = p * (ds - sum(p * ds))
        inside = EXP_UNITS * SUM_UNIT * (1.0 + np.abs(scores.values)) + math.sqrt(len(share.T)) * SUM_UNIT
        return rounded(share, precision, share * (scores.spread + common), share * inside)
    # With shares p, mix a = sum(p * v): da = sum(p * ds * (v - a)) + sum(p * dv), and by Cauchy and Schwarz
    # |sum(p * ds * (v - a))| <= sqrt(sum(p * ds**2)) * sqrt(sum(p * (v - a)**2)).
    output = share @ cached[-1].values
    variance = np.maximum(share @ np.square(cached[-1].values) - np.square(output), 0.0)
    return rounded(output, precision, common * np.sqrt(variance), mixing_spread(share, cached[-1], precision))


def scaled_scores(queries: Measured, keys: Measured, precision: Precision) -> Measured:
    """Rounded as a product and as scaled, if not kept in float32; by no more is a fast exp(score) off."""
    scores, scale = product(queries, keys), 1.0 / math.sqrt(keys.values.shape[1])
    values = scale * scores.values
    return Measured(values, together(scale * scores.spread, 2.0 * precision.unit * values))


def mixing_spread(shares: Array, values: Measured, precision: Precision) -> Array:
    """Shares [t, C] times values [C, E]: what the values, their sum and the shares' own rounding move."""
    size = shares @ np.abs(values.values)
    # Where values are fixed-point, as exact's, a grid for each row of them.
    grid = SUM_UNIT * (shares @ np.abs(values.values).max(-1, keepdims=True))
    order = math.sqrt(len(values.values)) * SUM_UNIT * size
    return together(shares @ values.spread, precision.unit * size, order, grid)
