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

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle import factors
from lfm2np.oracle.judging.allowed import FLOAT32_UNITS, most_shift, shape
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import DRAWS, FIRST, LEAST, Noise, loosened
from lfm2np.oracle.judging.scored import Known, add_noises
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.rollouts.exact import AT, TOLERANCES, Scores, before_filters, joined, params_of
from lfm2np.oracle.total import MOST_SIZE
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
ROUNDED = 1e-6  # nats
FREEDOM = 4.0  # of Student's t
WIDEST = 50.0  # nats
MOVED = 0.1  # the chance that filters keep other tokens, where they may
EXCLUDED = -60.0  # nats: the log-likelihood of a value that a hypothesis says can't be reported


@dataclass(frozen=True, eq=False)
class Noises:
    """The noise of a format at some rollouts; and mean squares that were computed, by rollout and reading."""

    format_name: str
    noises: Sequence[Noise]
    squares: dict[tuple[int, str], Float64] = field(default_factory=dict)

    @property
    def bits(self) -> int:
        return format_named(self.format_name).bits

    def scales(self, index: int, scores: Scores, reading: str) -> tuple[Float64, Float64]:
        """[R] standard deviations, and what rounding the logits and the log-probability themselves may do.

        With each logit off by up to half a unit, log p[y] is off by up to (1 - p[y]) units. Its own rounding, and the
        logarithm of a sum in float32, do not shrink as p[y] goes to 1.
        """
        view, rows, noise = scores.views[reading], scores.rows, self.noises[index]
        if (index, reading) not in self.squares:
            self.squares[index, reading] = error_squares(scores, noise, reading)
        temperature = params_of(reading, scores.rollout.sampling).temperature
        p = np.exp(np.minimum(view.logprobs, 0.0))
        variances = (noise.spread[rows] / temperature) ** 2 * shape(p, np.maximum(0.0, view.squares - p * p))
        both = self.squares[index, reading] + variances
        largest = scores.truth.largest[rows]
        ulps = np.ldexp(1.0, np.frexp(largest)[1] - self.bits)
        size = np.ldexp(np.where(np.isfinite(view.logprobs), np.abs(view.logprobs), 0.0), -self.bits)
        float32 = FLOAT32_UNITS * np.ldexp(largest / temperature, -23)
        return np.maximum(LEAST, np.sqrt(both / 2.0)), (1.0 - p) * ulps / temperature + size + float32


def noises_of(
    format_name: str, model: LoadedModel, scores: Sequence[Scores], known: Known, progress: Progress | None = None
) -> Noises:
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
    return Noises(format_name, noises)


def error_squares(scores: Scores, noise: Noise, reading: str) -> Float64:
    """[R] mean squares over engines of the answer tokens' errors, under a reading."""
    temperature = params_of(reading, scores.rollout.sampling).temperature
    tempered = scores.truth.logprobs[scores.rows] / temperature
    below = tempered - tempered.max(axis=1, keepdims=True)
    q = np.where(below >= scores.views[reading].least[:, None] - ROUNDED, np.exp(below), 0.0)
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
    sizes: Float64  # the error beyond what filters allow, in units of scale and unit together (allowed.py)
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


def fit(reported: Sequence[Float64], scores: Sequence[Scores], noises: Noises, reading: str) -> Fit:
    """How a side's values, [R] of each rollout, lie about those of a reading."""
    parts = [fit_one(values, noises, index, scores[index], reading) for index, values in enumerate(reported)]
    return Fit(noises.format_name, reading, *map(joined, zip(*parts, strict=True)))


def fit_one(
    reported: Float64, noises: Noises, index: int, scores: Scores, reading: str
) -> tuple[Float64, Float64, Float64, Float64]:
    """The arrays [R] of a Fit, of one rollout."""
    view, unfiltered = scores.views[reading], before_filters(reading)
    scales, units = noises.scales(index, scores, reading)
    needed = np.searchsorted(TOLERANCES, LIMIT * noises.noises[index].spread[scores.rows])
    at = np.minimum(needed, len(TOLERANCES) - 1)[None]
    low, high = (np.take_along_axis(bound, at, axis=0)[0] for bound in (view.low, view.high))
    if unfiltered:  # what scales an error if the filters keep other tokens
        is_open = low < high
        loose, loose_units = noises.scales(index, scores, unfiltered)
        scales = np.where(is_open, np.maximum(scales, loose), scales)
        units = np.where(is_open, np.maximum(units, loose_units), units)
    both = np.hypot(scales, units / 2.0)
    with np.errstate(invalid="ignore"):
        errors = reported - view.logprobs
        excess = np.where(reported > high, reported - high, np.where(reported < low, reported - low, 0.0))
    excess = np.where(np.isneginf(reported) & np.isneginf(view.low.min(axis=0)), 0.0, excess)
    left = np.maximum(0.0, np.abs(excess) - most_shift(scores.truth.vocab_size))
    ratios = np.sign(excess) * np.maximum(0.0, left - units) / scales
    nan = np.isnan(reported)
    ratios[nan], excess[nan] = np.nan, np.nan
    high, low = np.where(np.isfinite(high), high, 0.0), np.where(np.isfinite(low), low, -WIDEST)
    exact = log_density(np.abs(errors) / both, both)
    wide = np.hypot(both, np.minimum(high - low, WIDEST) / 2.0)
    moved = log_density(np.where(np.isfinite(errors), np.abs(errors), np.abs(excess)) / wide, wide)
    either = np.logaddexp(exact + math.log1p(-MOVED), moved + math.log(MOVED))  # the filters keep other tokens, or not
    likelihoods = np.where(nan, 0.0, np.where(low < high, either, exact))
    sizes = np.minimum(np.abs(excess), np.maximum(both, left)) / both
    return errors, ratios, sizes, likelihoods


def log_density(sizes: Float64, scales: Float64) -> Float64:
    """Of Student's t, at errors in units of their scales."""
    nu = FREEDOM
    constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
    with np.errstate(invalid="ignore", over="ignore"):
        density = constant - np.log(scales) - (nu + 1) / 2 * np.log1p(np.minimum(sizes, 1e150) ** 2 / nu)
    return np.asarray(np.maximum(np.where(np.isnan(density), EXCLUDED, density), EXCLUDED))
