"""Demands on what goes wrong: interrupts, wrong drafts, wrong calls, damaged traces. Nothing wrong comes of them."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

from hypothesis import assume
from hypothesis import strategies as st

from lfm2np.conformance.demands.demands import Property
from lfm2np.conformance.protocol import Factory
from lfm2np.conformance.trials.driver import Violation, generate, make, require_equal, require_truth, run
from lfm2np.conformance.trials.strategies import Scenario, greedy_params, scenarios, scenarios_that_overflow
from lfm2np.network.step import forward
from scheduler import (
    Request,
    Scheduler,
    SchedulerConfig,
    TraceError,
    replay,
)


def interrupted_steps(factory: Factory, example: tuple[Scenario, list[int]]) -> None:
    """Steps that are interrupted while they compute are as if they had not begun."""
    scenario, hits = example
    engine = make(factory, scenario.model, {**scenario.sizes, "drafter": "ngram"})
    calls = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = forward(*arguments)
        if calls in hits:
            raise KeyboardInterrupt
        return result

    class Patient:
        """Steps again after an interrupt."""

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def step(self) -> Any:
            try:
                return engine.step()
            except KeyboardInterrupt:
                return {}

    with patch("lfm2np.engine.engine.forward", interrupted):
        outcome = run(Patient(), scenario)
    require_truth(factory, scenario, outcome)
    replay(engine.trace())
    if engine.state()["free_blocks"] != engine.state()["num_blocks"]:
        raise Violation("after an interrupt some blocks are lost")


def overflowing_drafts(factory: Factory, example: tuple[Scenario, int]) -> None:
    """A guess that overflows where the truth does not changes nothing: it is computed again without."""
    scenario, right = example
    poison = scenario.model.vocab_size - 1
    plain = generate(factory, scenario)
    script = {
        name: [*answers[0].token_ids[:right], *[poison] * 20] for name, answers in plain.completions.items() if answers
    }
    other = generate(factory, scenario, drafter=script, num_speculative_tokens=3)
    require_equal(factory, scenario, plain, other, "with drafts")


def many_leave(factory: Factory, example: tuple[int, int, list[int]]) -> None:
    """A long queue from which most are aborted while they wait: the rest is served, in order, and counted right."""
    count, every, more = example
    subject = Scheduler(SchedulerConfig(num_blocks=30, max_num_seqs=2))
    for index in range(count):
        subject.add(Request(str(index), (1, 2), 1))
    stay = [index for index in range(count) if index % every == 0 and index not in more]
    for index in range(count):
        if index not in stay:
            subject.abort(str(index))
    if len(subject.waiting) != len(stay):
        raise Violation(f"{len(subject.waiting)} wait, expected {len(stay)}")
    served = []
    while subject.has_unfinished:
        plan = subject.schedule()
        served += [int(entry.request_id) for entry in plan.scheduled]
        subject.update(plan, {name: [9] for entry in plan.scheduled for name in entry.samples})
        if not plan.scheduled:
            raise Violation(f"nothing is scheduled, but {len(subject.requests)} are unfinished")
    if served != stay:
        raise Violation(f"served {served}, expected {stay}")


def damaged_traces(factory: Factory, example: tuple[Scenario, int, str]) -> None:
    """A trace with a line missing, twice, renamed or changed does not replay, and the error names a line."""
    scenario, place, damage = example
    engine = make(factory, scenario.model, scenario.sizes)
    run(engine, scenario)
    lines = engine.trace()
    steps = [index for index, line in enumerate(lines) if '"kind":"step"' in line]
    index = steps[place % len(steps)]
    line = json.loads(lines[index])
    said = "line "
    if damage == "missing":
        assume(index != steps[-1])  # a trace may end early
        del lines[index]
    elif damage == "twice":
        lines.insert(index, lines[index])
    else:
        changed, said = damaged(line, damage)
        lines[index] = json.dumps(changed)
        said = f"line {index + 1}: {said}"
    try:
        replay(lines)
    except TraceError as error:
        if not str(error).startswith(said):
            raise Violation(f"a trace with damage {damage!r}: {str(error)!r}, expected {said!r}") from None
        return
    raise Violation(f"a trace with damage {damage!r} at line {index + 1} replays")


def damaged(line: dict[str, Any], damage: str) -> tuple[dict[str, Any], str]:
    """A step's line, changed, and what the error must say."""
    plan, free = line["plan"], line["free_blocks"]
    if damage == "renamed":
        return {**line, "kind": "leap"}, "kind 'leap': expected add, finish, fork, preempt, step or abandon"
    if damage == "free blocks":
        return {**line, "free_blocks": free + 1}, f"free_blocks: the replay has {free}, the trace {free + 1}"
    if damage == "number":
        return {**line, "plan": {**plan, "step": -1}}, f"plan.step: the replay has {plan['step']}, the trace -1"
    if damage == "rows":
        said = f"plan.scheduled: the replay has {str(plan['scheduled'])[:200]}, the trace []"
        return {**line, "plan": {**plan, "scheduled": []}}, said
    if damage == "moves":
        long = ["x" * 300]
        said = f"plan.moves: the replay has {str(plan['moves'])[:200]}, the trace {str(long)[:200]}"
        return {**line, "plan": {**plan, "moves": long}}, said
    if damage == "endings":
        return {**line, "finished": {"nobody": "stop"}}, ""
    return {key: value for key, value in line.items() if key != "tokens"}, ""


DAMAGES = ("twice", "renamed", "free blocks", "number", "rows", "moves", "endings", "no tokens", "missing")


MISUSE: tuple[Property, ...] = (
    Property(
        "interrupted-steps",
        "A step that is interrupted while it computes is as if it had not begun.",
        7,
        ("own",),
        ("vLLM 56525",),
        lambda: st.tuples(scenarios(kinds=("abort",), most=3), st.lists(st.integers(1, 12), min_size=1, max_size=3)),
        interrupted_steps,
        0.5,
    ),
    Property(
        "wrong-drafts-that-overflow",
        "A guess that overflows where the truth does not changes nothing.",
        7,
        ("generate", "drafter", "overflow", "drawn"),
        ("llama.cpp 23652",),
        lambda: st.tuples(scenarios_that_overflow(), st.integers(0, 3)),
        overflowing_drafts,
        0.3,
    ),
    Property(
        "many-leave-the-queue",
        "A queue from which most are aborted serves the rest, in order.",
        7,
        ("own",),
        ("vLLM 46283",),
        lambda: st.tuples(st.integers(1, 202), st.integers(1, 40), st.lists(st.integers(0, 199), max_size=3)),
        many_leave,
        0.3,
    ),
    Property(
        "damaged-traces-are-named",
        "A trace with a line missing, twice or changed does not replay, and the error names a line.",
        4,
        ("own", "trace", "steps"),
        (),
        lambda: st.tuples(scenarios(greedy_params(), most=2), st.integers(0, 20), st.sampled_from(DAMAGES)),
        damaged_traces,
    ),
)
