"""Demands on what goes wrong: interrupts, wrong drafts, wrong calls, damaged traces. Nothing wrong comes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from numpy.typing import NDArray

from lfm2np.conformance.demands import Property
from lfm2np.conformance.driver import Violation, generate, make, require_equal, require_truth, run
from lfm2np.conformance.models import TinyModel, loaded
from lfm2np.conformance.protocol import Factory
from lfm2np.conformance.strategies import Scenario, greedy_params, scenarios
from lfm2np.drafters import Draft, DraftContext
from lfm2np.engine import Engine
from lfm2np.errors import NumericsError, RequestError
from lfm2np.model import forward
from lfm2np.sampling import distribution, integer_weights, request_seed
from lfm2np.sampling_params import SamplingParams
from scheduler import (
    BlockPool,
    FinishReason,
    PlanError,
    PoolError,
    Request,
    RequestRefused,
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

    with patch("lfm2np.engine.forward", interrupted):
        outcome = run(Patient(), scenario)
    require_truth(scenario, outcome)
    replay(engine.trace())
    if engine.state()["free_blocks"] != engine.state()["num_blocks"]:
        raise Violation("after an interrupt some blocks are lost")


def overflowing_drafts(factory: Factory, example: tuple[Scenario, int]) -> None:
    """A guess that overflows where the truth does not changes nothing: it is computed again without."""
    scenario, right = example
    scenario = replace(scenario, model=replace(scenario.model, overflows=True, tied=False))
    poison = scenario.model.vocab_size - 1
    plain = generate(factory, scenario)
    script = {
        name: [*answers[0].token_ids[:right], *[poison] * 20] for name, answers in plain.completions.items() if answers
    }
    require_equal(plain, generate(factory, scenario, drafter=script, num_speculative_tokens=3), "with drafts")


# --- wrong calls


def in_flight(salt: str = "m") -> tuple[Scheduler, Any]:
    subject = Scheduler(SchedulerConfig(num_blocks=20, block_size=2, max_num_batched_tokens=8))
    subject.add(Request("a", (1, 2, 3), 9, stop_token_ids=frozenset([6]), cache_salt=salt))
    return subject, subject.add_drafts(subject.schedule(), {"a": [5, 6, 7]})


def answered(tokens: Mapping[str, list[int]]) -> None:
    subject, plan = in_flight()
    try:
        subject.update(plan, tokens)
    except PlanError:
        subject.update(plan, {"a": [5, 9]})  # nothing has changed
        raise


def settled() -> Scheduler:
    subject, plan = in_flight()
    subject.update(plan, {"a": [5, 9]})
    return subject


def with_plan(call: Callable[[Scheduler, Any], object]) -> None:
    subject, plan = in_flight()
    call(subject, plan)


def own_engine(**options: Any) -> Engine:
    return Engine(loaded(TinyModel()), **options)


def forked(prompt: tuple[int, ...], most: int, salt: str = "m") -> None:
    settled().fork("a", Request("b", prompt, most, cache_salt=salt))


def several_samples() -> None:
    engine = own_engine()
    engine.add_request("a", [3, 4], SamplingParams(n=2))
    engine.fork("a", "b")


WRONG_CALLS: tuple[tuple[str, type[Exception], Callable[[], object]], ...] = (
    ("an empty pool", PoolError, lambda: BlockPool(0)),
    ("no answer", PlanError, lambda: answered({})),
    ("too many tokens", PlanError, lambda: answered({"a": [5, 6, 7, 8, 9]})),
    ("other drafts than those checked", PlanError, lambda: answered({"a": [4, 9]})),
    ("tokens behind the last one", PlanError, lambda: answered({"a": [5, 6, 9]})),
    ("tokens nobody asked for", PlanError, lambda: answered({"a": [5, 9], "b": [1]})),
    ("a plan while one is in flight", PlanError, lambda: with_plan(lambda s, p: s.schedule())),
    (
        "a fork in flight",
        PlanError,
        lambda: with_plan(lambda s, p: s.fork("a", Request("b", (1, 2, 3), 9, cache_salt="m"))),
    ),
    ("a preemption in flight", PlanError, lambda: with_plan(lambda s, p: s.preempt("a"))),
    ("drafts for another plan", PlanError, lambda: with_plan(lambda s, p: s.add_drafts(replace(p), {}))),
    ("drafts for no one", PlanError, lambda: with_plan(lambda s, p: s.add_drafts(p, {"b": [1]}))),
    ("an answer to another plan", PlanError, lambda: with_plan(lambda s, p: s.update(replace(p), {"a": [5, 9]}))),
    ("another plan abandoned", PlanError, lambda: with_plan(lambda s, p: s.abandon(replace(p)))),
    ("an id in use", RequestRefused, lambda: settled().add(Request("a", (1,), 1))),
    ("an id twice", RequestRefused, lambda: settled().add(Request("b", (1,), 1), [Request("b", (1,), 1)])),
    ("an oversized request", RequestRefused, lambda: settled().add(Request("b", (1,) * 30, 30))),
    ("a fork of another prompt", RequestRefused, lambda: forked((1, 2), 9)),
    ("a fork with another salt", RequestRefused, lambda: forked((1, 2, 3), 9, "x")),
    ("a fork with a salt before its parent's", RequestRefused, lambda: forked((1, 2, 3), 9, "a")),
    ("a fork that is over", RequestRefused, lambda: forked((1, 2, 3), 2)),
    ("a fork that was over before", RequestRefused, lambda: forked((1, 2, 3), 1)),
    ("an unknown request", RequestRefused, lambda: settled().finish("b", FinishReason.ABORT)),
    ("a preemption of one that waits", RequestRefused, lambda: waiting().preempt("b")),
    ("a request without a name", RequestRefused, lambda: Request("", (1,), 1)),
    ("a request without a prompt", RequestRefused, lambda: Request("a", (), 1)),
    ("a request for nothing", RequestRefused, lambda: Request("a", (1,), 0)),
    ("no blocks", RequestRefused, lambda: SchedulerConfig(num_blocks=0)),
    ("half a block", RequestRefused, lambda: SchedulerConfig(num_blocks=1, block_size=1.5)),  # type: ignore[arg-type]
    ("no policy", RequestRefused, lambda: SchedulerConfig(num_blocks=1, policy="none")),
    ("a full watermark", RequestRefused, lambda: SchedulerConfig(num_blocks=1, watermark=1.0)),
    ("a watermark of text", RequestRefused, lambda: SchedulerConfig(num_blocks=1, watermark="x")),  # type: ignore[arg-type]
    ("a negative ratio", RequestRefused, lambda: SchedulerConfig(num_blocks=1, waiting_served_ratio=-1.0)),
    ("an engine without blocks", RequestError, lambda: own_engine(num_blocks=0)),
    ("a priority of text", RequestError, lambda: own_engine().add_request("a", [3], priority="x")),  # type: ignore[arg-type]
    ("an engine's unknown request", RequestError, lambda: own_engine().abort("a")),
    ("an engine's nameless request", RequestError, lambda: own_engine().add_request("", [3])),
    ("an engine's preemption of one that waits", RequestError, lambda: lonely().preempt("a")),
    ("an engine's fork of one that ends", RequestError, lambda: lonely().fork("a", "a")),
    ("a fork of several samples", RequestError, several_samples),
    ("an id in use by the engine", RequestError, lambda: lonely().add_request("a", [3])),
    ("a request that the engine's pool can't hold", RequestError, lambda: too_large()),
    ("a call from inside a step", RequestError, lambda: called_from_inside()),
    ("a step after interrupted bookkeeping", RequestError, lambda: half_kept_books()),
    ("an audit that was not asked for", RequestError, lambda: own_engine().verify()),
    ("an empty trace", TraceError, lambda: replay([])),
    ("a trace without a header", TraceError, lambda: replay(['{"kind": "add"}'])),
    ("a trace that is no JSON", TraceError, lambda: replay(["{"])),
)


def sampled(row: NDArray[Any], **params: Any) -> None:
    distribution(row, SamplingParams(**params), (1,), (), (2,))


ROW = np.zeros(5, np.float32)
WRONG_SAMPLING: tuple[tuple[str, type[Exception], Callable[[], object]], ...] = (
    ("logits of two rows", NumericsError, lambda: sampled(ROW.reshape(1, 5))),
    ("logits that are no numbers", NumericsError, lambda: sampled(np.full(5, np.nan, np.float32))),
    ("a banned id outside the vocabulary", RequestError, lambda: sampled(ROW, banned_token_ids=[5])),
    ("no token left", RequestError, lambda: sampled(ROW, banned_token_ids=[0, 1, 2, 3, 4])),
    ("weights of nothing", RequestError, lambda: integer_weights(np.full(5, -np.inf))),
    ("a request without a name for its seed", RequestError, lambda: request_seed(SamplingParams(), 0, 1)),  # type: ignore[arg-type]
)


def waiting() -> Scheduler:
    subject = settled()
    subject.add(Request("b", (1,), 1))
    return subject


def lonely() -> Engine:
    engine = own_engine()
    engine.add_request("a", [3, 4])
    return engine


ALL_WRONG = (*WRONG_CALLS, *WRONG_SAMPLING)


def too_large() -> None:
    own_engine(num_blocks=1, block_size=2).add_request("a", [3, 4, 5], SamplingParams(max_tokens=9))


def called_from_inside() -> None:
    """By a drafter, whose exceptions only cost its request's speed."""
    refused: list[RequestError] = []

    class Calling:
        is_random = False

        def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
            try:
                engine.abort("a")
            except RequestError as error:
                refused.append(error)
            return [Draft()] * len(contexts)

    engine = own_engine(drafter=Calling())
    engine.add_request("a", [3, 4], SamplingParams(temperature=0.0, max_tokens=4))
    engine.step()
    raise refused[0]


def half_kept_books() -> None:
    engine = lonely()
    with patch.object(engine.scheduler, "update", side_effect=KeyboardInterrupt):
        try:
            engine.step()
        except KeyboardInterrupt:
            engine.step()


def wrong_calls(factory: Factory, number: int) -> None:
    name, kind, call = ALL_WRONG[number]
    try:
        call()
    except kind:
        return
    raise Violation(f"{name}: not refused, expected {kind.__name__}")


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
    if damage == "missing":
        assume(index != steps[-1])  # a trace may end early
        del lines[index]
    elif damage == "twice":
        lines.insert(index, lines[index])
    elif damage == "renamed":
        lines[index] = json.dumps({**line, "kind": "leap"})
    elif damage == "free blocks":
        lines[index] = json.dumps({**line, "free_blocks": line["free_blocks"] + 1})
    elif damage == "plan":
        lines[index] = json.dumps({**line, "plan": {**line["plan"], "step": -1}})
    else:
        lines[index] = json.dumps({key: value for key, value in line.items() if key != "tokens"})
    try:
        replay(lines)
    except TraceError as error:
        if not str(error).startswith("line "):
            raise Violation(f"a trace with damage {damage!r}: the error names no line: {error}") from None
        return
    raise Violation(f"a trace with damage {damage!r} at line {index + 1} replays")


DAMAGES = ("twice", "renamed", "free blocks", "plan", "no tokens", "missing")


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
        ("generate", "drafter"),
        ("llama.cpp 23652",),
        lambda: st.tuples(scenarios(greedy_params(), most=3), st.integers(0, 3)),
        overflowing_drafts,
        0.3,
    ),
    Property(
        "wrong-calls-are-refused",
        "A call that can't be right is refused at once, by the error that says so.",
        7,
        ("own",),
        (),
        lambda: st.sampled_from(range(len(ALL_WRONG))),
        wrong_calls,
        2.0,
    ),
    Property(
        "many-leave-the-queue",
        "A queue from which most are aborted serves the rest, in order.",
        7,
        ("own",),
        ("vLLM 46283",),
        lambda: st.tuples(st.integers(1, 200), st.integers(1, 40), st.lists(st.integers(0, 199), max_size=3)),
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
        0.3,
    ),
)
