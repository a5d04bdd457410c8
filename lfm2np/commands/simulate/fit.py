"""A cost model from measured steps, by least squares.

Relative errors are minimized: a step that took very long because of something else then has little weight. Coefficients
that come out negative are left out, one after another. The errors that a model reports are those on steps that it was
not fitted to: each fifth of the run is predicted from the others.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.commands.simulate.cost import CONSTANT, CostModel, StepShape, amount, parse_feature, read_text, shape_of
from lfm2np.errors import RequestError
from lfm2np.values import show
from scheduler import BatchPlan, Move, ScheduledTokens, TraceError, read_lines

FOLDS, LEAST = 5, 10  # LEAST: steps that a slope needs beyond its beginning
WORTH = 0.95  # a model with several slopes has to have errors at most so large
BENDS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens at which the slope may change
REST = (CONSTANT, "requests", "attended", "read", "sampled", "checkpoints", "moved_blocks")
MOST_RATIO = 3.0  # of a step's time to the predicted one: what is beyond came from something else
NEEDED = ("tokens", "requests", "read", "seconds")


class MeasuredSteps(NamedTuple):
    """In the order in which they ran: shapes as int64 arrays [steps], and seconds [steps] float64, above 0."""

    shapes: StepShape
    seconds: NDArray[np.float64]

    def chosen(self, which: Any) -> MeasuredSteps:
        return MeasuredSteps(StepShape(*(column[which] for column in self.shapes)), self.seconds[which])


def fit(steps: MeasuredSteps, name: str, origin: str) -> CostModel:
    """RequestError for too few steps. What no step has costs nothing: measure what a simulation is about."""
    if len(steps.seconds) < 2 * FOLDS:
        raise RequestError(f"{len(steps.seconds)} measured steps: expected at least {2 * FOLDS}")
    tokens = steps.shapes.tokens
    ends = [bend for bend in BENDS if int((tokens > bend).sum()) >= LEAST]
    several = [f"tokens[{first}:{end}]" for first, end in pairwise(["", *ends, ""])]
    features, errors = ["tokens", *REST], cross_validated(steps, ["tokens", *REST])
    if ends and (bent := cross_validated(steps, [*several, *REST]))["median"] < WORTH * errors["median"]:
        features, errors = [*several, *REST], bent
    largest = {field: int(getattr(steps.shapes, field).max()) for field in ("tokens", "requests", "read")}
    return CostModel(name, origin, (least_squares(steps, features),), errors=errors, largest=largest)


def cross_validated(steps: MeasuredSteps, features: Sequence[str]) -> dict[str, float]:
    """The errors of each fold, predicted from the others."""
    columns, predicted = amounts(features, steps.shapes), np.zeros(len(steps.seconds))
    for fold in np.array_split(np.arange(len(predicted)), FOLDS):
        rest = np.ones(len(predicted), bool)
        rest[fold] = False
        form = least_squares(steps.chosen(rest), features)
        predicted[fold] = columns[fold] @ np.array([form.get(feature, 0.0) for feature in features])
    return errors_of(predicted, steps.seconds)


def least_squares(steps: MeasuredSteps, features: Sequence[str]) -> dict[str, float]:
    """Seconds for each unit of those features that cost any; predicted times add up to the measured ones."""
    columns, kept = amounts(features, steps.shapes), list(range(len(features)))
    while True:
        relative = columns[:, kept] / steps.seconds[:, None]
        scale = np.maximum(np.sqrt((relative**2).sum(axis=0)), 1e-300)  # columns of one length, for a stable solution
        solution = np.linalg.lstsq(relative / scale, np.ones(len(steps.seconds)), rcond=1e-9)[0]
        if (solution >= 0.0).all():
            break
        del kept[int(solution.argmin())]
    coefficients = solution / scale
    predicted = columns[:, kept] @ coefficients
    coefficients *= np.minimum(steps.seconds, MOST_RATIO * predicted).sum() / predicted.sum()
    return {features[index]: float(value) for index, value in zip(kept, coefficients, strict=True) if value > 0.0}


def amounts(features: Sequence[str], shapes: StepShape) -> NDArray[np.float64]:
    """How much of each feature each step has, [steps, features]."""
    ones = np.ones(len(shapes.tokens))
    columns = [ones if name == CONSTANT else amount(shapes, *parse_feature(name)) for name in features]
    return np.stack(columns, axis=1).astype(np.float64)


def errors_of(predicted: NDArray[np.float64], seconds: NDArray[np.float64]) -> dict[str, float]:
    """Relative to the measured times: the median and nine of ten of the absolute errors; that of the sum, signed."""
    relative = np.abs(predicted / seconds - 1.0)
    total = float(predicted.sum() / seconds.sum() - 1.0)
    median, p90 = np.quantile(relative, (0.5, 0.9)).tolist()
    return {"steps": len(seconds), "median": median, "p90": p90, "total": total}


# --- measured steps


def read_steps(path: str | Path) -> MeasuredSteps:
    """Of a schedule trace, or of a CSV with these names in its first line:

    tokens, requests, read (or `context`), seconds    needed
    attended, sampled, checkpoints, moved_blocks      left out: the first two are estimated, the others 0

    A trace's seconds are those of the computation, without what is done between two steps. RequestError with file and
    line for anything else, and for a file without steps.
    """
    text = read_text(path)
    try:
        steps = list(steps_of_trace(text) if '"kind"' in text[:200] else steps_of_csv(text))
    except (RequestError, TraceError) as problem:
        raise RequestError(f"{path}: {problem}") from None
    except csv.Error as problem:
        raise RequestError(f"{path}: {problem}: expected measured steps, as CSV or a trace of a schedule") from None
    if not steps:
        raise RequestError(f"{path}: no measured steps: expected at least one")
    return gathered(steps)


def gathered(steps: Sequence[tuple[StepShape, float]]) -> MeasuredSteps:
    shapes = np.array([shape for shape, _ in steps], np.int64).T
    return MeasuredSteps(StepShape(*shapes), np.array([seconds for _, seconds in steps]))


def steps_of_csv(text: str) -> Iterator[tuple[StepShape, float]]:
    reader = csv.DictReader(io.StringIO(text.strip()), strict=True)
    for row in reader:
        where = f"line {reader.line_num}"
        known = {"read" if name == "context" else name: value for name, value in row.items() if name}
        if None in row or not set(NEEDED) <= set(known) <= {*StepShape._fields, "seconds"}:
            optional = "attended, sampled, checkpoints, moved_blocks"
            raise RequestError(f"{where}: {', '.join(known)}: expected {', '.join(NEEDED)}; optional: {optional}")
        numbers = {name: number_of(where, name, value) for name, value in known.items()}
        seconds, counts = numbers.pop("seconds"), {name: int(value) for name, value in numbers.items()}
        tokens, requests, read = (counts[name] for name in NEEDED[:3])
        if not requests <= tokens <= read or bool(tokens) != bool(requests):
            name = "context" if "context" in row else "read"
            raise RequestError(f"{where}: expected requests {requests} <= tokens {tokens} <= {name} {read}")
        # As if all requests were equally long and each sampled one token: right for decodes, and for a single prompt.
        attended = tokens * (2 * read - tokens + requests) // (2 * requests) if requests else 0
        shape = {**dict.fromkeys(StepShape._fields, 0), "attended": attended, "sampled": requests, **counts}
        yield StepShape(**shape), seconds


def number_of(where: str, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = -1.0
    if not (0 < value < 1e9 if name == "seconds" else value % 1 == 0 <= value < 2**53):
        expected = "seconds above 0" if name == "seconds" else "a whole number, at least 0"
        raise RequestError(f"{where}: {name} {show(text)}: expected {expected}")
    return value


def steps_of_trace(text: str) -> Iterator[tuple[StepShape, float]]:
    """Also of a run that broke off: the steps before that are as good."""
    for number, line in read_lines(text.splitlines(), is_whole=False):
        if line["kind"] == "step":
            try:
                plan = line["plan"]
                entries = tuple(ScheduledTokens(**entry) for entry in plan["scheduled"])
                shape = shape_of(
                    BatchPlan(plan["step"], tuple(Move(**move) for move in plan["moves"]), entries, (), ())
                )
                seconds = float(line["seconds"])
            except (TypeError, KeyError, AttributeError, ValueError) as problem:
                raise RequestError(f"line {number}: not a measured step: {problem}") from None
            if shape.tokens and seconds > 0:
                yield shape, seconds
