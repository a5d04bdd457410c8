"""Two predictions at each position compared: what is kept of a sequence, as work for any executor.

An item is a sequence, and the quantised checkpoints by their SHA-256, the same in all items of a comparison:

{"token_ids": [...], "start": row, "stop": row, "quantised": [sha256, ...]}

Rows start to stop - 1 are compared; the tokens before `stop` are fed, the others only looked up. R rows, M of them with
a next token, V vocabulary, D hidden.

All sums are exact_sum's, exp and log are elementary's: so the bits are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.arithmetic.grids import exact_sum
from lfm2np.arithmetic.matrix import Matrix
from lfm2np.arithmetic.pieces import pieces
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine import uncached
from lfm2np.engine.teacher_forcing import LOGITS_AT_ONCE
from lfm2np.engine.work.place import Source, Work, load_source
from lfm2np.truth import elementary

Array = NDArray[Any]
Columns = dict[str, Array]
Others = Mapping[str, LoadedModel | Source]
BFLOAT16_BITS = 8  # of a significand
TINY = 2.0**-900  # a sum of smaller terms alone has no grid in float64
MOST_LOADED = 16  # quantised checkpoints of a worker
loaded = lru_cache(maxsize=MOST_LOADED)(load_source)


def compare_work(others: Others) -> Work:
    """Quantised checkpoints by their SHA-256: loaded, or where a worker finds them."""
    return Work("compare", partial(compare_items, others), itemgetter("stop"))  # tokens that are fed


def compare_items(others: Others, model: LoadedModel, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each item `base` and `quantised`, with the arrays of `predictions`, or `error`; one ragged pass a side."""
    found = [others[sha256] for sha256 in items[0]["quantised"]]
    sides = [model, *(loaded(other) if isinstance(other, Source) else other for other in found)]
    fed = [item["token_ids"][: item["stop"]] for item in items]
    passes = [uncached.hidden_states(side.weights, side.config, model.numerics, fed) for side in sides]
    results = []
    for number, item in enumerate(items):
        rows = passes[0][1][number].rows
        rows = slice(rows.start + item["start"], rows.stop)
        following = np.array(item["token_ids"][item["start"] + 1 : item["stop"] + 1], np.int64)  # [M]
        heads = [(states[rows], side.weights.head) for side, (states, _) in zip(sides, passes, strict=True)]
        columns = predictions(model.numerics, heads, following)
        for side, named, (_, runs) in zip(sides, columns, passes, strict=True):
            wrong = np.flatnonzero(named.pop("wrong"))
            if runs[number].error or len(wrong):
                overflow = f"a logit in compared row {next(iter(wrong), 0)} is not finite: these weights overflow exact"
                named["error"] = f"{side.path}: {runs[number].error or overflow}"
        base, *quantised = ({"error": side["error"]} if "error" in side else side for side in columns)
        results.append({"base": base, "quantised": [base if "error" in base else other for other in quantised]})
    return results


def predictions(
    numerics: Numerics, sides: Sequence[tuple[Array, Matrix]], following: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Of each side, from its states [R, D] and its head, the base first, by name:

    best      [R]  the greedy token
    logprobs  [M]  of the token that follows
    wrong     [R]  where a logit is not finite
    clear     [R]  the base's: 1 where the greedy token's logit is ahead of the next by more than a step between
                   neighbours in bfloat16, of the logit that is largest in absolute value
    kl        [R]  the others': divergence from the base's distribution, over the whole vocabulary, nats
    """
    parts: list[list[Columns]] = [[] for _ in sides]
    for rows in pieces(len(sides[0][0]), sides[0][1].outputs, LOGITS_AT_ONCE):
        base: Array | None = None  # [r, V] log-probabilities
        for part, (states, head) in zip(parts, sides, strict=True):
            with np.errstate(all="ignore"):
                logits = numerics.linear(states[rows], head)  # [r, V]
            wrong = np.asarray(~np.isfinite(logits).all(axis=1))
            logits[wrong] = 0.0
            logprobs, given = numerics.log_softmax(logits), following[rows]
            own = {"clear": are_clear(logits)} if base is None else {"kl": divergence(base, logprobs)}
            base = logprobs if base is None else base
            columns = {"best": np.argmax(logits, axis=1).astype(np.int64), "wrong": wrong, **own}
            part.append({**columns, "logprobs": logprobs[np.arange(len(given)), given]})
    return [{name: np.concatenate([part[name] for part in side]) for name in side[0]} for side in parts]


def divergence(base: Array, other: Array) -> Array:
    """KL [r] in nats, of log-probabilities [r, V]: 0 of equal ones, and right to about 1e-15."""
    terms = elementary.exp(base) * (base - other)
    return np.maximum(0.0, exact_sum(np.where(np.abs(terms) < TINY, 0.0, terms)))


def are_clear(logits: Array) -> Array:
    """[r] 0 or 1"""
    if logits.shape[1] == 1:
        return np.zeros(len(logits), np.int64)
    second, first = np.partition(logits, -2, axis=1)[:, -2:].astype(np.float64).T
    largest = np.abs(logits).max(axis=1).astype(np.float64)
    return np.asarray(first - second > np.ldexp(1.0, np.frexp(largest)[1] - BFLOAT16_BITS), np.int64)
