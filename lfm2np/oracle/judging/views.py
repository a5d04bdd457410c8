"""Exact log-probabilities of sampled tokens under several readings of one distribution: raw, tempered, filtered.

A view is the processing that an engine may have applied before it sampled or reported: penalties, temperature, then
min_p, top_k and top_p in the order of the view's profile (sampling/choice.py). All views of a sequence share one pass
through the network.

Each filter keeps the likeliest tokens, so what is kept is the beginning of the tokens in descending order, and a view
is one sort, one cumulative sum and a length. The probabilities are choice.py's integers: every sum is exact. A right
engine with rounding errors may keep a few tokens more or less: `low` and `high` bound its log-probability if its logits
are off by a tolerance.

R answer tokens, W views, X tolerances, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.grids import exact_sum
from lfm2np.arithmetic.pieces import over_pieces, pieces
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.choice import WEIGHT_BITS, asks_for_no_change, penalised
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.teacher_forcing import LOGITS_AT_ONCE
from lfm2np.engine.work.place import Work
from lfm2np.oracle.judging.truth import num_fed_tokens, num_shared_tokens, over_states, truth_rows
from lfm2np.truth import elementary, reference

Array = NDArray[Any]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
SQRT2 = 2.0**0.5
FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "profile",
)


def view_of(params: SamplingParams) -> dict[str, Any]:
    """The fields of a view, as plain data."""
    return {name: getattr(params, name) for name in FIELDS}


def view_items(model: LoadedModel, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each item the arrays of `views_of_rows`, or `error`: the same bits on every machine.

    item  {"token_ids": prompt and answer, "start": index of the first answer token, "views": [see view_of],
          "tolerances": [nats], "columns": whether the arrays of a Truth are wanted too, "routes": [T, L, K] or None}
    """

    def result_of(item: Mapping[str, Any], states: Array, routes: dict[str, Array]) -> dict[str, Any]:
        result: dict[str, Any] = views_of_rows(model, states[item["start"] - 1 :], item)
        if item.get("columns"):
            wanted = {row: [item["token_ids"][row + 1]] for row in range(item["start"] - 1, len(states))}
            result["truth"] = truth_rows(model, states, wanted) | routes
        return result

    return over_states(model, items, result_of)


def views_of_rows(model: LoadedModel, states: Array, item: Mapping[str, Any]) -> dict[str, Array]:
    """From hidden states [R, D] that predict the answer's tokens; see `view_items`.

    logprobs  [W, R] of each answer token, nats; -inf where the filters exclude it
    low       [W, X, R] and high: the least and most that a right engine may report whose logits are off by a tolerance
    drops     [W, X, R] 1 where its filters may exclude the token, else 0
    squares   [W, R] sum of p^2 over the kept tokens
    least     [W, R] of the kept tokens the least likely, nats below the likeliest; -inf without filters
    """
    ids, start = item["token_ids"], item["start"]
    views = [SamplingParams(**view) for view in item["views"]]
    tolerances = item.get("tolerances", ())
    count, tokens = len(states), np.array(ids[start:], np.int64)
    result = {
        "logprobs": np.empty((len(views), count)),
        "low": np.empty((len(views), len(tolerances), count)),
        "high": np.empty((len(views), len(tolerances), count)),
        "drops": np.empty((len(views), len(tolerances), count), np.int64),
        "squares": np.empty((len(views), count)),
        "least": np.empty((len(views), count)),
    }
    for part in pieces(count, model.config.vocab_size, LOGITS_AT_ONCE):
        logits = reference.output_logits(model.weights, model.numerics, states[part])
        if item.get("head_bits"):
            logits = rounded(logits, item["head_bits"])

        def compute(rows: slice, logits: Array = logits, first: int = part.start) -> None:
            at = slice(first + rows.start, first + rows.stop)
            for number, view in enumerate(views):
                values = processed(logits[rows], view, ids, range(start + at.start, start + at.stop), start)
                for name, column in viewed(values, tokens[at], view, tolerances).items():
                    result[name][number, ..., at] = column

        over_pieces(compute, len(logits), logits.shape[1])
    return result


def rounded(logits: Array, bits: int) -> Array:
    """Logits to so many significant bits, ties to even: a head that computes in a narrower format."""
    fraction, exponent = np.frexp(logits.astype(np.float64))
    return np.asarray(np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits), np.float32)


def processed(logits: Array, view: SamplingParams, ids: Sequence[int], places: range, start: int) -> Float64:
    """Logits [r, V] of the tokens at these places after biases, penalties and temperature; the largest is 0."""
    if asks_for_no_change(view, 0):
        values = logits.astype(np.float64)
    else:
        prompt = ids[:start]
        rows = [penalised(row, view, prompt, ids[start:place]) for row, place in zip(logits, places, strict=True)]
        values = np.stack(rows)
    values -= values.max(-1, keepdims=True)
    return values if view.temperature == 0.0 else values / view.temperature


def viewed(values: Float64, tokens: Int64, view: SamplingParams, tolerances: Sequence[float]) -> dict[str, Array]:
    """Of processed logits [r, V] and their tokens [r]: what views_of_rows has, [r] or [X, r]."""
    shares = elementary.exp(values)
    chosen = np.take_along_axis(values, tokens[:, None], axis=1)[:, 0]
    totals = exact_sum(shares, signed=False)
    squares = exact_sum(shares * shares, signed=False) / (totals * totals)
    is_filtered = view.temperature > 0.0 and (view.top_k > 0 or view.top_p < 1.0 or view.min_p > 0.0)
    if not is_filtered:
        logprobs = chosen - elementary.log(totals)
        same = np.tile(logprobs, (len(tolerances), 1))
        return {
            "logprobs": logprobs,
            "low": same,
            "high": same,
            "drops": np.zeros(same.shape, np.int64),
            "squares": squares,
            "least": np.full_like(totals, -np.inf),
        }
    weights = np.rint(np.ldexp(shares, WEIGHT_BITS)).astype(np.int64)
    ranks = np.count_nonzero(weights > np.take_along_axis(weights, tokens[:, None], axis=1), axis=1)
    ascending = np.sort(-weights, axis=1)
    descending = -ascending
    cumulative = np.cumsum(descending, axis=1)

    def logprobs_of(counts: Int64, ranks: Int64) -> Float64:
        """If so many of the likeliest tokens are kept, and the row's own is of this rank, [r]."""
        mass = np.take_along_axis(cumulative, np.maximum(counts, 1)[:, None] - 1, axis=1)[:, 0]
        logs = chosen - elementary.log(np.ldexp(mass.astype(np.float64), -WEIGHT_BITS))
        return np.where(ranks < counts, logs, -np.inf)

    def sums_of(view: SamplingParams) -> tuple[Int64, Int64, Float64, Float64]:
        """How many are kept, the weight of the last, and the sums of their shares and squares, [r] each."""
        counts = num_kept(ascending, cumulative, view, np.zeros(len(tokens)), 0.0)
        last = np.take_along_axis(descending, counts[:, None] - 1, axis=1)
        kept = np.where(weights >= last, shares, 0.0)
        return counts, last[:, 0], exact_sum(kept, signed=False), exact_sum(kept * kept, signed=False)

    exact, last, kept_totals, kept_squares = sums_of(view)
    before_top_p = replace(view, top_p=1.0, min_p=view.min_p if view.profile == "vllm" else 0.0)
    _, _, before_totals, before_squares = sums_of(before_top_p)
    mass = mass_errors(kept_totals / before_totals, kept_squares / before_totals**2, before_squares / before_totals**2)
    low, high = np.empty((len(tolerances), len(tokens))), np.empty((len(tolerances), len(tokens)))
    drops, own = np.empty(low.shape, np.int64), np.take_along_axis(shares, tokens[:, None], axis=1)
    for number, tolerance in enumerate(tolerances):
        slack = tolerance / view.temperature
        fewest = num_kept(ascending, cumulative, view, -slack * mass, -slack)
        most = num_kept(ascending, cumulative, view, slack * mass, slack)
        raised, lowered = (own * elementary.exp(np.array([by * SQRT2 * slack])) for by in (1.0, -1.0))
        least_ranks = np.count_nonzero(weights > np.ldexp(raised, WEIGHT_BITS), axis=1)  # among near ties the first
        last_ranks = np.count_nonzero(weights >= np.ldexp(lowered, WEIGHT_BITS), axis=1) - 1  # it is one of them itself
        drops[number] = last_ranks >= fewest
        low[number] = logprobs_of(most, ranks)
        high[number] = logprobs_of(np.where(least_ranks < most, np.maximum(fewest, least_ranks + 1), 0), least_ranks)
    return {
        "logprobs": logprobs_of(exact, ranks),
        "low": low,
        "high": high,
        "drops": drops,
        "squares": kept_squares / (kept_totals * kept_totals),
        "least": elementary.log(np.ldexp(last.astype(np.float64), -WEIGHT_BITS)),
    }


def mass_errors(kept: Float64, kept_squares: Float64, squares: Float64) -> Float64:
    """[r] by how much the mass of the kept tokens moves with errors of the logits, independent and of size 1.

    Its derivative by a kept token's logit is p (1 - mass), by another's -p mass.
    """
    left_squares = np.maximum(0.0, squares - kept_squares)
    return np.asarray(np.sqrt((1.0 - kept) ** 2 * kept_squares + kept**2 * left_squares))


def num_kept(ascending: Int64, cumulative: Int64, view: SamplingParams, mass: Float64, slack: float) -> Int64:
    """[r] how many of the likeliest tokens the filters keep, if top_p moves by `mass` [r] and min_p by so many nats.

    ascending [r, V] are the weights times -1, cumulative [r, V] their sums from the likeliest token on.
    Without either exactly those of choice.filtered. Two logits differ by up to twice the error of one: sqrt(2) times,
    if their errors are independent. What is so near to the k-th may tie with it in a coarse format, and top_k keeps all
    that tie: top_p then takes its share of more.
    """
    size = ascending.shape[1]
    kept = places(ascending, np.zeros(len(ascending), np.int64))  # those above 0
    for name in ("min_p", "top_k", "top_p") if view.profile == "vllm" else ("top_k", "top_p", "min_p"):
        if name == "min_p" and view.min_p > 0.0:
            factor = elementary.exp(np.array([-SQRT2 * slack]))  # 1 without slack
            least = np.ceil(np.ldexp(view.min_p * factor, WEIGHT_BITS)).astype(np.int64)
            kept = np.minimum(kept, places(ascending, np.repeat(1 - least, len(ascending))))
        elif name == "top_k" and 0 < view.top_k < size:
            factor = elementary.exp(np.array([-SQRT2 * max(0.0, slack)]))
            least = np.ceil(-ascending[:, view.top_k - 1] * factor).astype(np.int64)
            kept = np.minimum(kept, places(ascending, 1 - least))
        elif name == "top_p" and view.top_p < 1.0:
            totals = np.take_along_axis(cumulative, np.maximum(kept, 1)[:, None] - 1, axis=1)[:, 0]
            enough = [
                enough_of(view.top_p, total, moved) for total, moved in zip(totals.tolist(), mass.tolist(), strict=True)
            ]
            kept = np.minimum(kept, places(cumulative, np.array(enough, np.int64)) + 1)
    return np.asarray(kept)


def places(ascending: Int64, values: Int64) -> Int64:
    """[r] how many of each row [r, V] are below the row's value."""
    return np.array([np.searchsorted(row, value) for row, value in zip(ascending, values, strict=True)], np.int64)


def enough_of(top_p: float, total: int, moved: float) -> int:
    """The least weight that top_p asks for: exactly so, or with the threshold moved by a share of the total."""
    if moved == 0.0:
        numerator, denominator = top_p.as_integer_ratio()
        return -(-numerator * total // denominator)
    return max(1, int(min(1.0, max(0.0, top_p + moved)) * total))


VIEWS = Work("views-with-drops", view_items, num_fed_tokens, num_shared=num_shared_tokens)
