"""A cost model from measured steps: coefficients that are not negative, chosen for small relative errors.

A machine that others use too now and then takes much longer for a step. So errors count by their size, not by its
square (as a median is to a mean); what that leaves out of the sum is put back by one factor at the end, since a
simulation adds many steps. Which features a model has, and what its errors are, is seen on steps that it was not fitted
to: each contiguous fold is predicted from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lfm2np.commands.simulate.cost import CONSTANT, RANGED, CostModel, FitErrors, StepShape, amounts
from lfm2np.commands.simulate.steps import MeasuredSteps
from lfm2np.errors import RequestError

Float64 = NDArray[np.float64]

FOLDS = 5
ROUNDS = 30  # of weights
SAME = 1e-3  # a relative change of every coefficient that ends them
NEAR = 0.01  # a relative error below it counts by its square
MOST_RATIO = 3.0  # of a step's time to the predicted one: what is beyond is not put back
WORTH = 0.95  # a model with more features has to have errors at most so large

LEAST = 10  # steps that a piece of the tokens needs beyond its beginning: else the piece before it has no end

REST = (CONSTANT, "requests", "read", "attended", "sampled", "checkpoints", "moved_blocks", "drafts")
CANDIDATES = (  # where the slope of the tokens may change, and the other features; the simplest first
    ((), (CONSTANT, "requests", "attended", "read")),
    ((), REST),
    ((8, 64, 512, 4096), REST),
    (tuple(2**power for power in range(1, 14)), ("requests[1:4]", "sampled[1:8]", *REST)),
)


def fit(steps: MeasuredSteps, name: str, origin: str, folds: int = FOLDS) -> CostModel:
    """The model of those features that predict best, with its errors. RequestError for too few steps.

    A feature that no step has costs nothing: measure steps that have what a simulation is about.
    """
    if len(steps) < 2 * folds:
        raise RequestError(f"{len(steps)} measured steps: expected at least {2 * folds}, for {folds} folds")
    candidates = [(*pieces(steps.shapes.tokens, bends), *rest) for bends, rest in CANDIDATES]
    tried = [(features, cross_validated(steps, features, folds)) for features in candidates]
    features, errors = tried[0]
    for more, errors_of_more in tried[1:]:
        if score(errors_of_more) < WORTH * score(errors):
            features, errors = more, errors_of_more
    largest = {name: int(getattr(steps.shapes, name).max()) for name in RANGED}
    return CostModel(name, origin, (fitted(steps, features),), errors=errors, largest=largest)


def pieces(tokens: NDArray[np.int64], bends: Sequence[int]) -> tuple[str, ...]:
    """The tokens cut where their slope may change, as far as steps have so many; the last piece has no end."""
    ends = [bend for bend in bends if int((tokens > bend).sum()) >= LEAST]
    return tuple(f"tokens[{first}:{end}]" for first, end in pairwise(["", *ends, ""])) if ends else ("tokens",)


def score(errors: FitErrors) -> float:
    """By which models are compared: the smaller, the better."""
    return errors.median + errors.p90 / 4


def fitted(steps: MeasuredSteps, features: Sequence[str]) -> dict[str, float]:
    """Seconds for each unit of those features that cost any."""
    columns = amounts(features, steps.shapes)
    coefficients = robust_fit(columns, steps.seconds)
    coefficients *= put_back(columns @ coefficients, steps.seconds)
    return {feature: float(value) for feature, value in zip(features, coefficients, strict=True) if value > 0.0}


def put_back(predicted: Float64, seconds: Float64) -> float:
    """The factor that makes the predicted times add up to the measured ones, single freaks left out."""
    total = float(predicted.sum())
    return float(np.minimum(seconds, MOST_RATIO * predicted).sum()) / total if total > 0.0 else 1.0


def robust_fit(columns: Float64, seconds: Float64) -> Float64:
    """Coefficients >= 0 for the smallest sum of |relative errors|: least squares with weights that follow them.

    columns  [steps, features] >= 0
    seconds  [steps] > 0
    """
    relative = columns / seconds[:, None]
    weights = np.ones(len(seconds))
    coefficients = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        before, coefficients = coefficients, nonnegative_least_squares(relative * root[:, None], root)
        if (np.abs(coefficients - before) <= SAME * coefficients).all():
            break
        weights = 1.0 / np.maximum(np.abs(relative @ coefficients - 1.0), NEAR)
    return coefficients


def nonnegative_least_squares(matrix: Float64, target: Float64) -> Float64:
    """x >= 0 with the smallest |matrix @ x - target|. [rows, n], [rows] -> [n]

    Columns join, the most wanted first, and leave where one would become negative. Source: Lawson and Hanson, "Solving
    Least Squares Problems" (1974), algorithm NNLS; by the normal equations of columns of length 1, as `matrix` has many
    rows and is solved for again and again.
    """
    lengths = np.sqrt((matrix * matrix).sum(axis=0))
    lengths[lengths == 0.0] = 1.0
    normal = (matrix.T @ matrix) / np.outer(lengths, lengths)
    projected = (matrix.T @ target) / lengths
    count = len(projected)
    x, active = np.zeros(count), np.zeros(count, bool)
    tolerance = 1e-10 * float(np.abs(projected).max(initial=0.0))
    for _ in range(10 * count):
        wanted = projected - normal @ x
        wanted[active] = -np.inf
        if wanted.max() <= tolerance:
            break
        active[int(wanted.argmax())] = True
        while True:
            best = np.zeros(count)
            best[active] = np.linalg.lstsq(normal[np.ix_(active, active)], projected[active], rcond=1e-12)[0]
            negative = active & (best <= 0.0)
            if not negative.any():
                x = best
                break
            step = float((x[negative] / np.maximum(x[negative] - best[negative], 1e-300)).min())
            x = x + step * (best - x)
            active &= x > 1e-15
            x[~active] = 0.0
    solution: Float64 = x / lengths
    return solution


# --- errors on steps that a model has not seen


def cross_validated(steps: MeasuredSteps, features: Sequence[str], folds: int = FOLDS) -> FitErrors:
    """Of a model of these features, each fold predicted from the others."""
    predicted = np.zeros(len(steps))
    for fold in np.array_split(np.arange(len(steps)), folds):
        rest = np.ones(len(steps), bool)
        rest[fold] = False
        form = fitted(chosen(steps, rest), features)
        predicted[fold] = amounts(tuple(form), chosen(steps, ~rest).shapes) @ np.array(list(form.values()))
    return errors_of(predicted, steps.seconds, folds)


def chosen(steps: MeasuredSteps, which: NDArray[np.bool_]) -> MeasuredSteps:
    """Those steps. which: [steps]"""
    shapes = StepShape(*(getattr(steps.shapes, name)[which] for name in steps.shapes.__slots__))
    return MeasuredSteps(shapes, steps.seconds[which])


def errors_of(predicted: Float64, seconds: Float64, folds: int) -> FitErrors:
    """Of predicted times [steps], against the measured ones."""
    relative = np.abs(predicted / seconds - 1.0)
    return FitErrors(
        steps=len(seconds),
        folds=folds,
        median=float(np.median(relative)),
        p90=float(np.quantile(relative, 0.9)),
        total=float(predicted.sum() / seconds.sum() - 1.0),
    )


def errors_on(model: CostModel, steps: MeasuredSteps) -> FitErrors:
    """Of a model on other steps than those it was fitted to."""
    return errors_of(model.nanoseconds_of(steps.shapes) / 1e9, steps.seconds, 0)
