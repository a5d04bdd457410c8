"""A recorded run as plain data: what the views are drawn from. Nothing here knows how it will look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lfm2np.errors import RequestError
from scheduler import ScheduledTokens, TraceError, read_lines

Operation = Mapping[str, Any]  # one line of detail.py


Entry = ScheduledTokens


@dataclass(frozen=True)
class Step:
    """One step: what was planned, and what came of it."""

    number: int
    entries: tuple[Entry, ...]
    moves: tuple[tuple[str, int, int], ...]  # kind, source, destination
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    tokens: Mapping[str, tuple[int, ...]]
    finished: Mapping[str, str]
    waiting: int
    running: int
    free_blocks: int
    operations: tuple[Operation, ...] = ()  # only with --trace-detail

    @property
    def num_tokens(self) -> int:
        return sum(len(entry.token_ids) for entry in self.entries)

    @property
    def rows(self) -> list[tuple[Entry, int, int]]:
        """Of the flat array: whose each row is, its position and its token."""
        return [(entry, *row) for entry in self.entries for row in enumerate(entry.token_ids, entry.start)]


@dataclass(frozen=True)
class Asked:
    """One request, or one of its samples, as it came."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrival: int  # the number of steps before it came
    parent: str | None = None  # of a fork, or of a further sample


@dataclass(frozen=True)
class Run:
    config: Mapping[str, Any]  # of the scheduler
    requests: Mapping[str, Asked]
    steps: tuple[Step, ...]
    events: tuple[tuple[int, str, str], ...]  # between steps: (steps before it, what, request)
    texts: Mapping[int, str] = field(default_factory=dict)  # of token ids, where the trace tells them
    schedule: tuple[str, ...] = field(default=(), compare=False)  # the trace's lines but details, with their times

    def word(self, token_id: int) -> str:
        """A token's text, or its number where the trace does not tell: with a sign where others are texts."""
        return self.texts.get(token_id, f"#{token_id}" if self.texts else str(token_id))


def in_windows(run: Run) -> Run | None:
    """The same run as its windowed layers have it: their pool, tables and moves in the place of the others'.

    None without such layers. Not to be scheduled again: the whole run is.
    """
    if run.config.get("sliding_window") is None:
        return None
    steps = tuple(
        replace(
            step,
            entries=tuple(entry._replace(block_table=entry.window_table) for entry in step.entries),
            moves=tuple(
                (kind.replace("_window", ""), source, destination)
                for kind, source, destination in step.moves
                if kind.endswith("_window_block")
            ),
        )
        for step in run.steps
    )
    return replace(run, config={**run.config, "num_blocks": run.config["num_window_blocks"]}, steps=steps)


def read_run(lines: Iterable[str], is_whole: bool = True) -> Run:
    """RequestError that names the line for what is no trace, or one without a single step; `is_whole` as for replay."""
    header: Mapping[str, Any] | None = None
    requests: dict[str, Asked] = {}
    steps: list[Step] = []
    events: list[tuple[int, str, str]] = []
    texts: dict[int, str] = {}
    schedule: list[str] = []
    texts_of_lines = list(lines)
    try:
        checked = list(read_lines(texts_of_lines, is_whole))
    except TraceError as error:
        raise RequestError(str(error)) from None
    for number, line in checked:
        try:
            kind = line["kind"]
            if kind != "detail":
                schedule.append(texts_of_lines[number - 1])
            if header is None:
                header = line
            elif kind == "step":
                steps.append(step_from(line, len(steps)))
            elif kind == "detail":
                steps[-1] = replace(steps[-1], operations=tuple(line["operations"]))
                texts |= {int(token_id): word for token_id, word in line["texts"].items()}
            elif kind in ("add", "fork"):
                for asked in asked_from(line, len(steps)):
                    requests[asked.request_id] = asked
                if kind == "fork":
                    events.append((len(steps), f"fork of {line['parent']}", line["child"]["request_id"]))
            elif kind in ("finish", "preempt"):
                events.append((len(steps), line.get("reason", kind), line["request_id"]))
            else:
                raise RequestError(f"line {number}: kind {kind!r}, expected a line of a trace")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as problem:
            raise RequestError(f"line {number}: not a line of a trace: {problem!r}") from None
    if header is None or not steps:
        raise RequestError("a trace without a step: there is nothing to draw")
    return Run(header["config"], requests, tuple(steps), tuple(events), texts, tuple(schedule))


def plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def step_from(line: Mapping[str, Any], number: int) -> Step:
    plan = line["plan"]
    scheduled = [{name: plain(raw[name]) for name in Entry._fields if name in raw} for raw in plan["scheduled"]]
    return Step(
        number=number,
        entries=tuple(Entry(**entry) for entry in scheduled),
        moves=tuple((move["kind"], move["source"], move["destination"]) for move in plan["moves"]),
        admitted=tuple(plan["admitted"]),
        preempted=tuple(plan["preempted"]),
        tokens={name: tuple(ids) for name, ids in line["tokens"].items()},
        finished=line["finished"],
        waiting=line["waiting"],
        running=line["running"],
        free_blocks=line["free_blocks"],
    )


def asked_from(line: Mapping[str, Any], arrival: int) -> list[Asked]:
    """A request and its further samples; or a fork."""

    def asked(raw: Mapping[str, Any], parent: str | None) -> Asked:
        return Asked(raw["request_id"], tuple(raw["prompt_token_ids"]), raw["max_tokens"], arrival, parent)

    if line["kind"] == "fork":
        return [asked(line["child"], line["parent"])]
    first = asked(line["request"], None)
    return [first, *(asked(raw, first.request_id) for raw in line["forks"])]
