"""What goes wrong: drafters that fail, aborted queues, damaged traces. Nothing wrong comes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from internal_properties.internal import internal, require, require_at_most
from internal_properties.outputs import add, sample_names
from lfm2np.engine.drafters import Draft, DraftContext
from lfm2np.engine.engine import Engine
from lfm2np.engine.proposals import Proposals
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.suite.adapters import own
from lfm2np.suite.properties.driver import generate, make, run
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.strategies.scenarios import Scenario, greedy_params, scenarios
from lfm2np.suite.strategies.tiny_models import loaded
from scheduler import TraceError, replay
from scheduler.checksum import sealed

WRONG_DRAFTS = {  # what a drafter does to a request, and what its error says; more of it: wrong_engine_calls.py
    "raises": "ValueError: no draft for",
    "none": "AttributeError: 'NoneType' object has no attribute",
    "too many": " tokens, expected at most ",
}
WEIGHTS = (np.ones(24, np.int64),)
WRONG_NUMBER = r"RequestError: drafter: [02] drafts for 1 context, expected 1"


class WrongDrafter:
    """Does to each request what it is told, if anything; to the rest it gives no drafts. Notes who was asked."""

    def __init__(self, wrong: Mapping[str, str], is_random: bool, number: str) -> None:
        self.wrong, self.is_random, self.number = wrong, is_random, number
        self.engine: Engine | None = None
        self.most = 0
        self.asked: list[tuple[str, ...]] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[Any]:
        self.asked.append(tuple(context.request_id for context in contexts))
        self._require_contexts(contexts)
        drafts = [self._draft(context) for context in contexts]
        if self.number == "right" or (self.number == "right alone" and len(contexts) == 1):
            return drafts
        return drafts[1:] if self.number != "one more" else [*drafts, Draft()]

    def _require_contexts(self, contexts: Sequence[DraftContext]) -> None:
        """What is said of a request, and how many drafts are asked for, is right."""
        assert self.engine is not None
        scheduler, plan = self.engine.scheduler, self.engine.scheduler.in_flight
        assert plan is not None
        room = scheduler.config.max_num_batched_tokens - plan.num_tokens
        for context in contexts:
            request = scheduler.requests[context.request_id]
            actual = (context.token_ids, context.num_prompt_tokens)
            require(actual, (tuple(request.token_ids), len(request.prompt_token_ids)), "is told of", context.request_id)
            left = request.max_tokens - request.num_output_tokens - 1
            needed = self.is_random and context.params.temperature != 0.0
            require(context.count > 0 or needed, True, f"is asked for {context.count} drafts:", context.request_id)
            require_at_most(context.count, min(self.most, room, left), "drafts asked for", context.request_id)
            if any((context.request_id,) == entry.samples for entry in plan.scheduled):
                require(context.count, max(0, min(self.most, room, left)), "drafts asked for", context.request_id)

    def _draft(self, context: DraftContext) -> Draft | None:
        kind = self.wrong.get(context.request_id)
        if kind == "raises":
            raise ValueError(f"no draft for {context.request_id}")
        if kind == "too many":
            count = context.count + self.is_random + 1
            return Draft((3,) * count, WEIGHTS * count if self.is_random else None)
        return Draft() if kind is None else None


@st.composite
def wrong_drafts(draw: st.DrawFn) -> tuple[Scenario, tuple[str | None, ...], bool, str, int]:
    scenario, is_random = draw(scenarios(most=3)), draw(st.booleans())
    wrong = tuple(draw(st.sampled_from((*WRONG_DRAFTS, None))) for _ in scenario.requests)
    number = draw(st.sampled_from(["right", "right", "right alone", "one less", "one more"]))
    return scenario, wrong, is_random, number, draw(st.integers(1, 4))


@internal(
    "failing-drafters-cost-drafts",
    "A drafter that raises, or whose drafts can't be used, costs the request its drafts, and nobody anything else.",
    7,
    wrong_drafts,
    weight=2.0,
)
def failing_drafters(example: tuple[Scenario, tuple[str | None, ...], bool, str, int]) -> None:
    """And the request is told why, and not asked for again."""
    scenario, kinds, is_random, number, most = example
    plain = generate(own, scenario)
    wrong = {
        request.request_id: kind for request, kind in zip(scenario.requests, kinds, strict=True) if kind is not None
    }
    drafter = WrongDrafter(wrong, is_random, number)
    drafter.most = most
    engine = Engine(loaded(scenario.model), drafter=drafter, num_speculative_tokens=most, **scenario.sizes)
    drafter.engine = engine
    for request in scenario.requests:
        add(engine, request)
    outputs = {output.request_id: output for output in engine.stream()}
    asked = [name for names in drafter.asked for name in names]
    for request in scenario.requests:
        said = [answer.token_ids for answer in outputs[request.request_id].outputs]
        expected = [answer.token_ids for answer in plain.completions[request.request_id]]
        require(said, expected, "tokens beside drafters that fail", request.request_id)
        metrics = outputs[request.request_id].metrics
        error = metrics.draft_error if metrics else None
        never = number in ("one less", "one more")
        fails = any(name in asked and (name in wrong or never) for name in sample_names(request))
        require(error is not None, fails, "is told why its drafter failed:", request.request_id)
        if error is not None:
            kind = wrong.get(request.request_id)
            why = WRONG_NUMBER if never and kind != "raises" else WRONG_DRAFTS[kind or "raises"]
            said_why = re.search(why, error) is not None
            require(said_why, True, f"{error!r} says why:", request.request_id)
    failed = {name for name in asked if name in wrong or number in ("one less", "one more")}
    require(engine.metrics.draft_failures, len(failed), "drafters that failed", "of the run")
    for name in failed:
        require_at_most(asked.count(name), 2, "calls for one that fails, with others and alone:", name)


@internal(
    "drafts-are-used",
    "A step computes with the drafts that were asked for; the last drawn one only decides the position after them.",
    2,
    lambda: st.tuples(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=3), st.booleans()),
    weight=10.0,
)
def drafts_are_used(example: tuple[list[tuple[int, int]], bool]) -> None:
    """How many a request is asked for, and how many it has."""
    pairs, is_random = example
    contexts, drafts, expected = [], {}, {}
    for name, (asked, has) in enumerate(pairs):
        contexts.append(DraftContext(str(name), (3,), 1, SamplingParams(), 0, 0, asked))
        drafts[str(name)] = Draft((3,) * has, WEIGHTS * has if is_random else None)
        if count := min(asked, max(0, has - is_random)):
            expected[str(name)] = (3,) * count
    require(Proposals(drafts).fed(contexts), expected, "drafts to compute with", str(pairs))


DAMAGES = ("twice", "renamed", "checksum", "free blocks", "number", "rows", "moves", "endings", "no tokens", "missing")


@internal(
    "damaged-traces-are-named",
    "A trace with a line missing, twice or changed does not replay, and the error names a line.",
    4,
    lambda: st.tuples(scenarios(greedy_params(), most=2), st.integers(0, 20)),
)
def damaged_traces(example: tuple[Scenario, int]) -> None:
    scenario, place = example
    engine = make(own, scenario.model, scenario.sizes)
    run(engine, scenario)
    lines = engine.trace()
    steps = [index for index, line in enumerate(lines) if '"kind":"step"' in line]
    index = steps[place % len(steps)]
    for damage in DAMAGES:
        if damage == "missing" and index == steps[-1]:
            continue  # a trace may end early
        changed, said = damaged(json.loads(lines[index]), damage)
        after = [] if changed is None else [json.dumps(changed if damage == "checksum" else sealed(changed))]
        require_named([*lines[:index], *after, *lines[index + (damage != "twice") :]], damage, index, said)


def require_named(lines: Sequence[str], damage: str, index: int, said: str) -> None:
    """At the line itself where the error has to say something of it."""
    expected = f"line {index + 1}: {said}" if said else "line "
    try:
        replay(lines, is_whole=False)
    except TraceError as error:
        require(str(error)[: len(expected)], expected, f"damage {damage!r}: the error begins with", "a trace")
        return
    raise Violation(f"a trace with damage {damage!r} at line {index + 1} replays")


def damaged(line: dict[str, Any], damage: str) -> tuple[dict[str, Any] | None, str]:
    """A step's line, changed, and what the error must say of it."""
    plan, free, long = line["plan"], line["free_blocks"], ["x" * 300]
    other = [] if plan["scheduled"] else ["x"]  # a step after the last request schedules nothing
    scheduled, moves = (str(plan[name])[:200] for name in ("scheduled", "moves"))
    if damage in ("missing", "twice"):
        return (None if damage == "missing" else line), ""
    if damage == "no tokens":
        return {key: value for key, value in line.items() if key != "tokens"}, ""
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "renamed": ({"kind": "leap"}, "kind 'leap': expected add, finish, fork, preempt, step, detail or end"),
        "checksum": ({"seconds": -1}, f"sha256 '{line['sha256']}', expected "),
        "free blocks": ({"free_blocks": free + 1}, f"free_blocks: the replay has {free}, the trace {free + 1}"),
        "number": ({"plan": {**plan, "step": -1}}, f"plan.step: the replay has {plan['step']}, the trace -1"),
        "rows": (
            {"plan": {**plan, "scheduled": other}},
            f"plan.scheduled: the replay has {scheduled}, the trace {other}",
        ),
        "moves": (
            {"plan": {**plan, "moves": long}},
            f"plan.moves: the replay has {moves}, the trace {str(long)[:200]}",
        ),
        "endings": ({"finished": {"nobody": "stop"}}, ""),
    }
    change, said = changes[damage]
    return {**line, **change}, said
