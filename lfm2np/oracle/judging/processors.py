"""Tokens that penalties, filters and biases of their request exclude.

The exact distribution after them says which tokens are left, if all logits are off by as much as the format allows
(views.py): another one was not chosen as requested. Of a greedy request only the likeliest is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.work.place import compute
from lfm2np.oracle.engines.records import Pair, Request
from lfm2np.oracle.judging.allowed import resolution
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import Noise
from lfm2np.oracle.judging.scored import Known, spoken, truths_of, usable
from lfm2np.oracle.judging.truth import Truth
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.judging.views import FIELDS, VIEWS, view_of


def excluded_tokens(model: LoadedModel, format_name: str, pairs: Sequence[Pair], known: Known) -> dict[str, str]:
    """By id, answers with such a token, which is named; `known` has the noise of them all.

    In a mixture of experts only with reported routes, as others may change any logit.
    """
    is_mixture = bool(model.config.sparse_layers)
    asked = [
        (request, answer)
        for request, answer in usable(pairs)
        if request.processors
        and set(request.processors) <= set(FIELDS)
        and (answer.routes is not None or not is_mixture)
    ]
    truths, bits = truths_of(model, asked, known), format_named(format_name).bits
    items = []
    for pair in asked:
        truth = truths[spoken(*pair)]
        slack = slack_of(pair, truth, known.noises[format_name, truth.spoken], bits)
        items.append(item_of(pair, slack))
    faults: dict[str, str] = {}
    for (request, answer), result in zip(asked, compute(VIEWS, model, items, known.place), strict=True):
        wrong = np.flatnonzero(np.isneginf(result["high"][0, 0]))
        if len(wrong):
            faults[request.request_id] = words_of(request, int(wrong[0]), answer.ids[wrong[0]])
    return faults


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


def words_of(request: Request, index: int, token: int) -> str:
    values = {name: getattr(request.params, name) for name in request.processors}
    words = " and ".join(name if name == "logit_bias" else f"{name} {value:g}" for name, value in values.items())
    why = f"{words} excludes" if request.is_sampled else f"is not the likeliest with {words}"
    return f"new token {index + 1} is {token}, which {why}"
