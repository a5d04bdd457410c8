"""Calls that can't be right, and the error that each must meet: its class, and what it says.

The message is checked too: it names the thing, its value and what was expected (law 7).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from hypothesis import strategies as st

from internal_properties.internal import internal
from internal_properties.wrong_engine_calls import ENGINE, SAMPLING, Case
from lfm2np.suite.properties.property import Violation
from scheduler import (
    POLICIES,
    BlockPool,
    FinishReason,
    PlanError,
    PoolError,
    Request,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    TraceError,
    TraceWriter,
    reasons,
    replay,
)
from scheduler.checksum import sealed

# --- the scheduler


def in_flight(drafts: Sequence[int] = (5, 6, 7), **options: Any) -> tuple[Scheduler, Any]:
    subject = Scheduler(SchedulerConfig(num_blocks=20, block_size=2, max_num_batched_tokens=8))
    subject.add(Request("a", (1, 2, 3), 9, **{"stop_token_ids": frozenset([6]), "cache_salt": "m", **options}))
    return subject, subject.add_drafts(subject.schedule(), {"a": drafts})


def answered(tokens: Mapping[str, list[int]], drafts: Sequence[int] = (5, 6, 7)) -> None:
    subject, plan = in_flight(drafts)
    try:
        subject.update(plan, tokens)
    except PlanError:
        subject.update(plan, {"a": [5, 9] if drafts else [5]})  # nothing has changed
        raise


def drafts_too_early(fork: str | None, budget: int) -> None:
    """While further samples are yet to be split off, or the prompt is not yet computed."""
    subject = Scheduler(SchedulerConfig(num_blocks=20, block_size=2, max_num_batched_tokens=budget))
    subject.add(Request("a", (1, 2, 3), 9), [Request(fork, (1, 2, 3), 9)] if fork else [])
    subject.add_drafts(subject.schedule(), {"a": [5]})


def preempted() -> None:
    """A request that was preempted waits, and can't be again."""
    subject = settled()
    subject.preempt("a")
    subject.preempt("a")


def settled() -> Scheduler:
    subject, plan = in_flight()
    subject.update(plan, {"a": [5, 9]})
    return subject


def waiting() -> Scheduler:
    subject = settled()
    subject.add(Request("b", (1,), 1))
    return subject


def with_plan(call: Callable[[Scheduler, Any], object]) -> None:
    subject, plan = in_flight()
    call(subject, plan)


def forked(prompt: tuple[int, ...], most: int, salt: str = "m") -> None:
    settled().fork("a", Request("b", prompt, most, cache_salt=salt))


def ended(call: Callable[[Scheduler], object]) -> None:
    subject = settled()
    subject.abort("a")
    call(subject)


def aborted_in_flight(call: Callable[[Scheduler], object]) -> None:
    subject, _ = in_flight()
    subject.abort("a")
    call(subject)


NO_CHANGE = "is in flight: call update() first"
OTHER = "which is not in flight"
FORK = "request 'b': a fork needs the prompt of 'a'"

SCHEDULER: tuple[Case, ...] = (
    (PlanError, "step 0: request 'a' got (), expected 1 to 4 tokens", lambda: answered({})),
    (PlanError, "step 0: request 'a' got (5, 6), expected 1 token", lambda: answered({"a": [5, 6]}, ())),
    (
        PlanError,
        "step 0: request 'a' got (5, 6, 7, 8, 9), expected 1 to 4 tokens",
        lambda: answered({"a": [5, 6, 7, 8, 9]}),
    ),
    (
        PlanError,
        "step 0: request 'a' got (4, 9), expected all but the last to be its first drafts (5, 6, 7)",
        lambda: answered({"a": [4, 9]}),
    ),
    (
        PlanError,
        "step 0: request 'a' got (8, 9), expected all but the last to be its first drafts (5, 6, 7)",
        lambda: answered({"a": [8, 9]}),
    ),
    (
        PlanError,
        "step 0: request 'a' got (5, 6, 9), but token 6 ends it: expected none after that",
        lambda: answered({"a": [5, 6, 9]}),
    ),
    (PlanError, "step 0: tokens for 'b', which was not asked for any", lambda: answered({"a": [5, 9], "b": [1]})),
    (PlanError, f"schedule() while step 0 {NO_CHANGE}", lambda: with_plan(lambda s, p: s.schedule())),
    (
        PlanError,
        f"fork() while step 0 {NO_CHANGE}",
        lambda: with_plan(lambda s, p: s.fork("a", Request("b", (1, 2, 3), 9, cache_salt="m"))),
    ),
    (PlanError, f"preempt() while step 0 {NO_CHANGE}", lambda: with_plan(lambda s, p: s.preempt("a"))),
    (PlanError, f"add_drafts() for step 0, {OTHER}", lambda: with_plan(lambda s, p: s.add_drafts(replace(p), {}))),
    (
        PlanError,
        "step 0: drafts for 'b', which can't take any",
        lambda: with_plan(lambda s, p: s.add_drafts(p, {"b": [1]})),
    ),
    (PlanError, "step 0: drafts for 'a', which can't take any", lambda: drafts_too_early("z", budget=8)),
    (PlanError, "step 0: drafts for 'a', which can't take any", lambda: drafts_too_early("A", budget=8)),
    (PlanError, "step 0: drafts for 'a', which can't take any", lambda: drafts_too_early(None, budget=2)),
    (PlanError, f"update() for step 0, {OTHER}", lambda: with_plan(lambda s, p: s.update(replace(p), {"a": [5, 9]}))),
    (RequestRefused, "request id 'a' is already in use", lambda: settled().add(Request("a", (1,), 1))),
    (
        RequestRefused,
        "request id 'b' is already in use",
        lambda: settled().add(Request("b", (1,), 1), [Request("b", (1,), 1)]),
    ),
    (
        RequestRefused,
        "request 'b': 30 prompt tokens and max_tokens=30 need 30 blocks of 2; the pool has 20",
        lambda: settled().add(Request("b", (1,) * 30, 30)),
    ),
    (RequestRefused, FORK, lambda: forked((1, 2), 9)),
    (RequestRefused, FORK, lambda: forked((1, 2, 4), 9)),
    (RequestRefused, FORK, lambda: forked((1, 2, 3), 9, "x")),
    (RequestRefused, FORK, lambda: forked((1, 2, 3), 9, "a")),
    (RequestRefused, "max_tokens 2, but 'a' already has 2 output tokens", lambda: forked((1, 2, 3), 2)),
    (RequestRefused, "max_tokens 1, but 'a' already has 2 output tokens", lambda: forked((1, 2, 3), 1)),
    (RequestRefused, "request 'b': not known, or finished", lambda: settled().finish("b", FinishReason.ABORT)),
    (RequestRefused, "request 'a': not known, or finished", lambda: ended(lambda s: s.abort("a"))),
    (RequestRefused, "request 'a': not known, or finished", lambda: aborted_in_flight(lambda s: s.abort("a"))),
    (RequestRefused, "request 'b': waiting, can't be preempted", lambda: waiting().preempt("b")),
    (RequestRefused, "request 'a': preempted, can't be preempted", preempted),
    (RequestRefused, "request id '': expected a string that is not empty", lambda: Request("", (1,), 1)),
    (RequestRefused, "request id 1: expected a string that is not empty", lambda: Request(1, (1,), 1)),  # type: ignore[arg-type]
    (RequestRefused, "request 'a': prompt of 0 tokens, expected at least 1", lambda: Request("a", (), 1)),
    (RequestRefused, "request 'a': max_tokens 0, expected at least 1", lambda: Request("a", (1,), 0)),
    (RequestRefused, "request 'a': max_tokens -1, expected at least 1", lambda: Request("a", (1,), -1)),
)


# --- sizes


def sizes(**options: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"num_blocks": 1, **options})


def too_small(name: str, least: int) -> list[Case]:
    wrong = (least - 1, least - 2, float(least + 1), str(least), True, None)
    text = f"expected a whole number, at least {least}"
    return [
        (RequestRefused, f"{name} {value!r}: {text}", lambda value=value: sizes(**{name: value}))  # type: ignore[misc]
        for value in wrong
    ]


LEAST = {
    "num_blocks": 1,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_waiting_tokens": 0,
}
POLICY_NAMES = f"expected one of {', '.join(POLICIES)}"
RATIO = "expected a number, at least 0"
SIZES: tuple[Case, ...] = (
    *(case for name, least in LEAST.items() for case in too_small(name, least)),
    (RequestRefused, f"policy 'none': {POLICY_NAMES}", lambda: sizes(policy="none")),
    (RequestRefused, f"policy ['fcfs']: {POLICY_NAMES}", lambda: sizes(policy=["fcfs"])),
    (RequestRefused, "watermark 1.0: expected 0 <= watermark < 1", lambda: sizes(watermark=1.0)),
    (RequestRefused, "watermark 1.5: expected 0 <= watermark < 1", lambda: sizes(watermark=1.5)),
    (RequestRefused, "watermark -0.1: expected 0 <= watermark < 1", lambda: sizes(watermark=-0.1)),
    (RequestRefused, "watermark nan: expected 0 <= watermark < 1", lambda: sizes(watermark=float("nan"))),
    (RequestRefused, "watermark 'x': expected a number", lambda: sizes(watermark="x")),
    (RequestRefused, "watermark True: expected a number", lambda: sizes(watermark=True)),
    (RequestRefused, f"waiting_served_ratio -1.0: {RATIO}", lambda: sizes(waiting_served_ratio=-1.0)),
    (RequestRefused, f"waiting_served_ratio 1000000000.0: {RATIO}", lambda: sizes(waiting_served_ratio=1e9)),
    (RequestRefused, f"waiting_served_ratio inf: {RATIO}", lambda: sizes(waiting_served_ratio=float("inf"))),
    (RequestRefused, "waiting_served_ratio None: expected a number", lambda: sizes(waiting_served_ratio=None)),
)


# --- the block pool


def pool(owned: int, published: int, call: Callable[[BlockPool], object]) -> None:
    """Of three blocks, 0 to owned - 1 have owners, block 0 two if there are two; the first of them have keys."""
    subject = BlockPool(3)
    given = [subject.allocate()[0] for _ in range(3)]  # in whatever order
    for block in given:
        if block >= owned:
            subject.release(block)
    if owned > 1:
        subject.share(0)
    for block in range(published):
        subject.publish(block, bytes([block]))
    call(subject)


def exhausted(num_blocks: int) -> None:
    subject = BlockPool(num_blocks)
    for _ in range(num_blocks + 1):
        subject.allocate()


ONE_OWNER = "expected one owner and no key"
POOL: tuple[Case, ...] = (
    (PoolError, "a pool of 0 blocks: expected at least 1", lambda: BlockPool(0)),
    (PoolError, "a pool of -1 blocks: expected at least 1", lambda: BlockPool(-1)),
    (PoolError, "no block is free: all 3 are owned", lambda: pool(3, 0, lambda p: p.allocate())),
    (PoolError, "block 0 is free: it can't be shared", lambda: pool(0, 0, lambda p: p.share(0))),
    (PoolError, "block 3: expected 0 to 2", lambda: pool(0, 0, lambda p: p.share(3))),
    (PoolError, "block 300: expected 0 to 299", lambda: BlockPool(300).share(300)),
    (PoolError, "no block is free: all 300 are owned", lambda: exhausted(300)),
    (PoolError, "block -1: expected 0 to 2", lambda: pool(0, 0, lambda p: p.release(-1))),
    (PoolError, "block 1 is released, but no one owns it: a double free", lambda: pool(1, 0, lambda p: p.release(1))),
    (
        PoolError,
        "block 1 is released, but no one owns it: a double free",
        lambda: pool(2, 0, lambda p: p.release_table((1, 1))),
    ),
    (
        PoolError,
        "block 2 is published, but no one owns it: use after free",
        lambda: pool(2, 0, lambda p: p.publish(2, b"")),
    ),
    (PoolError, "block 0 is published twice", lambda: pool(1, 1, lambda p: p.publish(0, b"x"))),
    (
        PoolError,
        f"block 0 is to be written, but it is published: {ONE_OWNER}",
        lambda: pool(1, 1, lambda p: p.require_writable(0)),
    ),
    (
        PoolError,
        f"block 0 is to be written, but it is owned by 2 tables: {ONE_OWNER}",
        lambda: pool(2, 0, lambda p: p.require_writable(0)),
    ),
    (
        PoolError,
        f"block 2 is to be written, but it is owned by 0 tables: {ONE_OWNER}",
        lambda: pool(2, 0, lambda p: p.require_writable(2)),
    ),
)


# --- traces


def changed(field: str, value: object) -> None:
    """The replay of one step whose plan, or one field of it, says something else; its checksum fits."""
    file = io.StringIO()
    subject = Scheduler(SchedulerConfig(num_blocks=200, block_size=2))
    trace = TraceWriter(file, subject.config)
    request = Request("a", PROMPT, 1)
    subject.add(request)
    trace.add(request, [])
    plan = subject.schedule()
    trace.step(plan, {}, {"a": [5]}, [], reasons(subject.update(plan, {"a": [5]})), (0, 0, 200), None)
    *lines, last = file.getvalue().splitlines()
    step = json.loads(last)
    (step["plan"] if field else step)[field or "plan"] = value
    replay([*lines, json.dumps(sealed(step))])


def told(*lines: object, **changes: object) -> None:
    """The replay of a header with these fields in place of its own (None: without), and of these lines as they are."""
    header = {"kind": "header", "version": 4, "config": asdict(SchedulerConfig(9)), **changes}
    given = {name: value for name, value in header.items() if value is not None}
    replay([json.dumps(line) for line in (sealed(given), *lines)])


END = {"kind": "end", "lines": 1}
BY_HAND = {"checksums": False}
HEADER = "expected header, 4"
PROMPT = tuple(range(100, 300))
CUT = str([{"request_id": "a", "start": 0, "token_ids": list(PROMPT)}])[:200]
TRACES: tuple[Case, ...] = (
    (TraceError, "an empty trace: expected a header line", lambda: replay([])),
    (TraceError, f"line 1: kind 'add', version None: {HEADER}", lambda: replay(['{"kind": "add"}'])),
    (TraceError, f"line 1: kind 'add', version 4: {HEADER}", lambda: replay(['{"kind": "add", "version": 4}'])),
    (TraceError, f"line 1: kind 'header', version 3: {HEADER}: record the run again", lambda: told(version=3)),
    (TraceError, f"line 1: kind 'header', version 5: {HEADER}", lambda: told(version=5)),
    (TraceError, f"line 1: kind 'zeroth', version 4: {HEADER}", lambda: told(kind="zeroth")),
    (TraceError, "line 1: header: unknown field 'modell', expected blas_kernel, ", lambda: told(modell="x")),
    (TraceError, "line 1: header: no field 'config', expected config, kind, version", lambda: told(config=None)),
    (TraceError, "line 1: config: no field 'block_size', expected ", lambda: told(config={})),
    (TraceError, "line 1: checksums 'no': expected true or false", lambda: told(checksums="no")),
    (TraceError, "no end after line 1: the file was cut off, or its run broke off", told),
    (TraceError, "no end after line 1: ", lambda: told(**BY_HAND)),
    (
        TraceError,
        "line 2: the end of 7 lines, expected 1, as many as stand before it",
        lambda: told(END | {"lines": 7}, **BY_HAND),
    ),
    (TraceError, "line 3: behind the end in line 2: expected nothing", lambda: told(END, END, **BY_HAND)),
    (TraceError, "line 2: sha256 None, expected ", lambda: told(END)),
    (TraceError, "line 3: plan.step: the replay has 0, the trace 7", lambda: changed("step", 7)),
    (TraceError, "line 3: plan.step: the replay has 0, the trace -7", lambda: changed("step", -7)),
    (TraceError, "line 3: plan: the replay has {'step': 0, ", lambda: changed("", 5)),
    (TraceError, "line 3: plan.more: the replay has None, the trace 5", lambda: changed("more", 5)),
    (TraceError, "line 3: plan.preempted: the replay has [], the trace ['a']", lambda: changed("preempted", ["a"])),
    (TraceError, f"line 3: plan.scheduled: the replay has {CUT}, the trace []", lambda: changed("scheduled", [])),
    (TraceError, "line 1: not a line of a trace: ", lambda: replay(["{"])),
    (TraceError, "line 1: not a line of a trace: ", lambda: replay(["[]"])),
)


ALL = (*SCHEDULER, *SIZES, *POOL, *TRACES, *ENGINE, *SAMPLING)


@internal(
    "wrong-calls-are-refused",
    "A call that can't be right is refused at once, by the error that says so.",
    7,
    lambda: st.just("all"),
)
def wrong_calls(example: str) -> None:
    """All of them, always: there is nothing to draw."""
    for kind, message, call in ALL:
        try:
            call()
        except kind as error:
            if message not in str(error):
                raise Violation(f"a wrong call is refused with {str(error)!r}, expected {message!r}") from None
            continue
        raise Violation(f"a wrong call was not refused, expected {kind.__name__}: {message}")
