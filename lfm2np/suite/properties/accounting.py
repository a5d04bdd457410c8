"""The books of a run, kept from its trace alone: budget, necessary work, and every counter that the engine reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.suite.properties.driver import Outcome
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.strategies.scenarios import Scenario


@dataclass
class Line:
    computed: int = 0  # positions in memory
    furthest: int = 0  # most of them so far
    is_new: bool = False  # admitted, and nothing of it computed since
    forks: tuple[str, ...] = ()  # samples that take its memory over when its prompt is computed, if there is room
    offered: int = 0  # positions that it takes over, if it is not admitted by itself


def require_ledger(scenario: Scenario, trace: Sequence[str], metrics: Mapping[str, int], outcome: Outcome) -> None:
    """Violation unless work and metrics add up.

    Each step stays in the budget. Each sequence goes on where it stood, or at a block's border after the prefix cache
    was asked; no position of it is left out, and none is computed twice but after a preemption. `cached_tokens` is what
    admissions skipped, `recomputed_tokens` what was computed before, of samples that were not aborted.
    """
    names = ("scheduled_tokens", "sampled_tokens", "cached_tokens", "draft_tokens", "recomputed_tokens")
    counted = dict.fromkeys(names, 0)
    lines: dict[str, Line] = {}
    ends: dict[int, int] = {}  # block -> the position of the checkpoint that it holds
    config = json.loads(trace[0])["config"]
    for text in trace[1:]:
        entry = json.loads(text)
        if entry["kind"] == "add":
            forks = [fork["request_id"] for fork in entry["forks"]]
            lines[entry["request"]["request_id"]] = Line(forks=tuple(forks))
            lines |= {name: Line() for name in forks}
        if entry["kind"] == "step":
            _require_step(config, entry, lines, ends, counted)
    for name, count in counted.items():
        if metrics[name] != count:
            raise Violation(f"metric {name}: {metrics[name]}, the trace says {count}")
    for request in scenario.requests:
        for index, answer in enumerate(outcome.completions[request.request_id]):
            line = lines[request.request_id if index == 0 else f"{request.request_id}#{index}"]
            needed = len(request.prompt_token_ids) + len(answer.ids) - 1
            furthest = max(line.furthest, line.offered)
            if request.request_id not in outcome.aborted and furthest != needed:
                raise Violation(f"request {request.request_id}: {furthest} positions computed, {needed} are needed")


def _require_step(
    config: Mapping[str, Any],
    step: Mapping[str, Any],
    lines: dict[str, Line],
    ends: dict[int, int],
    counted: dict[str, int],
) -> None:
    plan, size = step["plan"], config["block_size"]
    tokens = sum(len(entry["token_ids"]) for entry in plan["scheduled"])
    if tokens > config["max_num_batched_tokens"]:
        raise Violation(f"step {plan['step']}: {tokens} tokens, the budget is {config['max_num_batched_tokens']}")
    hits = [ends[move["source"]] for move in plan["moves"] if move["kind"] == "restore_state"]
    counted["scheduled_tokens"] += tokens
    counted["cached_tokens"] += sum(hits)
    for name in plan["admitted"]:
        lines[name].is_new = True
    for name in plan["preempted"]:
        lines[name].furthest = max(lines[name].furthest, lines[name].offered)
        lines[name].computed = lines[name].offered = 0
    for entry in plan["scheduled"]:
        name = entry["request_id"]
        line = lines[name]
        if line.offered and not line.is_new:
            line.computed = line.furthest = line.offered
        line.offered = 0
        for position, block in entry["checkpoints"]:
            ends[block] = position
        if line.is_new:
            if entry["start"] % size:
                raise Violation(f"step {plan['step']}: request {name} enters at {entry['start']}, no border of a block")
            line.furthest = max(line.furthest, entry["start"])
        elif entry["start"] != line.computed:
            where = f"step {plan['step']}: request {name}"
            raise Violation(f"{where} goes on at {entry['start']}, it stands at {line.computed}")
        answer = step["tokens"].get(name, [])
        kept = len(entry["token_ids"]) - entry["num_drafts"] + max(0, len(answer) - 1)
        stop = entry["start"] + kept
        counted["draft_tokens"] += entry["num_drafts"]
        counted["recomputed_tokens"] += max(0, min(stop, line.furthest) - entry["start"])
        line.is_new = False
        line.computed, line.furthest = stop, max(line.furthest, stop)
        for fork in line.forks if entry["samples"] else ():
            lines[fork].offered = stop
        line.forks = () if entry["samples"] else line.forks
    counted["sampled_tokens"] += sum(map(len, step["tokens"].values()))
