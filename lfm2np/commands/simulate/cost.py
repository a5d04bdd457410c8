"""How long a step takes, by what it computes: StepShape, and CostModel, a formula of it that is plain data.

    seconds = overhead + the largest of one or several sums of coefficient * feature

A feature is 1, a field of StepShape, or a part of one, as in "tokens[8:64]": as many of the tokens as a slice of them
would have. So a sum rises with each field, along straight pieces of any slopes. What is measured (fit.py) is one sum;
a roofline (presets.py) is the larger of two, what is computed and what is read from memory.

Times are whole nanoseconds: a clock that adds them is exact, and the same in whatever order it does so.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.errors import RequestError
from lfm2np.system import write_whole
from lfm2np.values import show_json
from scheduler import BatchPlan

Count = Any  # int, or for many steps at once an int64 array [steps]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on. Each field is one number, or an int64 array with one number a step."""

    tokens: Count  # that are computed, drafts included
    requests: Count  # that have tokens in it
    attended: Count  # pairs of a computed token and a position that it sees, itself included
    read: Count  # positions whose keys and values are read, once for each request
    sampled: Count  # tokens whose logits are computed
    checkpoints: Count  # states written beside a block that became full
    moved_blocks: Count  # copied, swapped out or in
    drafts: Count  # draft tokens that were proposed


FIELDS = tuple(each.name for each in fields(StepShape))
RANGED = ("tokens", "requests", "read")  # beyond the largest of these that were measured, a model only guesses
MOVES_OF_BLOCKS = frozenset(
    f"{verb}_{block}" for verb in ("copy", "save", "load") for block in ("block", "window_block")
)


def shape_of(plan: BatchPlan) -> StepShape:
    """Of one step. Drafts count as proposed if they stand in the plan."""
    tokens = attended = read = sampled = checkpoints = drafts = 0
    for entry in plan.scheduled:
        count = len(entry.token_ids)
        stop = entry.start + count
        tokens += count
        attended += pairs(count, stop)
        read += stop
        sampled += stop - entry.first_logits
        checkpoints += len(entry.checkpoints)
        drafts += entry.num_drafts
    moved = sum(move.kind in MOVES_OF_BLOCKS for move in plan.moves)
    return StepShape(tokens, len(plan.scheduled), attended, read, sampled, checkpoints, moved, drafts)


def pairs(count: int, stop: int) -> int:
    """Of the last `count` of `stop` positions and what each sees: the numbers from stop - count + 1 to stop, added."""
    return count * (2 * stop - count + 1) // 2


# --- the formula

CONSTANT = "1"
FEATURE = re.compile(rf"({'|'.join(FIELDS)})(?:\[([0-9]{{0,18}}):([0-9]{{0,18}})\])?")
NO_END = 2**63 - 1
LONGEST = float(2**62)  # nanoseconds, 146 years: what is longer takes as long
MOST_SECONDS = 1e9  # of a coefficient
NANOSECONDS = 1e9

Form = Mapping[str, float]  # seconds for each unit of a feature, by its name
Term = tuple[float, int, int, int]  # nanoseconds a unit; number of the field, first unit and number of units that count


@dataclass(frozen=True)
class FitErrors:
    """Of a model, on steps that it was not fitted to: relative, so 0.1 is a tenth of the measured time."""

    steps: int  # that were measured
    folds: int  # each was predicted from the others
    median: float  # of the absolute errors of single steps
    p90: float  # nine of ten are at most this
    total: float  # of the time of all of them, signed: below 0 where too short a time was predicted


@dataclass(frozen=True)
class CostModel:
    """See above. RequestError for an unknown feature, or a coefficient that is negative or no number."""

    name: str
    origin: str  # "measured on ..., by ..." or "published figures, not measured: ..."
    forms: tuple[Form, ...]
    overhead: float = 0.0  # seconds
    errors: FitErrors | None = None  # None: it was not fitted
    largest: Mapping[str, int] | None = None  # of RANGED, in the steps that it was fitted to; None: not known
    _sums: tuple[tuple[float, tuple[Term, ...]], ...] = field(init=False, repr=False, compare=False)
    _overhead: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.forms:
            raise RequestError(f"cost model {self.name!r}: forms []: expected at least one")
        seconds = _seconds(f"cost model {self.name!r}: overhead", self.overhead)
        object.__setattr__(self, "_sums", tuple(self._compile(form) for form in self.forms))
        object.__setattr__(self, "_overhead", seconds * NANOSECONDS)

    def _compile(self, form: Form) -> tuple[float, tuple[Term, ...]]:
        constant, terms = 0.0, []
        for feature, value in form.items():
            nanoseconds = _seconds(f"cost model {self.name!r}: {feature}", value) * NANOSECONDS
            if feature == CONSTANT:
                constant = nanoseconds
            else:
                terms.append((nanoseconds, *parse_feature(feature)))
        return constant, tuple(terms)

    def nanoseconds(self, shape: StepShape) -> int:
        """Of one step, at least 1."""
        values, longest = VALUES(shape), 0.0
        for total, terms in self._sums:
            for coefficient, index, first, most in terms:
                units = values[index] - first
                if units > 0:
                    total += coefficient * (units if units < most else most)
            if total > longest:
                longest = total
        return max(1, round(min(self._overhead + longest, LONGEST)))

    def nanoseconds_of(self, shapes: StepShape) -> NDArray[np.int64]:
        """Of many steps, [steps]: the numbers that `nanoseconds` gives, bit for bit.

        For the same multiplications and additions follow one another: an int64 is rounded to the nearest float64 by
        both, adding a product that is 0 changes nothing, and both round to the nearest even integer.
        """
        values = VALUES(shapes)
        longest = np.zeros(len(values[0]))
        for constant, terms in self._sums:
            total = np.full(len(longest), constant)
            for coefficient, index, first, most in terms:
                total += coefficient * part(values[index], first, most)
            longest = np.maximum(longest, total)
        rounded = np.rint(np.minimum(self._overhead + longest, LONGEST)).astype(np.int64)
        return np.maximum(rounded, 1)

    def is_beyond(self, shape: StepShape) -> Any:
        """Whether a step is larger than any that was measured, or an array with that of each; False if not known."""
        if self.largest is None:
            return False
        limits = ((getattr(shape, name), self.largest[name]) for name in RANGED)
        return functools.reduce(operator.or_, (value > limit for value, limit in limits))

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "version": VERSION,
            "name": self.name,
            "origin": self.origin,
            "overhead": self.overhead,
            "forms": [dict(form) for form in self.forms],
            "errors": None if self.errors is None else asdict(self.errors),
            "largest": None if self.largest is None else dict(self.largest),
        }

    def write(self, path: str | Path) -> None:
        """As JSON that read_cost_model reads. RequestError if the file can't be written."""
        write_whole(path, json.dumps(self.as_json(), indent=2) + "\n")


VALUES = attrgetter(*FIELDS)


def parse_feature(feature: str) -> tuple[int, int, int]:
    """Number of the field, its first unit and the number of units that count. RequestError for another name."""
    match = FEATURE.fullmatch(feature)
    first = int((match and match[2]) or 0)
    end = int((match and match[3]) or NO_END)
    if match is None or first >= end:
        raise RequestError(
            f"feature {feature!r}: expected 1, one of {', '.join(FIELDS)}, or a part, as in tokens[8:64]"
        )
    return FIELDS.index(match[1]), first, end - first


def part(counts: Count, first: int, most: int) -> Count:
    """How many of each number's units count."""
    return counts if first == 0 and most == NO_END else np.clip(counts - first, 0, most)


def amounts(features: Sequence[str], shapes: StepShape) -> NDArray[np.float64]:
    """How much of each feature each step has, [steps, features]."""
    values = VALUES(shapes)
    columns = np.ones((len(values[0]), len(features)))
    for column, feature in enumerate(features):
        if feature != CONSTANT:
            index, first, most = parse_feature(feature)
            columns[:, column] = part(values[index], first, most)
    return columns


def _seconds(what: str, value: object) -> float:
    if type(value) not in (int, float) or not 0.0 <= value <= MOST_SECONDS:  # type: ignore[operator]
        raise RequestError(f"{what} {show_json(value)}: expected seconds, at least 0")
    return float(value)  # type: ignore[arg-type]


# --- its file

KIND, VERSION = "cost model", 1
NAMES = ("kind", "version", "name", "origin", "overhead", "forms", "errors", "largest")


def read_cost_model(path: str | Path) -> CostModel:
    """RequestError, one line with file, field, value and what was expected, for anything else than `write` writes."""
    text = read_text(path)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"{path}: invalid JSON: {problem}") from None
    try:
        return _from_json(raw)
    except RequestError as problem:
        raise RequestError(f"{path}: {problem}") from None


def read_text(path: str | Path) -> str:
    """RequestError for what can't be read, or is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8"
        raise RequestError(f"{path}: can't be read: {reason or problem}") from None


def _from_json(raw: Any) -> CostModel:
    require_names("a cost model", raw, NAMES)
    for name, expected in (("kind", KIND), ("version", VERSION)):
        if type(raw[name]) is not type(expected) or raw[name] != expected:
            raise RequestError(f"{name} {show_json(raw[name])}: expected {expected}")
    for name in ("name", "origin"):
        if not isinstance(raw[name], str):
            raise RequestError(f"{name} {show_json(raw[name])}: expected a string")
    forms = raw["forms"]
    if not isinstance(forms, list) or not all(isinstance(form, dict) for form in forms):
        raise RequestError(f"forms {show_json(forms)}: expected a list of objects, seconds by feature")
    errors = None if raw["errors"] is None else _errors_from_json(raw["errors"])
    largest = None if raw["largest"] is None else _largest_from_json(raw["largest"])
    return CostModel(raw["name"], raw["origin"], tuple(forms), raw["overhead"], errors, largest)


def _largest_from_json(raw: Any) -> dict[str, int]:
    require_names("largest", raw, RANGED)
    for name in RANGED:
        if type(raw[name]) is not int or raw[name] < 0:
            raise RequestError(f"largest: {name} {show_json(raw[name])}: expected a whole number, at least 0")
    return dict(raw)


def _errors_from_json(raw: Any) -> FitErrors:
    require_names("errors", raw, tuple(each.name for each in fields(FitErrors)))
    for name in ("steps", "folds"):
        if type(raw[name]) is not int or raw[name] < 0:
            raise RequestError(f"errors: {name} {show_json(raw[name])}: expected a whole number, at least 0")
    for name in ("median", "p90", "total"):
        if type(raw[name]) not in (int, float) or not math.isfinite(raw[name]):
            raise RequestError(f"errors: {name} {show_json(raw[name])}: expected a number")
    return FitErrors(**raw)


def require_names(what: str, raw: Any, names: Sequence[str]) -> None:
    """RequestError unless it is an object with exactly these fields."""
    if not isinstance(raw, dict):
        raise RequestError(f"{what}: {show_json(raw)}: expected an object with {', '.join(names)}")
    for name in raw:
        if name not in names:
            raise RequestError(f"{what}: unknown field {name!r}: expected {', '.join(names)}")
    for name in names:
        if name not in raw:
            raise RequestError(f"{what}: no field {name!r}: expected {', '.join(names)}")
