"""A run as JSON lines: enough to replay it without the model, and to redraw it.

    {"kind": "header", "version": 4, "config": {...}, ...}
    {"kind": "add", "request": {...}, "forks": [{...}, ...]}
    {"kind": "finish", "request_id": "...", "reason": "abort" | "stop" | "error"}
    {"kind": "fork", "parent": "...", "child": {...}}
    {"kind": "preempt", "request_id": "..."}
    {"kind": "step", "plan": {...}, "drafts": {"id": [7, 9]}, "tokens": {"id": [7, 8]}, "errors": [...],
     "finished": {"id": "stop"}, "waiting": 3, "running": 5, "free_blocks": 17, "seconds": 0.01}
    {"kind": "detail", ...}: what the step before computed, for drawings; a replay passes it over
    {"kind": "end", "lines": 12}: that stand before it

Each has a checksum in `sha256` (checksum.py), unless the header says "checksums": false: for traces that are written by
hand, or by another scheduler. Without its end a trace was cut off, or its run was.

`drafts` are those offered; the plan holds those that fitted, `tokens` those accepted and one more. The lines stand in
the order of the calls, so replaying is making the same calls: `replay` does, and compares each plan
and who finished with what was recorded. Seconds are the only thing in it that another run may change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TextIO

from scheduler.checksum import FIELD, damage, sealed
from scheduler.config import SchedulerConfig
from scheduler.errors import SchedulerError, TraceError
from scheduler.plan import BatchPlan
from scheduler.request import FinishReason, Request
from scheduler.scheduler import Scheduler

VERSION = 4
HEADER = {"kind", "version", "config"}
MORE = {"checksums", "model", "numerics", "seed", "blas_kernel", FIELD}  # what a header may have beside these
WINDOW = {"sliding_window", "num_window_blocks"}  # what the config of a model with windowed layers has beside the rest
REQUEST = [each.name for each in fields(Request) if each.init]  # what a line has of a request, in this order
LONGEST = 200  # characters of a value in a message


class TraceWriter:
    """Writes lines as things happen; each is whole, or not there. `end` writes the last."""

    def __init__(self, file: TextIO, config: SchedulerConfig, extra: Mapping[str, Any] | None = None) -> None:
        self._file, self._lines = file, 0
        _require_names("header", {*HEADER, *(extra or {})}, HEADER, MORE)
        self._write({"kind": "header", "version": VERSION, "config": config_as_json(config), **(extra or {})})

    def add(self, request: Request, forks: Sequence[Request]) -> None:
        line = {"kind": "add", "request": request_as_json(request), "forks": list(map(request_as_json, forks))}
        self._write(line)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        self._write({"kind": "finish", "request_id": request_id, "reason": reason.value})

    def fork(self, parent_id: str, child: Request) -> None:
        self._write({"kind": "fork", "parent": parent_id, "child": request_as_json(child)})

    def preempt(self, request_id: str) -> None:
        self._write({"kind": "preempt", "request_id": request_id})

    def step(
        self,
        plan: BatchPlan,
        drafts: Mapping[str, Sequence[int]],
        tokens: Mapping[str, Sequence[int]],
        errors: Sequence[str],
        finished: Mapping[str, str],
        state: tuple[int, int, int],
        seconds: float | None,
    ) -> None:
        """`finished` by `reasons`; `state` after it: waiting and running requests, free blocks."""
        waiting, running, free_blocks = state
        self._write(
            {
                "kind": "step",
                "plan": plan_as_json(plan),
                "drafts": {name: list(ids) for name, ids in drafts.items()},
                "tokens": {name: list(ids) for name, ids in tokens.items()},
                "errors": list(errors),
                "finished": dict(finished),
                "waiting": waiting,
                "running": running,
                "free_blocks": free_blocks,
                "seconds": seconds,
            }
        )

    def detail(self, operations: Sequence[Mapping[str, Any]], texts: Mapping[int, str]) -> None:
        """After a step: what it computed, and the texts of tokens that no earlier line has."""
        texts_by_id = {str(token_id): text for token_id, text in texts.items()}
        self._write({"kind": "detail", "operations": operations, "texts": texts_by_id})

    def end(self) -> None:
        """No line comes after it: a trace without it was cut off."""
        self._write({"kind": "end", "lines": self._lines})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(sealed(line), separators=(",", ":")) + "\n")
        self._lines += 1


def request_as_json(request: Request) -> dict[str, Any]:
    raw = {name: getattr(request, name) for name in REQUEST}
    return {**raw, "prompt_token_ids": list(request.prompt_token_ids), "stop_token_ids": sorted(request.stop_token_ids)}


def request_from_json(raw: Mapping[str, Any]) -> Request:
    given = {name: raw[name] for name in REQUEST}
    return Request(**{**given, "stop_token_ids": frozenset(raw["stop_token_ids"])})


def config_as_json(config: SchedulerConfig) -> dict[str, Any]:
    """Without a window nothing is said of windows."""
    raw = asdict(config)
    return raw if config.sliding_window is not None else {name: raw[name] for name in raw if name not in WINDOW}


def plan_as_json(plan: BatchPlan) -> dict[str, Any]:
    """As JSON reads it back: lists for tuples; without a window nothing is said of windows."""
    scheduled = [entry._asdict() for entry in plan.scheduled]
    whole: dict[str, Any] = json.loads(json.dumps({**asdict(plan), "scheduled": scheduled}))
    for entry in whole["scheduled"]:
        if not entry["window_table"]:
            del entry["window_table"]
    return whole


def reasons(finished: Iterable[Request]) -> dict[str, str]:
    return {each.request_id: each.finish_reason.value for each in finished if each.finish_reason is not None}


@dataclass
class Replay:
    """What a replay went through."""

    steps: int = 0
    requests: int = 0
    tokens: int = 0  # sampled
    scheduled_tokens: int = 0
    preemptions: int = 0
    unfinished: int = 0  # requests at its end
    outputs: dict[str, list[int]] = field(default_factory=dict)  # by request id


Watch = Callable[[Scheduler], None]


def ignore(scheduler: Scheduler) -> None:
    """Watches nothing."""


def replay(lines: Iterable[str], planned: Watch = ignore, ended: Watch = ignore, is_whole: bool = True) -> Replay:
    """Makes the recorded calls on a fresh scheduler; TraceError, with the line, at the first difference.

    planned, ended  called with the scheduler in every step: when its plan is made, and when the step is done
    is_whole        False for a run that goes on, or broke off: its end need not be there
    """
    scheduler: Scheduler | None = None
    result = Replay()
    for number, line in read_lines(lines, is_whole):
        try:
            if scheduler is None:
                scheduler = Scheduler(SchedulerConfig(**line["config"]))
            else:
                _repeat(scheduler, line, result, planned, ended)
        except TraceError as error:
            raise TraceError(f"line {number}: {error}") from None
        except SchedulerError as error:
            raise TraceError(f"line {number}: the replay is refused: {error}") from None
        except NOT_A_LINE as problem:
            raise TraceError(f"line {number}: not a line of a trace: {problem!r}") from None
    if scheduler is not None:
        result.unfinished = len(scheduler.waiting) + len(scheduler.running)
    return result


NOT_A_LINE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def read_lines(lines: Iterable[str], is_whole: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of each but the end, the header first. TraceError, with the line, for one that is no object or
    has another checksum, for another header, and for an end that is missing (unless not `is_whole`) or elsewhere."""
    number, end, has_checksums = 0, 0, True
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            if number == 1:
                has_checksums = _require_header(line)
            if end:
                raise TraceError(f"behind the end in line {end}: expected nothing")
            if (has_checksums or FIELD in line) and (problem := damage(line)):
                raise TraceError(problem)
            line.pop(FIELD, None)
            end = _require_end(line, number) if line["kind"] == "end" else 0
        except TraceError as error:
            raise TraceError(f"line {number}: {error}") from None
        except NOT_A_LINE as problem:
            raise TraceError(f"line {number}: not a line of a trace: {problem!r}") from None
        if not end:
            yield number, line
    if not number:
        raise TraceError("an empty trace: expected a header line")
    if is_whole and not end:
        raise TraceError(f"no end after line {number}: the file was cut off, or its run broke off")


def _require_header(line: Mapping[str, Any]) -> bool:
    """Whether the lines have checksums."""
    kind, version = line.get("kind"), line.get("version")
    if kind != "header" or version != VERSION:
        older = type(version) is int and 0 < version < VERSION and kind == "header"
        again = ": record the run again" if older else ""
        raise TraceError(f"kind {kind!r}, version {version!r}: expected header, {VERSION}{again}")
    _require_names("header", line, HEADER, MORE)
    _require_names("config", line["config"], {each.name for each in fields(SchedulerConfig)} - WINDOW, WINDOW)
    checksums = line.get("checksums", True)
    if type(checksums) is not bool:
        raise TraceError(f"checksums {checksums!r}: expected true or false")
    return checksums


def _require_names(what: str, names: Iterable[str], needed: Set[str], more: Set[str] = frozenset()) -> None:
    """TraceError that names what is unknown or missing."""
    for name in sorted(set(names) - needed - more):
        raise TraceError(f"{what}: unknown field {name!r}, expected {', '.join(sorted(needed | more))}")
    for name in sorted(needed - set(names)):
        raise TraceError(f"{what}: no field {name!r}, expected {', '.join(sorted(needed))}")


def _require_end(line: Mapping[str, Any], number: int) -> int:
    """Its number."""
    if line["lines"] != number - 1:
        raise TraceError(f"the end of {line['lines']!r} lines, expected {number - 1}, as many as stand before it")
    return number


def _repeat(scheduler: Scheduler, line: Mapping[str, Any], result: Replay, planned: Watch, ended: Watch) -> None:
    kind = line["kind"]
    if kind == "add":
        request = request_from_json(line["request"])
        forks = list(map(request_from_json, line["forks"]))
        scheduler.add(request, forks)
        result.requests += 1 + len(forks)
    elif kind == "finish":
        scheduler.finish(line["request_id"], FinishReason(line["reason"]))
    elif kind == "fork":
        scheduler.fork(line["parent"], request_from_json(line["child"]))
        result.requests += 1
    elif kind == "preempt":
        scheduler.preempt(line["request_id"])
    elif kind == "step":
        plan = scheduler.add_drafts(scheduler.schedule(), line["drafts"])
        _require_equal("plan", plan_as_json(plan), line["plan"])
        planned(scheduler)
        result.preemptions += len(plan.preempted)
        finished = scheduler.update(plan, line["tokens"], line["errors"])
        _require_equal("finished", reasons(finished), line["finished"])
        _require_equal("free_blocks", scheduler.pool.num_free, line["free_blocks"])
        ended(scheduler)
        result.steps += 1
        result.scheduled_tokens += plan.num_tokens
        for name, ids in line["tokens"].items():
            result.outputs.setdefault(name, []).extend(ids)
            result.tokens += len(ids)
    elif kind != "detail":
        raise TraceError(f"kind {kind!r}: expected add, finish, fork, preempt, step, detail or end")


def _require_equal(what: str, replayed: object, recorded: object) -> None:
    """TraceError that names the first field of a plan that differs."""
    if replayed == recorded:
        return
    if isinstance(replayed, dict) and isinstance(recorded, dict):
        for name in (*replayed, *recorded):
            if replayed.get(name) != recorded.get(name):
                what, replayed, recorded = f"{what}.{name}", replayed.get(name), recorded.get(name)
                break
    mine, theirs = (str(value)[:LONGEST] for value in (replayed, recorded))
    raise TraceError(f"{what}: the replay has {mine}, the trace {theirs}")
