"""The exact log-probabilities of every answer token, under each reading of what an engine may report.

reading       what is reported
raw           of the logits as they are (vLLM's raw_logprobs)
tempered      of the logits over the temperature
processed     after penalties, temperature and filters, renormalised (vLLM's processed_logprobs)
unpenalised   as processed, without penalties
filtered      filters without the temperature

Where a request's sampling leaves two of them the same, the first has its name. "tempered at 0.65" and "processed at
0.65" are the same at another temperature than the file states: the one that was fitted (judge.py).

N tokens of all rollouts in the order of the file, R of one rollout, X tolerances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import AnyPlace, compute
from lfm2np.oracle.judging.routes import as_key
from lfm2np.oracle.judging.truth import Spoken, Truth
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


class View(NamedTuple):
    """One rollout's R answer tokens under one reading.

    logprobs   [R] nats; -inf for a token that the filters exclude
    low, high  [X, R] what a right engine may report whose logits are off by that tolerance
    squares    [R] sum of p^2 over the kept tokens
    least      [R] of the kept tokens the least likely, nats below the likeliest
    """

    logprobs: Float64
    low: Float64
    high: Float64
    squares: Float64
    least: Float64


@dataclass(frozen=True, eq=False)
class Scores:
    """One rollout, with the truth of all rows that predict the answer, and its views by reading."""

    rollout: Rollout
    truth: Truth
    views: Mapping[str, View]

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

    def reported(self, side: str) -> Float64:
        """[R] by a side; NaN where it reported nothing or the token is not the sampler's."""
        values = getattr(self.rollout, f"{side}_logprobs")
        values = np.full(self.size, np.nan) if values is None else np.array(values, np.float64)
        return np.where(self.rollout.is_sampled, values, np.nan)


def item_of(rollout: Rollout, readings: Sequence[str]) -> dict[str, Any]:
    """The item of views.VIEWS: equal views are computed once."""
    views: list[dict[str, Any]] = []
    for view in views_by_reading(rollout, readings).values():
        if view not in views:
            views.append(view)
    item: dict[str, Any] = {"token_ids": list(rollout.ids), "start": len(rollout.prompt_token_ids), "views": views}
    item["tolerances"] = list(TOLERANCES)
    if rollout.routes is not None:
        item["routes"] = np.asarray(rollout.routes, np.int64)[: len(rollout.ids) - 1]
    return item


def views_by_reading(rollout: Rollout, readings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Those of the readings, and of what stands before their filters."""
    with_before = (*readings, *filter(None, map(before_filters, readings)))
    return {reading: view_of(params_of(reading, rollout.sampling)) for reading in with_before}


def views_from(rollout: Rollout, readings: Sequence[str], result: Mapping[str, Any]) -> dict[str, View]:
    """By reading, from the result of item_of's item."""
    views, by_reading = item_of(rollout, readings)["views"], views_by_reading(rollout, readings)
    return {
        reading: View(*(result[name][views.index(view)] for name in View._fields))
        for reading, view in by_reading.items()
    }


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
    ordered = sorted(range(len(rollouts)), key=lambda index: rollouts[index].ids)
    results = compute(
        VIEWS, model, [item_of(rollouts[n], readings) | {"columns": True} for n in ordered], place, progress
    )
    by_index = dict(zip(ordered, results, strict=True))
    scores: list[Scores] = []
    failed: list[tuple[Rollout, str]] = []
    for index, rollout in enumerate(rollouts):
        result = by_index[index]
        if "error" in result:
            failed.append((rollout, result["error"]))
            continue
        spoken = Spoken(rollout.ids, as_key(rollout.routes, len(rollout.ids) - 1))
        truth = Truth(spoken=spoken, vocab_size=model.config.vocab_size, **result["truth"])
        scores.append(Scores(rollout, truth, views_from(rollout, readings, result)))
    return scores, failed


def joined(parts: Iterable[Any]) -> Any:
    """[N] of all rollouts."""
    return np.concatenate([*parts, np.zeros(0)])


def by_rollout(values: Any, scores: Sequence[Scores]) -> list[Any]:
    """[N] cut into those of each rollout."""
    return np.split(values, np.cumsum([each.size for each in scores])[:-1]) if scores else []
