"""What a reading leaves of a side: reported log-probabilities against exact ones, by Allowed (judging/allowed.py).

The scale of an error is that of all judgements (judging/noise.py), here of the reading's own distribution: with errors
d of the logits, log p[y] at temperature t is off by (d[y] - sum q[v] d[v]) / t. A rounding of the logits by up to half
a unit each moves it by up to (1 - p[y]) units. The error is what lies beyond [low, high], which a right engine may
report whose filters keep a token more or less (exact.py).

A reading explains a position that it leaves within Allowed, so no chance is computed here. N tokens of all rollouts in
the order of the file, R of one rollout, K emulated engines, J columns of a Truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.causes.groups import OFF
from lfm2np.oracle.judging.allowed import FLOAT32_UNITS, most_shift
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import DRAWS, FIRST, Noise, loosened
from lfm2np.oracle.judging.scored import Known, add_noises
from lfm2np.oracle.judging.verdict import LIMIT, root_mean_square
from lfm2np.oracle.rollouts.exact import AT, TOLERANCES, Scores, before_filters, joined, params_of
from lfm2np.oracle.total import MOST_SIZE
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
ROUNDED = 1e-6  # nats
MOST = 1e6  # units of the scale that a position counts for, where all are added


@dataclass(frozen=True, eq=False)
class Fit:
    """A side under one reading of an exact prediction, within a format. All arrays [N]."""

    format_name: str
    reading: str
    errors: Float64  # reported minus exact; NaN where nothing was reported
    ratios: Float64  # beyond a unit of the logits and what filters allow, in units of the scale
    sizes: Float64  # the error beyond what filters allow, in units of scale and unit together (allowed.py)

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

    The latter, and the logarithm of a sum in float32, do not shrink as p[y] goes to 1.
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
    low, high = (np.take_along_axis(bound, at, axis=0)[0] for bound in (view.low, view.high))
    if unfiltered:  # what scales an error if the filters keep other tokens
        loose, loose_units = scales_of(scores, noise, format_name, unfiltered)
        scales = np.where(low < high, np.maximum(scales, loose), scales)
        units = np.where(low < high, np.maximum(units, loose_units), units)
    with np.errstate(invalid="ignore"):
        errors = reported - view.logprobs
        excess = np.where(reported > high, reported - high, np.where(reported < low, reported - low, 0.0))
    excess = np.where(np.isneginf(reported) & np.isneginf(view.low.min(axis=0)), 0.0, excess)
    excess[np.isnan(reported)] = np.nan
    left = np.maximum(0.0, np.abs(excess) - most_shift(scores.truth.vocab_size))
    whole = np.hypot(scales, units / 2.0)
    ratios = np.sign(excess) * np.maximum(0.0, left - units) / scales
    return errors, ratios, np.minimum(np.abs(excess), np.maximum(whole, left)) / whole
