"""One side, sampler or trainer: each reported log-probability against the exact one, within the error of a format.

The error of a reported log-probability is what lies beyond [low, high], which a right engine may report whose filters
keep a token more or less (scores.py). Its scale is that of noise.py, for the reading's temperature and distribution:
with errors d of the logits, log p[y] at temperature t is off by (d[y] - sum q[v] d[v]) / t.

N tokens of all rollouts in the order of the file, R of one rollout, K emulated engines, J columns of a Truth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle import factors
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import DRAWS, LEAST, STAGES, Noise, loosened
from lfm2np.oracle.judging.position import FLOAT32_UNITS, most_shift
from lfm2np.oracle.judging.scored import Known, add_noises
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.rollouts.scores import ALL_READINGS, TOLERANCES, Scores, temperature_of
from lfm2np.values import Progress

Array = NDArray[Any]
Float64 = NDArray[np.float64]
SIDES = ("sampler", "trainer")
BEFORE = {"processed": "tempered", "unpenalised": "tempered", "filtered": "raw"}  # readings before their filters
ROUNDED = 1e-6  # nats
FREEDOM = 4.0  # of Student's t: few right engines' errors are normal, and one outlier must not decide
WIDEST = 50.0  # nats
MOVED = 0.1  # the chance that filters keep other tokens, where they may
EXCLUDED = -60.0  # nats: the log-likelihood of a value that a hypothesis says can't be reported


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
    numbers = [each.numbers[reading] for each in scores]

    def of_all(name: str) -> Float64:
        return np.concatenate([getattr(s, name)[w] for s, w in zip(scores, numbers, strict=True)], axis=-1)

    before = predicted(scores, BEFORE[reading]) if reading in BEFORE else None
    return Predicted(of_all("logprobs"), of_all("low"), of_all("high"), of_all("squares"), before)


def values_of(scores: Sequence[Scores], side: str) -> Float64:
    """[N] what a side reported; NaN where it reported nothing or the token is not the sampler's."""
    parts = []
    for each in scores:
        rollout = each.rollout
        reported = getattr(rollout, f"{side}_logprobs")
        values = np.full(len(rollout.token_ids), np.nan) if reported is None else np.array(reported, np.float64)
        parts.append(np.where(rollout.is_sampled, values, np.nan))
    return np.concatenate(parts) if parts else np.zeros(0)


@dataclass(frozen=True, eq=False)
class Spread:
    """Errors that a format allows at N tokens, by the temperature of a reading.

    squares  [N] by reading: mean squares of emulated engines' errors of the token's log-probability
    logits   [N] tau: the size of the logits' errors
    ulps     [N] one unit in the last place of the largest logit, in the format
    largest  [N] in absolute value
    bits     of the format's significand
    shift    nats by which sums over the vocabulary may move all log-probabilities
    """

    format_name: str
    squares: Mapping[str, Float64]
    logits: Float64
    ulps: Float64
    largest: Float64
    bits: int
    shift: float
    temperatures: Mapping[str, Float64]  # [N] by reading

    def scales(self, values: Predicted, reading: str) -> tuple[Float64, Float64]:
        """[N] standard deviations, and what rounding the logits and the log-probability themselves may do.

        With each logit off by up to half a unit, log p[y] is off by up to (1 - p[y]) units. Its own rounding, and the
        logarithm of a sum in float32, do not shrink as p[y] goes to 1.
        """
        temperature = self.temperatures[reading]
        p = np.exp(np.minimum(values.logprobs, 0.0))
        shape = (1.0 - p) ** 2 + np.maximum(0.0, values.squares - p * p)
        both = self.squares[reading] + (self.logits / temperature) ** 2 * shape
        size = np.ldexp(np.where(np.isfinite(values.logprobs), np.abs(values.logprobs), 0.0), -self.bits)
        float32 = FLOAT32_UNITS * np.ldexp(self.largest / temperature, -23)
        return np.maximum(LEAST, np.sqrt(both / 2.0)), (1.0 - p) * self.ulps / temperature + size + float32


def spread_of(
    model: LoadedModel,
    scores: Sequence[Scores],
    format_name: str,
    known: Known,
    progress: Progress | None = None,
) -> Spread:
    """In a mixture of experts without reported routes, coarse formats send tokens to other experts: their errors are
    those of engines that choose routes of their own.
    """
    truths = [each.truth for each in scores]
    form = format_named(format_name)
    chooses = bool(model.config.sparse_layers) and not form.is_fine
    draws = DRAWS if chooses else STAGES[0]
    add_noises(model, format_name, truths, known, draws, progress)
    noises = [known.noises[format_name, truth.spoken] for truth in truths]
    if chooses:
        free = [index for index, each in enumerate(scores) if each.rollout.routes is None]
        add_noises(model, format_name, [truths[index] for index in free], known, draws, progress, own_routes=True)
        loose = loosened([known.loose[format_name, truths[index].spoken] for index in free])
        for index, noise in zip(free, loose, strict=True):
            noises[index] = noise
    return Spread(
        format_name,
        {
            reading: joined(error_squares(each, noise, reading) for each, noise in zip(scores, noises, strict=True))
            for reading in ALL_READINGS
        },
        joined(noise.spread[each.rows] for each, noise in zip(scores, noises, strict=True)),
        joined(np.ldexp(1.0, np.frexp(each.truth.largest[each.rows])[1] - form.bits) for each in scores),
        joined(each.truth.largest[each.rows] for each in scores),
        form.bits,
        most_shift(model.config.vocab_size),
        {
            reading: joined(
                np.full(len(each.entropy), temperature_of(reading, each.rollout.sampling)) for each in scores
            )
            for reading in ALL_READINGS
        },
    )


def joined(parts: Any) -> Float64:
    return np.concatenate([*parts, np.zeros(0)])


def error_squares(scores: Scores, noise: Noise, reading: str) -> Float64:
    """[R] mean squares over engines of the answer tokens' errors, under a reading."""
    rows, truth = scores.rows, scores.truth
    temperature = temperature_of(reading, scores.rollout.sampling)
    tokens = np.array(scores.rollout.token_ids, np.int64)
    columns = np.argmax(truth.columns[rows] == tokens[:, None], axis=1)
    tempered = truth.logprobs[rows] / temperature
    below = tempered - tempered.max(axis=1, keepdims=True)
    q = np.where(below >= scores.least[scores.numbers[reading]][:, None] - ROUNDED, np.exp(below), 0.0)
    q /= q.sum(axis=1, keepdims=True)
    errors = noise.errors[:, rows].astype(np.float64)
    chosen = np.take_along_axis(errors, columns[None, :, None], axis=2)[..., 0]
    if reading != "raw":
        chosen = (chosen - (errors * q).sum(axis=2)) / temperature
    return np.asarray(np.mean(chosen**2, axis=0))


@dataclass(frozen=True, eq=False)
class Fit:
    """A side under one hypothesis: a reading of an exact prediction, within a format. All arrays [N]."""

    format_name: str
    reading: str
    errors: Float64  # reported minus exact; NaN where nothing was reported
    ratios: Float64  # beyond a unit of the logits and what filters allow, in units of the scale
    sizes: Float64  # the whole error beyond what filters allow, in units of scale and unit together
    scales: Float64  # nats, the unit of the logits included
    likelihoods: Float64  # [N] logarithms of the density of what was reported; 0 where nothing was

    @cached_property
    def reported(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.errors)

    @cached_property
    def wrong(self) -> NDArray[np.bool_]:
        return np.asarray(self.reported & ~(np.abs(self.ratios) <= LIMIT))

    @property
    def rms(self) -> float:
        sizes = self.sizes[self.reported]
        return math.sqrt(math.fsum((sizes * sizes).tolist()) / len(sizes)) if len(sizes) else 0.0

    @property
    def is_right(self) -> bool:
        return not self.wrong.any() and self.rms <= factors.OFF

    @property
    def log_likelihood(self) -> float:
        return math.fsum(self.likelihoods.tolist())


def log_density(sizes: Float64, scales: Float64) -> Float64:
    nu = FREEDOM
    constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
    with np.errstate(invalid="ignore", over="ignore"):
        density = constant - np.log(scales) - (nu + 1) / 2 * np.log1p(np.minimum(sizes, 1e150) ** 2 / nu)
    return np.asarray(np.maximum(np.where(np.isnan(density), EXCLUDED, density), EXCLUDED))


def fit(reported: Float64, values: Predicted, spread: Spread, reading: str) -> Fit:
    """How a side's values [N] lie about a prediction."""
    scales, units = spread.scales(values, reading)
    needed = np.searchsorted(TOLERANCES, LIMIT * spread.logits)
    at = np.minimum(needed, len(TOLERANCES) - 1)[None]
    low, high = (np.take_along_axis(bound, at, axis=0)[0] for bound in (values.low, values.high))
    if values.before is not None:
        loose, loose_units = spread.scales(values.before, BEFORE[reading])
        is_open = low < high
        scales, units = (
            np.where(is_open, np.maximum(*pair), pair[0]) for pair in ((scales, loose), (units, loose_units))
        )
    both = np.hypot(scales, units / 2.0)
    with np.errstate(invalid="ignore"):
        errors = reported - values.logprobs
        excess = np.where(reported > high, reported - high, np.where(reported < low, reported - low, 0.0))
    same = np.isneginf(reported) & np.isneginf(values.low.min(axis=0, initial=0.0))
    excess = np.where(same, 0.0, excess)
    high, low = np.where(np.isfinite(high), high, 0.0), np.where(np.isfinite(low), low, -WIDEST)
    left = np.maximum(0.0, np.abs(excess) - spread.shift)
    ratios = np.sign(excess) * np.maximum(0.0, left - units) / scales
    nan = np.isnan(reported)
    ratios[nan], excess[nan] = np.nan, np.nan
    exact = log_density(np.abs(errors) / both, both)
    wide = np.hypot(both, np.minimum(high - low, WIDEST) / 2.0)
    moved = log_density(np.where(np.isfinite(errors), np.abs(errors), np.abs(excess)) / wide, wide)
    either = np.logaddexp(exact + math.log1p(-MOVED), moved + math.log(MOVED))  # the filters keep other tokens, or not
    likelihoods = np.where(nan, 0.0, np.where(low < high, either, exact))
    return Fit(spread.format_name, reading, errors, ratios, np.abs(excess) / both, both, likelihoods)
