"""Two predictions at each position compared: what is kept of a sequence, as work for any executor.

An item is a sequence and the quantised checkpoints, with the parts to try alone in the base:

{"token_ids": [...], "start": row, "stop": row, "quantised": [{"sha256": ..., "by": "layer", "parts": [name, ...]}]}

Rows start to stop - 1 are compared; the tokens before `stop` are fed, the others only looked up. R rows, M of them with
a next token, V vocabulary, N layers, L sparse layers, U parts.

All sums are exact_sum's, exp and log are elementary's (divergence.py too): so the bits are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.arithmetic.grids import exact_sum
from lfm2np.arithmetic.matrix import Matrix
from lfm2np.arithmetic.pieces import pieces
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.teacher_forcing import LOGITS_AT_ONCE
from lfm2np.engine.work.place import Source, Work, load_source
from lfm2np.oracle.compare.divergence import divergence
from lfm2np.oracle.compare.network import Network, Pass, network_of, network_with, run_from, run_whole, tensors_of
from lfm2np.oracle.compare.pair import parts_of

Array = NDArray[Any]
BFLOAT16_BITS = 8  # of a significand
MOST_LOADED = 16  # quantised checkpoints of a worker


def compare_work(others: Mapping[str, LoadedModel | Source]) -> Work:
    """Quantised checkpoints by their SHA-256: loaded, or where a worker finds them."""
    return Work("compare", partial(compare_items, others), itemgetter("stop"))  # tokens that are fed


def compare_items(
    others: Mapping[str, LoadedModel | Source], model: LoadedModel, items: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Of each item `base` and `quantised`, with the arrays of `of_base` and `of_other`, or `error`."""
    results: list[dict[str, Any]] = []
    for asked, group in groupby(items, key=itemgetter("quantised")):
        results += compared(others, model, list(group), asked)
    return results


@lru_cache(maxsize=MOST_LOADED)
def loaded(source: Source) -> LoadedModel:
    """In a worker: see place.load_source."""
    return load_source(source)


def compared(
    others: Mapping[str, LoadedModel | Source], model: LoadedModel, items: Sequence[Mapping[str, Any]], asked: Any
) -> list[dict[str, Any]]:
    """Of items with the same checkpoints and parts: the base runs once, all in one ragged pass each."""
    baseline = Baseline(model, items)
    columns, numbers = of_base(baseline), range(len(items))
    bases = [baseline.cut(columns, number, error_of(baseline.first, number)) for number in numbers]
    results: list[dict[str, Any]] = [{"base": base, "quantised": []} for base in bases]
    for wanted in asked:
        other = others[wanted["sha256"]]
        columns, again = of_other(baseline, loaded(other) if isinstance(other, Source) else other, wanted)
        for number, result in enumerate(results):
            error = error_of(again, number) or result["base"].get("error")
            result["quantised"].append(baseline.cut(columns, number, error))
    return results


def followers(item: Mapping[str, Any]) -> NDArray[np.int64]:
    """[R] the token after each row, -1 if there is none."""
    ids = item["token_ids"][item["start"] + 1 : item["stop"] + 1]
    return np.array([*ids, *[-1] * (item["stop"] - item["start"] - len(ids))], np.int64)


def error_of(base_pass: Pass, number: int) -> str | None:
    error = base_pass.runs[number].error
    return None if error is None else str(error)


# --- predictions

Piece = tuple[slice, Array, Array, NDArray[np.bool_]]


class Baseline:
    """The base's pass over items, and its predictions at R rows: computed in pieces, and cached if they are few."""

    def __init__(self, model: LoadedModel, items: Sequence[Mapping[str, Any]]) -> None:
        self.model, self.numerics, network = model, model.numerics, network_of(model)
        self.sequences = [item["token_ids"][: item["stop"]] for item in items]
        self.first, self.head = run_whole(network, self.numerics, self.sequences), network.head
        pairs = zip(self.first.runs, items, strict=True)
        rows = [np.arange(run.rows.start + item["start"], run.rows.stop) for run, item in pairs]  # of each item
        self.index = np.concatenate(rows)  # [R] in the pass
        ends = np.cumsum([len(part) for part in rows]).tolist()
        self._spans = [slice(end - len(part), end) for part, end in zip(rows, ends, strict=True)]
        self.states = self.first.states[self.index]
        self.following = np.concatenate([followers(item) for item in items])
        self._kept: list[Piece] | None = None
        if len(self.states) * self.head.outputs <= LOGITS_AT_ONCE:
            self._kept = list(self._compute())

    def cut(self, columns: Mapping[str, Array], number: int, error: str | None) -> dict[str, Array]:
        """One item's rows; or its error."""
        span = self._spans[number]
        wrong = np.flatnonzero(columns["wrong"][span])
        if error is None and len(wrong):
            error = f"a logit in compared row {wrong[0]} is not finite: these weights overflow exact"
        if error is not None:
            return {"error": error}  # type: ignore[dict-item]
        arrays = {name: values[span] for name, values in columns.items() if name not in ("wrong", "flips", "alone")}
        arrays["logprobs"] = arrays["logprobs"][self.following[span] >= 0]
        if "alone" in columns:
            arrays |= {"alone": columns["alone"][:, span], "flips": columns["flips"][:, span].sum(axis=1)}
        return {name: np.ascontiguousarray(values) for name, values in arrays.items()}

    def pieces(self) -> Iterator[Piece]:
        """Some rows, their logits [r, V] and log-probabilities [r, V], and which are not finite [r]: see logits_of."""
        yield from self._compute() if self._kept is None else self._kept

    def _compute(self) -> Iterator[Piece]:
        for rows in pieces(len(self.states), self.head.outputs, LOGITS_AT_ONCE):
            logits, wrong = logits_of(self.numerics, self.head, self.states[rows])
            yield rows, logits, self.numerics.log_softmax(logits), wrong


def logits_of(numerics: Numerics, head: Matrix, states: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Logits [r, V], 0 in rows where one is not finite, and which rows these are [r]."""
    with np.errstate(all="ignore"):
        logits = numerics.linear(states, head)
    wrong = np.asarray(~np.isfinite(logits).all(axis=1))
    logits[wrong] = 0.0
    return logits, wrong


def next_logprobs(logprobs: Array, following: NDArray[np.int64]) -> Array:
    """[r] of the next tokens; without one that of token 0, which is never read."""
    return np.take_along_axis(logprobs, np.maximum(following, 0)[:, None], axis=1)[:, 0]


def of_base(baseline: Baseline) -> dict[str, Array]:
    """Of R rows, by name:

    best      [R]       the greedy token
    margins   [R]       by how much its logit is ahead of the next; 0 in a vocabulary of one
    steps     [R]       between neighbours in bfloat16, of the logit that is largest in absolute value
    logprobs  [R]       of the token that follows ([M] of a sequence)
    squares   [R, N+2]  sums of the squares of the residual stream, and of the states after the last norm
    wrong     [R]       where a logit is not finite
    """
    parts = []
    for rows, logits, logprobs, wrong in baseline.pieces():
        best = np.argmax(logits, axis=1)
        largest = np.abs(logits).max(axis=1).astype(np.float64)
        top = np.take_along_axis(logits, best[:, None], axis=1)[:, 0].astype(np.float64)
        others = logits.copy()
        np.put_along_axis(others, best[:, None], -np.inf, axis=1)
        second = others.max(axis=1).astype(np.float64)
        parts.append(
            {
                "best": best.astype(np.int64),
                "margins": np.where(np.isfinite(second), top - second, 0.0),
                "steps": np.ldexp(1.0, np.frexp(largest)[1] - BFLOAT16_BITS),
                "logprobs": next_logprobs(logprobs, baseline.following[rows]),
                "wrong": wrong,
            }
        )
    columns, first = joined(parts), baseline.first
    columns["squares"] = np.stack([sum_of_squares(x[baseline.index]) for x in (*first.stream, first.states)], axis=1)
    columns["wrong"] |= ~np.isfinite(columns["squares"]).all(axis=1)
    return columns


def of_other(baseline: Baseline, other: LoadedModel, asked: Mapping[str, Any]) -> tuple[dict[str, Array], Pass]:
    """Of R rows, by name, and the pass:

    kl         [R]       divergence of the other's distribution from the base's, over the whole vocabulary, nats
    best       [R]       the greedy token
    logprobs   [R]       of the token that follows ([M] of a sequence)
    squares    [R, N+2]  sums of the squares of the differences of what of_base has
    elsewhere  [R, L]    1 where the token's experts are others
    alone      [U, R]    kl of the base with one part of the other, NaN where a logit of that is not finite
    flips      [U, R]    where that has another greedy token ([U] of a sequence, how many)
    wrong      [R]       where a logit of the other is not finite
    """
    model, numerics, sequences = baseline.model, baseline.numerics, baseline.sequences
    first, index, network = baseline.first, baseline.index, network_of(other)
    again = run_whole(network, numerics, sequences)
    columns = distances(baseline, network.head, again.states[index])
    streams = zip((*first.stream, first.states), (*again.stream, again.states), strict=True)
    squares = [sum_of_squares(theirs[index].astype(np.float64) - ours[index]) for ours, theirs in streams]
    columns["squares"] = np.stack(squares, axis=1)
    if first.routes is not None and again.routes is not None:
        columns["elsewhere"] = (first.routes != again.routes)[index].any(axis=-1).astype(np.int64)
    alone, flips = [], []
    parts = {part.name: part for part in parts_of(model.config, other.config, list(tensors_of(model)), asked["by"])}
    base_best = np.concatenate([np.argmax(logits, axis=1) for _, logits, _, _ in baseline.pieces()])
    for name in asked["parts"]:
        mixed: Network = network_with(model, other, parts[name])
        single = distances(baseline, mixed.head, run_from(mixed, numerics, sequences, parts[name], first)[index])
        alone.append(np.where(single["wrong"], np.nan, single["kl"]))
        flips.append((single["best"] != base_best).astype(np.int64))
    if alone:
        columns |= {"alone": np.stack(alone), "flips": np.stack(flips)}
    return columns, again


def distances(baseline: Baseline, head: Matrix, states: Array) -> dict[str, Array]:
    """kl, best, logprobs and wrong of another's states [R, D]: see of_other."""
    parts = []
    for rows, base_logits, base_logprobs, _ in baseline.pieces():
        logits, wrong = logits_of(baseline.numerics, head, states[rows])
        logprobs = baseline.numerics.log_softmax(logits)
        parts.append(
            {
                "kl": divergence(base_logits, base_logprobs, logits),
                "best": np.argmax(logits, axis=1).astype(np.int64),
                "logprobs": next_logprobs(logprobs, baseline.following[rows]),
                "wrong": wrong,
            }
        )
    return joined(parts)


def sum_of_squares(x: Array) -> Array:
    """Over the last axis: each square is rounded, their sum does not depend on their order."""
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return exact_sum(wide * wide)


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
