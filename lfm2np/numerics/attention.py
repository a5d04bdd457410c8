"""What the arithmetics' attention over a cache shares: positions in parts, products by group, the causal mask.

The keys and values of one request come in parts that follow each other, since its blocks need not be neighbours.
Letters: t queries, the last of C positions; G key/value heads, H query heads, E head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def first_positions(parts: Sequence[tuple[Array, ...]], count: int) -> list[tuple[Array, ...]]:
    """The first `count` positions of parts that follow each other."""
    kept = []
    for part in parts:
        if count > 0:
            kept.append(tuple(array[:count] for array in part))
            count -= len(part[0])
    return kept


def joined_scores(queries: Array, keys: Sequence[Array]) -> Array:
    """Queries [G, H/G, t, E] times the keys [c, G, E] of all parts: [G, H/G, t, C]."""
    groups, shared, tokens, head_dim = queries.shape
    rows = queries.reshape(groups, shared * tokens, head_dim)
    scores = [rows @ part.transpose(1, 2, 0) for part in keys]
    whole = scores[0] if len(scores) == 1 else np.concatenate(scores, axis=-1)
    return whole.reshape(groups, shared, tokens, -1)


def hide_later_positions(scores: Array) -> None:
    """Scores [..., t, C] of the last t positions: those behind a query become minus infinity."""
    tokens, context = scores.shape[-2:]
    later = np.arange(tokens) > np.arange(tokens)[:, None]
    np.copyto(scores[..., context - tokens :], -np.inf, where=later)


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
