"""Each reported log-probability against an exact one, within the error of a number format.

The error of a reported log-probability is what lies beyond [low, high], which a right engine may report whose filters
keep a token more or less (exact.py). Its scale is that of noise.py, for the reading's temperature and distribution:
with errors d of the logits, log p[y] at temperature t is off by (d[y] - sum q[v] d[v]) / t.

Hypotheses are compared by likelihood: the errors of tokens are taken as independent, each a Student's t with 4 degrees
of freedom about 0 with that scale, since few right engines' errors are normal and one outlier must not decide (Lange,
Little and Taylor, "Robust statistical modeling using the t distribution", JASA 84, 1989). It is the one statistical
test of this package: under a right hypothesis another one is likelier by k nats with a chance of at most exp(-k)
(Royall, "On the probability of observing misleading statistical evidence", JASA 95, 2000).

N tokens of all rollouts in the order of the file, R of one rollout, K emulated engines, J columns of a Truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from lfm2np.oracle.rollouts.exact import AT, TOLERANCES, Predicted, Scores, before_filters, params_of
from lfm2np.oracle.total import MOST_SIZE
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
ROUNDED = 1e-6  # nats
FREEDOM = 4.0  # of Student's t
WIDEST = 50.0  # nats
MOVED = 0.1  # the chance that filters keep other tokens, where they may
EXCLUDED = -60.0  # nats: the log-likelihood of a value that a hypothesis says can't be reported


@dataclass(frozen=True, eq=False)
class Spread:
    """Errors that a format allows at N tokens.

    logits   [N] tau: the size of the logits' errors
    ulps     [N] one unit in the last place of the largest logit, in the format
    largest  [N] in absolute value
    bits     of the format's significand
    shift    nats by which sums over the vocabulary may move all log-probabilities
    """

    format_name: str
    scores: Sequence[Scores]
    noises: Sequence[Noise]
    logits: Float64
    ulps: Float64
    largest: Float64
    bits: int
    shift: float
    by_reading: dict[str, tuple[Float64, Float64]] = field(default_factory=dict)

    def of(self, reading: str) -> tuple[Float64, Float64]:
        """[N] the temperature, and emulated engines' mean squares of the token's error."""
        if reading not in self.by_reading:
            temperatures = [params_of(reading, each.rollout.sampling).temperature for each in self.scores]
            squares = [
                error_squares(*pair, reading, temperature)
                for *pair, temperature in zip(self.scores, self.noises, temperatures, strict=True)
            ]
            sizes = [each.size for each in self.scores]
            self.by_reading[reading] = np.repeat(temperatures, sizes), joined(squares)
        return self.by_reading[reading]

    def scales(self, values: Predicted, reading: str) -> tuple[Float64, Float64]:
        """[N] standard deviations, and what rounding the logits and the log-probability themselves may do.

        With each logit off by up to half a unit, log p[y] is off by up to (1 - p[y]) units. Its own rounding, and the
        logarithm of a sum in float32, do not shrink as p[y] goes to 1.
        """
        temperature, squares = self.of(reading)
        p = np.exp(np.minimum(values.logprobs, 0.0))
        shape = (1.0 - p) ** 2 + np.maximum(0.0, values.squares - p * p)
        both = squares + (self.logits / temperature) ** 2 * shape
        size = np.ldexp(np.where(np.isfinite(values.logprobs), np.abs(values.logprobs), 0.0), -self.bits)
        float32 = FLOAT32_UNITS * np.ldexp(self.largest / temperature, -23)
        return np.maximum(LEAST, np.sqrt(both / 2.0)), (1.0 - p) * self.ulps / temperature + size + float32


def spread_of(
    model: LoadedModel, scores: Sequence[Scores], format_name: str, known: Known, progress: Progress | None = None
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
    largest = joined(each.truth.largest[each.rows] for each in scores)
    return Spread(
        format_name,
        scores,
        noises,
        logits=joined(noise.spread[each.rows] for each, noise in zip(scores, noises, strict=True)),
        ulps=np.ldexp(1.0, np.frexp(largest)[1] - form.bits),
        largest=largest,
        bits=form.bits,
        shift=most_shift(model.config.vocab_size),
    )


def joined(parts: Any) -> Float64:
    return np.concatenate([*parts, np.zeros(0)])


def error_squares(scores: Scores, noise: Noise, reading: str, temperature: float) -> Float64:
    """[R] mean squares over engines of the answer tokens' errors, under a reading."""
    tempered = scores.truth.logprobs[scores.rows] / temperature
    below = tempered - tempered.max(axis=1, keepdims=True)
    name, _, fitted = reading.partition(AT)  # at a fitted temperature about the same tokens are kept
    least = scores.least[scores.numbers[name]] * (scores.rollout.sampling.temperature / temperature if fitted else 1.0)
    q = np.where(below >= least[:, None] - ROUNDED, np.exp(below), 0.0)
    q /= q.sum(axis=1, keepdims=True)
    errors = noise.errors[:, scores.rows].astype(np.float64)
    chosen = np.take_along_axis(errors, scores.columns[None, :, None], axis=2)[..., 0]
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
    likelihoods: Float64  # logarithms of the density of what was reported; 0 where nothing was

    @cached_property
    def reported(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.errors)

    @cached_property
    def wrong(self) -> NDArray[np.bool_]:
        return np.asarray(self.reported & ~(np.abs(self.ratios) <= LIMIT))

    @property
    def rms(self) -> float:
        return root_mean_square(self.sizes[self.reported])

    @property
    def is_right(self) -> bool:
        """A temperature that was fitted to the errors must leave those of a right engine."""
        return not self.wrong.any() and self.rms <= (MOST_SIZE if AT in self.reading else factors.OFF)

    @property
    def log_likelihood(self) -> float:
        return math.fsum(self.likelihoods.tolist())


def root_mean_square(sizes: Float64) -> float:
    return math.sqrt(math.fsum((sizes * sizes).tolist()) / len(sizes)) if len(sizes) else 0.0


def fit(reported: Float64, values: Predicted, spread: Spread, reading: str) -> Fit:
    """How a side's values [N] lie about a prediction."""
    scales, units = spread.scales(values, reading)
    needed = np.searchsorted(TOLERANCES, LIMIT * spread.logits)
    at = np.minimum(needed, len(TOLERANCES) - 1)[None]
    low, high = (np.take_along_axis(bound, at, axis=0)[0] for bound in (values.low, values.high))
    unfiltered = before_filters(reading)
    if values.before is not None and unfiltered is not None:
        loose, loose_units = spread.scales(values.before, unfiltered)
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
    left = np.maximum(0.0, np.abs(excess) - spread.shift)
    ratios = np.sign(excess) * np.maximum(0.0, left - units) / scales
    nan = np.isnan(reported)
    ratios[nan], excess[nan] = np.nan, np.nan
    high, low = np.where(np.isfinite(high), high, 0.0), np.where(np.isfinite(low), low, -WIDEST)
    exact = log_density(np.abs(errors) / both, both)
    wide = np.hypot(both, np.minimum(high - low, WIDEST) / 2.0)
    moved = log_density(np.where(np.isfinite(errors), np.abs(errors), np.abs(excess)) / wide, wide)
    either = np.logaddexp(exact + math.log1p(-MOVED), moved + math.log(MOVED))  # the filters keep other tokens, or not
    likelihoods = np.where(nan, 0.0, np.where(low < high, either, exact))
    return Fit(spread.format_name, reading, errors, ratios, np.abs(excess) / both, likelihoods)


def log_density(sizes: Float64, scales: Float64) -> Float64:
    """Of Student's t, at errors in units of their scales."""
    nu = FREEDOM
    constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
    with np.errstate(invalid="ignore", over="ignore"):
        density = constant - np.log(scales) - (nu + 1) / 2 * np.log1p(np.minimum(sizes, 1e150) ** 2 / nu)
    return np.asarray(np.maximum(np.where(np.isnan(density), EXCLUDED, density), EXCLUDED))
