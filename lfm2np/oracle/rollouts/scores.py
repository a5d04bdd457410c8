"""The exact log-probabilities of every answer token, under each reading of what an engine may report.

reading       what is reported
raw           of the logits as they are (vLLM's raw_logprobs)
tempered      of the logits over the temperature
processed     after penalties, temperature and filters, renormalised (vLLM's processed_logprobs)
unpenalised   as processed, without penalties
filtered      filters without the temperature

Where a request's sampling leaves two of them the same, the first has its name. A file may not say how it was sampled:
where a request is said to be sampled at temperature 1 without filters, some other temperatures are readings too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import AnyPlace, compute
from lfm2np.oracle.judging.routes import as_key
from lfm2np.oracle.judging.truth import Ids, Spoken, Truth
from lfm2np.oracle.judging.views import VIEWS, view_of
from lfm2np.oracle.rollouts.rollout import Rollout
from lfm2np.values import Progress

Array = NDArray[Any]
Float64 = NDArray[np.float64]
READINGS = ("raw", "tempered", "processed", "unpenalised", "filtered")
OTHERS = {f"at temperature {value:g}": value for value in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2)}
ALL_READINGS = (*READINGS, *OTHERS)
TOLERANCES = (3e-5, 1e-3, 2e-2, 0.1, 0.5)  # nats of a logit, for filters in formats from float32 to bfloat16
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def readings_of(params: SamplingParams) -> dict[str, SamplingParams]:
    """By name; at temperature 0 an engine reports the logits' own distribution."""
    plain = SamplingParams(**view_of(params))
    tempered = SamplingParams(temperature=params.temperature or 1.0)
    if params.temperature == 0.0:
        plain = replace(plain, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    readings = {
        "raw": SamplingParams(),
        "tempered": tempered,
        "processed": plain,
        "unpenalised": replace(plain, **PENALTIES),
        "filtered": replace(plain, temperature=1.0),
    }
    is_unsaid = plain == SamplingParams()
    return readings | {
        name: SamplingParams(temperature=value) if is_unsaid else tempered for name, value in OTHERS.items()
    }


def temperature_of(reading: str, params: SamplingParams) -> float:
    """By which the logits are divided."""
    return readings_of(params)[reading].temperature or 1.0


@dataclass(frozen=True, eq=False)
class Scores:
    """One rollout: its R answer tokens under W different readings, X tolerances.

    truth     of all rows that predict the answer
    numbers   by reading, which of the W it is
    logprobs  [W, R] nats; -inf for a token that the filters exclude
    low, high [W, X, R] what a right engine may report whose logits are off by that tolerance
    squares   [W, R] sum of p^2 over the kept tokens
    least     [W, R] of the kept tokens the least likely, nats below the likeliest
    entropy   [R] of the raw distribution, nats
    """

    rollout: Rollout
    truth: Truth
    numbers: Mapping[str, int]
    logprobs: Float64
    low: Float64
    high: Float64
    squares: Float64
    least: Float64
    entropy: Float64

    @property
    def rows(self) -> slice:
        """Of the truth's arrays, that predict the answer."""
        first = len(self.rollout.prompt_token_ids) - 1 - self.truth.first
        return slice(first, first + len(self.rollout.token_ids))


def ids_of(rollout: Rollout) -> Ids:
    return (*rollout.prompt_token_ids, *rollout.token_ids)


def item_of(rollout: Rollout, readings: Sequence[str] = ALL_READINGS) -> tuple[dict[str, Any], dict[str, int]]:
    """The item of views.VIEWS, and the number of each reading's view."""
    views: list[dict[str, Any]] = []
    numbers = {}
    params = readings_of(rollout.sampling)
    for name in readings:
        view = view_of(params[name])
        if view not in views:
            views.append(view)
        numbers[name] = views.index(view)
    item: dict[str, Any] = {
        "token_ids": list(ids_of(rollout)),
        "start": len(rollout.prompt_token_ids),
        "views": views,
        "tolerances": list(TOLERANCES),
        "columns": True,
    }
    if rollout.routes is not None:
        item["routes"] = np.asarray(rollout.routes, np.int64)[: len(item["token_ids"]) - 1]
    return item, numbers


def scores_of(
    model: LoadedModel, rollouts: Sequence[Rollout], place: AnyPlace = None, progress: Progress | None = None
) -> tuple[list[Scores], list[tuple[Rollout, str]]]:
    """The scores of each rollout, and those whose numbers exact arithmetic can't hold, with the reason.

    `progress(done, total)` counts tokens. Answers to one prompt follow each other, so that it is computed once.
    """
    ordered = sorted(range(len(rollouts)), key=lambda index: ids_of(rollouts[index]))
    pairs = {index: item_of(rollouts[index]) for index in ordered}
    results = compute(VIEWS, model, [pairs[index][0] for index in ordered], place, progress)
    by_index = dict(zip(ordered, results, strict=True))
    scores: list[Scores] = []
    failed: list[tuple[Rollout, str]] = []
    for index, rollout in enumerate(rollouts):
        result = by_index[index]
        if "error" in result:
            failed.append((rollout, result["error"]))
            continue
        arrays = {name: result[name] for name in ("logprobs", "low", "high", "squares", "least", "entropy")}
        spoken = Spoken(ids_of(rollout), as_key(rollout.routes, len(ids_of(rollout)) - 1))
        truth = Truth(spoken=spoken, vocab_size=model.config.vocab_size, **result["truth"])
        scores.append(Scores(rollout, truth, pairs[index][1], **arrays))
    return scores, failed
