"""The exact log-probabilities of every answer token under each reading, and what a reading leaves of a side.

reading       what is reported
raw           of the logits as they are (vLLM's raw_logprobs)
tempered      of the logits over the temperature
processed     after penalties, temperature and filters, renormalised (vLLM's processed_logprobs)
unpenalised   as processed, without penalties
filtered      filters without the temperature

Where a request's sampling leaves two of them the same, the first has its name. "tempered at 0.65" and "processed at
0.65" are the same at another temperature than the file states: the one that was fitted (judge.py).

A reading explains a position that it leaves within Allowed (judging/allowed.py); no chance is computed here. The scale
of an error is that of all judgements (judging/noise.py), here of the reading's own distribution: with errors d of the
logits, log p[y] at temperature t is off by (d[y] - sum q[v] d[v]) / t. A rounding of the logits by up to half a unit
each moves it by up to (1 - p[y]) units. The error is what lies beyond [low, high], which a right engine may report
whose filters keep a token more or less.

N tokens of all rollouts in the order of the file, R of one rollout, X tolerances, K emulated engines, J columns of a
Truth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import AnyPlace, compute
from lfm2np.oracle.causes.groups import OFF
from lfm2np.oracle.judging.allowed import FLOAT32_UNITS, most_shift
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import DRAWS, FIRST, Noise, loosened
from lfm2np.oracle.judging.routes import as_key
from lfm2np.oracle.judging.scored import Known, add_noises
from lfm2np.oracle.judging.truth import Spoken, Truth
from lfm2np.oracle.judging.verdict import LIMIT, root_mean_square
from lfm2np.oracle.judging.views import VIEWS, view_of
from lfm2np.oracle.rollouts.rollout import Rollout
from lfm2np.oracle.total import MOST_SIZE
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
SIDES = ("sampler", "trainer")
READINGS = ("raw", "tempered", "processed", "unpenalised", "filtered")
BEFORE = {"processed": "tempered", "unpenalised": "tempered", "filtered": "raw"}  # readings before their filters
AS_IT_IS = "as computed"
AT = " at "  # between a reading and its fitted temperature
TOLERANCES = (3e-5, 1e-3, 2e-2, 0.1, 0.5)  # nats of a logit, for filters in formats from float32 to bfloat16
ROUNDED = 1e-6  # nats
MOST = 1e6  # units of the scale that a position counts for, where all are added
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


def is_unstated(rollout: Rollout) -> bool:
    """A file may not say how it was sampled: then its temperature is the one that fits."""
    return not rollout.has_temperature and SamplingParams(**view_of(rollout.sampling)) == SamplingParams()


class View(NamedTuple):
    """One rollout's R answer tokens under one reading.

    logprobs   [R] nats; -inf for a token that the filters exclude
    low, high  [X, R] what a right engine may report whose logits are off by that tolerance
    drops      [X, R] 1 where its filters may exclude the token, so that it may report -inf, else 0
    squares    [R] sum of p^2 over the kept tokens
    least      [R] of the kept tokens the least likely, nats below the likeliest
    """

    logprobs: Float64
    low: Float64
    high: Float64
    drops: NDArray[np.int64]
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


# --- what a reading leaves


@dataclass(frozen=True, eq=False)
class Fit:
    """A side under one reading of an exact prediction, within a format. All arrays [N].

    name, detail  the error of the network that predicts
    """

    format_name: str
    reading: str
    errors: Float64  # reported minus exact; NaN where nothing was reported
    ratios: Float64  # beyond a unit of the logits and what filters allow, in units of the scale
    sizes: Float64  # the error beyond what filters allow, in units of scale and unit together (allowed.py)
    name: str = AS_IT_IS
    detail: str = ""

    @property
    def is_error(self) -> bool:
        return self.name != AS_IT_IS

    @property
    def words(self) -> str:
        """ "" of the network as it is."""
        return (self.name + (f" ({self.detail})" if self.detail else "")) * self.is_error

    @cached_property
    def reported(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.errors)

    @cached_property
    def wrong(self) -> NDArray[np.bool_]:
        return np.asarray(self.reported & ~(np.abs(self.ratios) <= LIMIT))

    @cached_property
    def num_wrong(self) -> int:
        return int(np.count_nonzero(self.wrong))

    @cached_property
    def rms(self) -> float:
        return root_mean_square(self.sizes[self.reported].tolist())

    @property
    def left(self) -> float:
        """The sum of the squares of the sizes."""
        return math.fsum((np.minimum(self.sizes[self.reported], MOST) ** 2).tolist())

    @property
    def rank(self) -> tuple[int, float]:
        """The least explains most: the positions that are left wrong, then how much is left of all."""
        return self.num_wrong, self.left

    @property
    def is_right(self) -> bool:
        """A temperature that was fitted to the errors must leave those of a right engine."""
        return not self.num_wrong and self.rms <= (MOST_SIZE if AT in self.reading else OFF)


def noises_of(
    format_name: str, model: LoadedModel, scores: Sequence[Scores], known: Known, progress: Progress | None = None
) -> list[Noise]:
    """By two emulated engines, or by those that are known already. In a mixture of experts without reported routes,
    coarse formats send tokens to other experts: then by all engines, with routes of their own.
    """
    truths = [each.truth for each in scores]
    chooses = bool(model.config.sparse_layers) and not format_named(format_name).is_fine
    draws = DRAWS if chooses else FIRST
    add_noises(model, format_name, truths, known, draws, progress)
    noises = [known.noises[format_name, truth.spoken] for truth in truths]
    if chooses:
        free = [index for index, each in enumerate(scores) if each.rollout.routes is None]
        add_noises(model, format_name, [truths[index] for index in free], known, draws, progress, own_routes=True)
        loose = loosened([known.loose[format_name, truths[index].spoken] for index in free])
        for index, noise in zip(free, loose, strict=True):
            noises[index] = noise
    return noises


def scales_of(scores: Scores, noise: Noise, format_name: str, reading: str) -> tuple[Float64, Float64]:
    """[R] standard deviations of a reading's errors, and what rounding the logits and the log-probability itself does.

    The latter, and the logarithm of a sum in float32, do not shrink as p[y] goes to 1. These are bounds, whose last
    bits are their machine's (np.exp), as in judging/noise.py; the log-probabilities that they bound are exact.
    """
    view, rows, truth = scores.views[reading], scores.rows, scores.truth
    temperature, bits = params_of(reading, scores.rollout.sampling).temperature, format_named(format_name).bits
    below = (truth.logprobs[rows] - truth.logprobs[rows].max(axis=1, keepdims=True)) / temperature
    q = np.where(below >= view.least[:, None] - ROUNDED, np.exp(below), 0.0)
    q /= q.sum(axis=1, keepdims=True)
    errors = noise.errors[:, rows].astype(np.float64)
    own = np.take_along_axis(errors, scores.columns[None, :, None], axis=2) - (errors * q).sum(axis=2, keepdims=True)
    of_reading = Noise(noise.draws, own / temperature, noise.spread[rows] / temperature)  # [K, R, 1]
    scales = of_reading.scales(replace(truth, logprobs=view.logprobs[:, None], squares=view.squares))[:, 0]
    largest, p = truth.largest[rows], np.exp(view.logprobs)
    units = (1.0 - p) * np.ldexp(1.0, np.frexp(largest)[1] - bits) + FLOAT32_UNITS * np.ldexp(largest, -23)
    size = np.ldexp(np.where(np.isfinite(view.logprobs), np.abs(view.logprobs), 0.0), -bits)
    return scales, np.maximum(0.0, units) / temperature + size


def fit(
    reported: Sequence[Float64], scores: Sequence[Scores], noises: Sequence[Noise], format_name: str, reading: str
) -> Fit:
    """How a side's values, [R] of each rollout, lie about those of a reading."""
    parts = [fit_one(*each, format_name, reading) for each in zip(reported, scores, noises, strict=True)]
    return Fit(format_name, reading, *map(joined, zip(*parts, strict=True)))


def fit_one(
    reported: Float64, scores: Scores, noise: Noise, format_name: str, reading: str
) -> tuple[Float64, Float64, Float64]:
    """The arrays [R] of a Fit, of one rollout: allowed.errors_within, of one value at each position."""
    view, unfiltered = scores.views[reading], before_filters(reading)
    scales, units = scales_of(scores, noise, format_name, reading)
    needed = np.searchsorted(TOLERANCES, LIMIT * noise.spread[scores.rows])
    at = np.minimum(needed, len(TOLERANCES) - 1)[None]
    low, high, drops = (np.take_along_axis(bound, at, axis=0)[0] for bound in (view.low, view.high, view.drops))
    if unfiltered:  # what scales an error if the filters keep other tokens
        loose, loose_units = scales_of(scores, noise, format_name, unfiltered)
        scales = np.where(low < high, np.maximum(scales, loose), scales)
        units = np.where(low < high, np.maximum(units, loose_units), units)
    with np.errstate(invalid="ignore"):
        errors = reported - view.logprobs
        excess = np.where(reported > high, reported - high, np.where(reported < low, reported - low, 0.0))
    excess = np.where(np.isneginf(reported) & ((drops > 0) | np.isneginf(view.low.min(axis=0))), 0.0, excess)
    excess[np.isnan(reported)] = np.nan
    left = np.maximum(0.0, np.abs(excess) - most_shift(scores.truth.vocab_size))
    whole = np.hypot(scales, units / 2.0)
    ratios = np.sign(excess) * np.maximum(0.0, left - units) / scales
    return errors, ratios, np.minimum(np.abs(excess), np.maximum(whole, left)) / whole
