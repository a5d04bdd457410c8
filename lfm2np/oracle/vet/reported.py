"""Reported log-probabilities as evidence: how likely each is under a hypothesis, given its rounding error.

A value may be raw, or that after temperature and filters, and the rounding error of an engine may be some times what
emulated engines have: a hypothesis is given the best of these, a bet against it the mean. Errors have heavy tails
(Student's t), and those of one answer are not independent: half of the logarithm counts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.vet.likelihoods import LEAST_SCALE, Likelihoods

Float64 = NDArray[np.float64]
DEGREES = 4.0
COUNTED = 0.5  # of the logarithm
RIGHT = tuple(2.0 ** (step / 4.0) for step in range(-4, 5))  # times the emulated engines' rounding error
OTHER = (4.0, 8.0, 32.0, 128.0)  # times it: no right engine has so much
SCALES = (*RIGHT, *OTHER)
PLAIN, WIDE = (slice(None), slice(0, len(RIGHT))), (slice(None), slice(len(RIGHT), None))


def log_densities(answer: Likelihoods, pair: int, number: int, temperature: float) -> Float64:
    """[2, scales, R] of the reported values, raw and processed; 0 where nothing was reported."""
    densities = np.zeros((2, len(SCALES), len(answer)))
    known = np.isfinite(answer.reported)
    if answer.scales is None or not known.any():
        return densities
    scale = answer.scales[pair]
    processed = np.maximum(answer.logprobs[number], -1e3)
    for mode, (expected, spread) in enumerate(
        ((answer.raw[pair], scale), (processed, np.hypot(scale / temperature, LEAST_SCALE)))
    ):
        errors = (answer.reported - expected)[known]
        for index, factor in enumerate(SCALES):
            densities[mode, index, known] = COUNTED * log_student(errors, factor * spread[known])
    return densities


def log_student(errors: Any, scales: Any) -> Float64:
    """Student's t of so many degrees, with these scales; without the constant, which is the same for all."""
    return np.asarray(-np.log(scales) - (DEGREES + 1.0) / 2.0 * np.log1p((errors / scales) ** 2 / DEGREES))


def log_mean(logarithms: Float64) -> Float64:
    """[N] of the mean over the first two axes."""
    largest = logarithms.max(axis=(0, 1))
    return np.asarray(largest + np.log(np.exp(logarithms - largest).mean(axis=(0, 1))))


def expected_gain(distance: Float64) -> Float64:
    """What one value adds to the capital against a hypothesis that is so many scales off, on the average."""
    at = np.array([math.sqrt(2.0) * _inverse_erf(2.0 * (k + 0.5) / 32 - 1.0) for k in range(32)])
    gain = log_student(at, 1.0) - log_student(at + np.asarray(distance)[..., None], 1.0)
    return np.asarray(COUNTED * gain.mean(axis=-1))


def _inverse_erf(x: float) -> float:
    """By halving: 32 values are needed once."""
    low, high = -6.0, 6.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if math.erf(middle) < x else (low, middle)
    return low
