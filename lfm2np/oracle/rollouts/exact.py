"""The exact log-probabilities of every answer token, under each reading of what an engine may report.

reading       what is reported
raw           of the logits as they are (vLLM's raw_logprobs)
tempered      of the logits over the temperature
processed     after penalties, temperature and filters, renormalised (vLLM's processed_logprobs)
unpenalised   as processed, without penalties
filtered      filters without the temperature

Where a request's sampling leaves two of them the same, the first has its name. "tempered at 0.65" and "processed at
0.65" are the same at another temperature than the file states: the one that was fitted (judge.py).

N tokens of all rollouts in the order of the file, R of one rollout, W different readings, X tolerances.
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

Float64 = NDArray[np.float64]
SIDES = ("sampler", "trainer")
READINGS = ("raw", "tempered", "processed", "unpenalised", "filtered")
BEFORE = {"processed": "tempered", "unpenalised": "tempered", "filtered": "raw"}  # readings before their filters
AT = " at "  # between a reading and its fitted temperature
TOLERANCES = (3e-5, 1e-3, 2e-2, 0.1, 0.5)  # nats of a logit, for filters in formats from float32 to bfloat16
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ARRAYS = ("logprobs", "low", "high", "squares", "least")


def params_of(reading: str, sampling: SamplingParams) -> SamplingParams:
    """What is applied to the logits; at temperature 0 an engine reports the logits' own distribution."""
    name, _, value = reading.partition(AT)
    plain = SamplingParams(**view_of(sampling))
    if value:
        plain = replace(plain, temperature=float(value))
    elif plain.temperature == 0.0:
        plain = replace(plain, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    return {
        "raw": SamplingParams(),
        "tempered": SamplingParams(temperature=plain.temperature),
        "processed": plain,
        "unpenalised": replace(plain, **PENALTIES),
        "filtered": replace(plain, temperature=1.0),
    }[name]


def before_filters(reading: str) -> str | None:
    """The reading without its filters, or None if it has none."""
    name, at, value = reading.partition(AT)
    return BEFORE[name] + at + value if name in BEFORE else None


def is_unstated(sampling: SamplingParams) -> bool:
    """A file may not say how it was sampled: then its temperature is the one that fits."""
    return SamplingParams(**view_of(sampling)) == SamplingParams()


@dataclass(frozen=True, eq=False)
class Scores:
    """One rollout: its R answer tokens under W different readings.

    truth     of all rows that predict the answer
    numbers   by reading, which of the W it is
    logprobs  [W, R] nats; -inf for a token that the filters exclude
    low, high [W, X, R] what a right engine may report whose logits are off by that tolerance
    squares   [W, R] sum of p^2 over the kept tokens
    least     [W, R] of the kept tokens the least likely, nats below the likeliest
    """

    rollout: Rollout
    truth: Truth
    numbers: Mapping[str, int]
    logprobs: Float64
    low: Float64
    high: Float64
    squares: Float64
    least: Float64

    @property
    def size(self) -> int:
        return len(self.rollout.token_ids)

    @property
    def rows(self) -> slice:
        """Of the truth's arrays, that predict the answer."""
        first = len(self.rollout.prompt_token_ids) - 1 - self.truth.first
        return slice(first, first + self.size)

    @property
    def columns(self) -> NDArray[np.int64]:
        """[R] where the answer's tokens stand in the truth's arrays."""
        tokens = np.array(self.rollout.token_ids, np.int64)
        return np.asarray(np.argmax(self.truth.columns[self.rows] == tokens[:, None], axis=1))


def ids_of(rollout: Rollout) -> Ids:
    return (*rollout.prompt_token_ids, *rollout.token_ids)


def item_of(rollout: Rollout, readings: Sequence[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """The item of views.VIEWS for these readings and those before their filters, and the number of each one's view."""
    views: list[dict[str, Any]] = []
    numbers = {}
    for reading in dict.fromkeys((*readings, *filter(None, map(before_filters, readings)))):
        view = view_of(params_of(reading, rollout.sampling))
        if view not in views:
            views.append(view)
        numbers[reading] = views.index(view)
    ids = list(ids_of(rollout))
    item: dict[str, Any] = {"token_ids": ids, "start": len(rollout.prompt_token_ids), "views": views}
    item["tolerances"] = list(TOLERANCES)
    if rollout.routes is not None:
        item["routes"] = np.asarray(rollout.routes, np.int64)[: len(ids) - 1]
    return item, numbers


def scores_of(
    model: LoadedModel,
    rollouts: Sequence[Rollout],
    place: AnyPlace = None,
    progress: Progress | None = None,
    readings: Sequence[str] = READINGS,
) -> tuple[list[Scores], list[tuple[Rollout, str]]]:
    """The scores of each rollout, and those whose numbers exact arithmetic can't hold, with the reason.

    `progress(done, total)` counts tokens. Answers to one prompt follow each other, so that it is computed once.
    """
    ordered = sorted(range(len(rollouts)), key=lambda index: ids_of(rollouts[index]))
    pairs = {index: item_of(rollouts[index], readings) for index in ordered}
    results = compute(VIEWS, model, [{**pairs[index][0], "columns": True} for index in ordered], place, progress)
    by_index = dict(zip(ordered, results, strict=True))
    scores: list[Scores] = []
    failed: list[tuple[Rollout, str]] = []
    for index, rollout in enumerate(rollouts):
        result = by_index[index]
        if "error" in result:
            failed.append((rollout, result["error"]))
            continue
        spoken = Spoken(ids_of(rollout), as_key(rollout.routes, len(ids_of(rollout)) - 1))
        truth = Truth(spoken=spoken, vocab_size=model.config.vocab_size, **result["truth"])
        scores.append(Scores(rollout, truth, pairs[index][1], **{name: result[name] for name in ARRAYS}))
    return scores, failed


@dataclass(frozen=True, eq=False)
class Predicted:
    """What is predicted for N tokens under one reading: exact, and within tolerances of the logits [X, N].

    before  the same without the filters, where there are any: what scales an error if they keep other tokens
    """

    logprobs: Float64
    low: Float64
    high: Float64
    squares: Float64  # [N]
    before: Predicted | None = None


def predicted(scores: Sequence[Scores], reading: str) -> Predicted:
    def of_all(name: str) -> Float64:
        return np.concatenate([getattr(each, name)[each.numbers[reading]] for each in scores], axis=-1)

    unfiltered = before_filters(reading)
    before = predicted(scores, unfiltered) if unfiltered else None
    return Predicted(of_all("logprobs"), of_all("low"), of_all("high"), of_all("squares"), before)


def values_of(scores: Sequence[Scores], side: str) -> Float64:
    """[N] what a side reported; NaN where it reported nothing or the token is not the sampler's."""
    parts = []
    for each in scores:
        reported = getattr(each.rollout, f"{side}_logprobs")
        values = np.full(each.size, np.nan) if reported is None else np.array(reported, np.float64)
        parts.append(np.where(each.rollout.is_sampled, values, np.nan))
    return np.concatenate(parts) if parts else np.zeros(0)


def by_rollout(values: Any, scores: Sequence[Scores]) -> list[Any]:
    """[N] cut into those of each rollout."""
    return np.split(values, np.cumsum([each.size for each in scores])[:-1]) if scores else []
