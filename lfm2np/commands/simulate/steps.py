"""Measured steps: what each computed, and how long it took. From a file of any engine, or from a trace of ours."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.commands.simulate.cost import FIELDS, StepShape, read_text, shape_of
from lfm2np.errors import RequestError
from lfm2np.values import show_json
from scheduler import BatchPlan, Move, ScheduledTokens, TraceError, read_lines

SECONDS, CONTEXT = "seconds", "context"  # `context` is another name for `read`
NEEDED = ("tokens", "requests", "read", SECONDS)
MOST = 2**53  # of a count: floats hold it


@dataclass(frozen=True, eq=False)
class MeasuredSteps:
    """In the order in which they ran.

    shapes   int64 arrays [steps]
    seconds  [steps] float64, above 0
    """

    shapes: StepShape
    seconds: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.seconds)


def gathered(steps: Sequence[tuple[StepShape, float]]) -> MeasuredSteps:
    """Single steps as arrays."""
    columns = [np.array([getattr(shape, name) for shape, _ in steps], np.int64) for name in FIELDS]
    return MeasuredSteps(StepShape(*columns), np.array([seconds for _, seconds in steps], np.float64))


def read_steps(path: str | Path) -> MeasuredSteps:
    """Of a schedule trace, of JSON lines, or of a CSV with the same names in its first line:

    tokens, requests, read (or `context`), seconds           needed
    attended, sampled, checkpoints, moved_blocks, drafts     see StepShape; `estimated` says what stands for the first
                                                             two if they are not there, the others are then 0

    A trace's seconds are those of the computation: what is done between two steps is not in them. RequestError, one
    line with file and line, for anything else, and for a file without steps.
    """
    text = read_text(path)
    try:
        steps = list(_steps(text))
    except (RequestError, TraceError) as problem:
        raise RequestError(f"{path}: {problem}") from None
    if not steps:
        raise RequestError(f"{path}: no measured steps: expected at least one")
    return gathered(steps)


def _steps(text: str) -> Iterator[tuple[StepShape, float]]:
    if not text.lstrip().startswith("{"):
        yield from _rows_of_csv(text)
    elif _is_trace(text):
        yield from _steps_of_trace(text.splitlines())
    else:
        yield from _rows_of_json(text.splitlines())


def _is_trace(text: str) -> bool:
    try:
        first = json.loads(text.lstrip().split("\n", 1)[0])
    except (ValueError, RecursionError):
        return False  # the reader of its lines says what is wrong
    return isinstance(first, dict) and "kind" in first


def _rows_of_json(lines: Sequence[str]) -> Iterator[tuple[StepShape, float]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise RequestError(f"line {number}: invalid JSON: {problem}") from None
        if not isinstance(row, dict):
            raise RequestError(f"line {number}: {show_json(row)}: expected an object")
        yield _in_line(number, row)


def _rows_of_csv(text: str) -> Iterator[tuple[StepShape, float]]:
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        for name in names:
            if names.count(name) > 1:
                raise RequestError(f"line 1: column {name!r} comes {names.count(name)} times: expected once")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                raise RequestError(f"line {reader.line_num}: {len(cells)} columns: expected {len(names)}, as in line 1")
            yield _in_line(
                reader.line_num, {name: number_or_text(cell) for name, cell in zip(names, cells, strict=True)}
            )
    except csv.Error as problem:
        raise RequestError(f"line {reader.line_num}: not a CSV: {problem}") from None


def number_or_text(cell: str) -> int | float | str:
    """The number that a text is, or the text."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


def _in_line(number: int, row: Mapping[str, object]) -> tuple[StepShape, float]:
    try:
        return _step(row)
    except RequestError as problem:
        raise RequestError(f"line {number}: {problem}") from None


def _step(row: Mapping[str, object]) -> tuple[StepShape, float]:
    names = (*FIELDS, CONTEXT, SECONDS)
    for name in row:
        if name not in names:
            raise RequestError(f"unknown field {name!r}: expected {', '.join(names)}")
    if CONTEXT in row:
        if "read" in row:
            raise RequestError("both 'context' and 'read': expected one of these names for the same")
        row = {"read": row[CONTEXT], **row}
    for name in NEEDED:
        if name not in row:
            missing = CONTEXT if name == "read" else name
            raise RequestError(f"no field {missing!r}: expected tokens, requests, context and seconds")
    counts = {name: _count(name, row[name]) for name in FIELDS if name in row}
    if counts["tokens"] < counts["requests"] or (counts["tokens"] and not counts["requests"]):
        raise RequestError(
            f"tokens {counts['tokens']}: expected at least one for each of {counts['requests']} requests"
        )
    if counts["read"] < counts["tokens"]:
        raise RequestError(f"read {counts['read']}: expected at least the {counts['tokens']} tokens themselves")
    return StepShape(**{**dict.fromkeys(FIELDS, 0), **estimated(counts), **counts}), _seconds(row[SECONDS])


def _count(name: str, value: object) -> int:
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= MOST:
        raise RequestError(f"{name} {show_json(value)}: expected a whole number, at least 0")
    return value


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0.0 < value < math.inf:  # type: ignore[operator]
        raise RequestError(f"seconds {show_json(value)}: expected a number above 0")
    return float(value)  # type: ignore[arg-type]


def estimated(counts: Mapping[str, int]) -> dict[str, int]:
    """What a log may leave out: as if all requests were equally long, and each sampled one token.

    That is right for a step of decodes, and for one of a single prompt.
    """
    tokens, requests, read = (counts[name] for name in ("tokens", "requests", "read"))
    attended = tokens * (2 * read - tokens + requests) // (2 * requests) if requests else 0
    return {"attended": attended, "sampled": requests}


# --- a trace of ours


def _steps_of_trace(lines: Sequence[str]) -> Iterator[tuple[StepShape, float]]:
    """Also of a run that broke off: the steps before that are as good."""
    for number, line in read_lines(lines, is_whole=False):
        if line["kind"] != "step":
            continue
        try:
            shape = shape_of(_plan(line["plan"]))
            seconds = _seconds(line["seconds"])
        except (RequestError, TypeError, KeyError, AttributeError) as problem:
            raise RequestError(f"line {number}: not a measured step: {problem}") from None
        if shape.tokens:
            yield shape, seconds


def _plan(raw: Mapping[str, Any]) -> BatchPlan:
    """Of its JSON, as far as shape_of reads it."""
    moves = tuple(Move(**move) for move in raw["moves"])
    return BatchPlan(raw["step"], moves, tuple(ScheduledTokens(**entry) for entry in raw["scheduled"]), (), ())
