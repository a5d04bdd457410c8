"""The temperature that a side's log-probabilities were computed at, as a number: fitted to what it reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
FIRST = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)
WIDTHS = (0.1, 0.01)  # of the interval about the nearest, by turns
MOST = 1.0  # nats of a token's error that count
AS_NEAR = 1.1  # a temperature with fewer digits may leave so many times the error of the nearest
NO_DIFFERENCE = 1e-3  # a share of the temperature


def fitted_temperature(reported: Float64, logprobs_at: Callable[[Sequence[float]], Float64]) -> float:
    """The temperature that leaves the least sum of absolute errors, in as few digits as leave hardly more.

    reported     [N]
    logprobs_at  of K temperatures the exact [K, N]; between them they are interpolated in the inverse temperature,
                 which multiplies the logits
    """
    temperatures = np.array(FIRST)
    for width in (*WIDTHS, 0.0):
        table = logprobs_at(temperatures.tolist())
        fine = np.geomspace(temperatures[0], temperatures[-1], 401)
        errors = errors_at(fine, temperatures, table, reported)
        best = float(fine[np.argmin(errors)])
        if width:
            temperatures = best * (1.0 + width * np.linspace(-1.0, 1.0, 5))
    short = [round(best, digits) for digits in (1, 2, 3, 4)]
    inside = np.array([value for value in short if temperatures[0] <= value <= temperatures[-1]])
    near = errors_at(inside, temperatures, table, reported) <= AS_NEAR * errors.min()
    return float(inside[np.argmax(near)] if near.any() else short[-1])


def errors_at(wanted: Float64, nodes: Float64, table: Float64, reported: Float64) -> Float64:
    """[wanted] sums of absolute errors, with the log-probabilities [K, N] known at the nodes [K], ascending."""
    right = np.clip(np.searchsorted(nodes, wanted), 1, len(nodes) - 1)
    before, after = 1.0 / nodes[right - 1], 1.0 / nodes[right]
    share = ((1.0 / wanted - before) / (after - before))[:, None]
    with np.errstate(invalid="ignore"):
        exact = (1.0 - share) * table[right - 1] + share * table[right]
        errors = np.minimum(np.abs(reported - exact), MOST)
    known = ~np.isnan(reported)
    return np.asarray(np.where(np.isnan(errors), MOST, errors)[:, known].sum(axis=1))


def differs(temperature: float, other: float) -> bool:
    return not math.isclose(temperature, other, rel_tol=NO_DIFFERENCE)
