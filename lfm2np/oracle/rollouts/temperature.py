"""The temperature that a side's log-probabilities were computed at, as a number: fitted to what it reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.work.place import Place
from lfm2np.oracle.rollouts.exact import AT, Scores, joined, params_of
from lfm2np.oracle.rollouts.hypotheses import Hypothesis, prediction_of

Float64 = NDArray[np.float64]
FIRST = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)
WIDTHS = (0.1, 0.01)  # of the interval about the nearest, by turns
MOST = 1.0  # nats of a token's error that count
AS_NEAR = 1.1  # a temperature with fewer digits may leave so many times the error of the nearest
NO_DIFFERENCE = 1e-3  # a share of the temperature


def other_temperatures(
    model: LoadedModel, scores: Sequence[Scores], reported: Float64, place: Place
) -> list[Hypothesis]:
    """By reading, the temperature that brings the exact values nearest to a side's [N], if the file states another."""
    samplings = [each.rollout.sampling for each in scores]

    def logprobs_at(name: str, temperatures: Sequence[float]) -> Float64:
        readings = tuple(f"{name}{AT}{temperature!r}" for temperature in temperatures)
        found = prediction_of(model, scores, Hypothesis(name, readings=readings), readings, place) or ()
        return np.array([joined(each.views[reading].logprobs for each in found) for reading in readings])

    has_filters = any(params_of("processed", each) != params_of("tempered", each) for each in samplings)
    hypotheses = []
    for name in ("tempered", "processed") if has_filters else ("tempered",):
        temperature = fitted_temperature(reported, partial(logprobs_at, name))
        stated = {1.0, *(each.temperature for each in samplings)}
        if not any(math.isclose(temperature, each, rel_tol=NO_DIFFERENCE) for each in stated):
            words = f"a temperature of {temperature:g} other than the stated one"
            hypotheses.append(Hypothesis(words, readings=(f"{name}{AT}{temperature:g}",)))
    return hypotheses


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
