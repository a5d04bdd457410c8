"""Tokens that penalties, filters and biases of their request exclude.

The exact distribution after them says which tokens are left, if all logits are off by as much as the format allows
(views.py): another one was not chosen as requested. Of a greedy request only the likeliest is left.
Filters may also leave too few: that a single one is left is bet on as in drawn.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.work.place import compute
from lfm2np.oracle.engines.records import Answer, Pair, Request
from lfm2np.oracle.judging.allowed import resolution
from lfm2np.oracle.judging.drawn import AS_IF, ERROR, STAKE
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import Noise
from lfm2np.oracle.judging.scored import Known, Scored, spoken, truths_of, usable
from lfm2np.oracle.judging.truth import Truth
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.judging.views import FIELDS, VIEWS, view_of

FILTERS = ("top_k", "top_p", "min_p")


class Viewed(NamedTuple):
    """An answer of R tokens under its request's processors.

    slack     nats by which a logit may be off
    logprobs  [R] exact; -inf for an excluded token
    high      [R] the most that a right engine gives the token
    """

    request: Request
    answer: Answer
    truth: Truth
    slack: float
    logprobs: NDArray[np.float64]
    high: NDArray[np.float64]


def can_be_judged(model: LoadedModel, format_name: str, pair: Pair) -> bool:
    """Not in a mixture of experts whose routes are not reported, in a format in which any token may have gone to other
    experts: that changes any logit.
    """
    is_open = bool(model.config.sparse_layers) and pair[1].routes is None and not format_named(format_name).is_fine
    return not (is_open and pair[0].processors)


def wrong_choices(model: LoadedModel, format_name: str, pairs: Sequence[Pair], known: Known) -> dict[str, str]:
    """By id, answers with an excluded token, which is named, or by which it shows that filters leave one token only.

    `known` has the noise of them all. Without those of a mixture in which, as no routes are reported, a near tie may
    have gone to another expert.
    """
    asked = [pair for pair in usable(pairs) if pair[0].processors and set(pair[0].processors) <= set(FIELDS)]
    truths = truths_of(model, asked, known)

    def is_certain(pair: Pair) -> bool:
        truth = truths[spoken(*pair)]
        margins = Scored(truth, known.noises[format_name, truth.spoken]).margins
        count = len(pair[0].prompt_token_ids) + len(pair[1].ids)
        return pair[1].routes is not None or margins is None or bool((margins[:count] > LIMIT).all())

    asked, bits = list(filter(is_certain, asked)), format_named(format_name).bits
    of_pairs = [truths[spoken(*pair)] for pair in asked]
    slacks = [
        slack_of(pair, truth, known.noises[format_name, truth.spoken], bits)
        for pair, truth in zip(asked, of_pairs, strict=True)
    ]
    results = compute(VIEWS, model, list(map(item_of, asked, slacks)), known.place)
    viewed = [
        Viewed(*pair, truth, slack, result["logprobs"][0], result["high"][0, 0])
        for pair, truth, slack, result in zip(asked, of_pairs, slacks, results, strict=True)
    ]
    return filtered_greedily(viewed) | excluded(viewed)


def excluded(answers: Sequence[Viewed]) -> dict[str, str]:
    faults = {}
    for each in answers:
        wrong = np.flatnonzero(np.isneginf(each.high))
        if len(wrong):
            token = each.answer.ids[wrong[0]]
            words = words_of(each.request)
            why = f"{words} excludes" if each.request.is_sampled else f"is not the likeliest with {words}"
            faults[each.request.request_id] = f"new token {wrong[0] + 1} is {token}, which {why}"
    return faults


def filtered_greedily(answers: Sequence[Viewed]) -> dict[str, str]:
    """Whether the likeliest token comes always, whatever the filter: the bet of drawn.py, on shares of what is left. As
    there on the first answer of each seed: others may use the same noise.
    """
    filtered = [each for each in answers if each.request.is_sampled and set(each.request.processors) <= set(FILTERS)]
    by_seed = {each.request.params.seed: each for each in reversed(filtered)}
    gains = [gain(each, index) for each in by_seed.values() for index in range(len(each.answer.ids))]
    if math.fsum(gains) <= -math.log(ERROR):
        return {}
    return {filtered[-1].request.request_id: f"{len(gains)} tokens with {' or '.join(FILTERS)} {AS_IF} greedily"}


def gain(each: Viewed, index: int) -> float:
    """The logarithm of the factor by which the capital grows at a token: see drawn.only."""
    row = len(each.request.prompt_token_ids) - 1 + index
    if each.answer.ids[index] != each.truth.best[row - each.truth.first]:
        return math.log1p(-STAKE) - each.slack / each.request.params.temperature
    share, most = math.exp(each.logprobs[index]), math.exp(each.high[index])
    return math.log(STAKE + (1.0 - STAKE) * share) - math.log(most)


def slack_of(pair: Pair, truth: Truth, noise: Noise, bits: int) -> float:
    """By how many nats a logit may be off at any of the answer's tokens; a penalty is a factor of it, too."""
    request, answer = pair
    first = len(request.prompt_token_ids) - 1 - truth.first
    rows = slice(first, first + len(answer.ids))
    penalty = request.params.repetition_penalty
    logits = LIMIT * noise.spread[rows] + resolution(truth.largest[rows], bits)
    return float(np.max(logits)) * max(penalty, 1.0 / penalty)


def item_of(pair: Pair, slack: float) -> dict[str, Any]:
    """The item of views.VIEWS, with one view and one tolerance."""
    request, answer = pair
    params, ids = request.params, request.prompt_token_ids
    if not request.is_sampled:
        params = replace(params, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
    item: dict[str, Any] = {"token_ids": [*ids, *answer.ids], "start": len(ids), "views": [view_of(params)]}
    item["tolerances"] = [slack]
    if answer.routes is not None:
        item["routes"] = np.asarray(answer.routes, np.int64)[: len(ids) + len(answer.ids) - 1]
    return item


def words_of(request: Request) -> str:
    values = {name: getattr(request.params, name) for name in request.processors}
    return " and ".join(name if name == "logit_bias" else f"{name} {value:g}" for name, value in values.items())
