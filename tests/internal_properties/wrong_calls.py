"""Calls that can't be right, and the error that each must meet: its class, and what it names (law 7)."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from hypothesis import strategies as st

from internal_properties.internal import internal
from internal_properties.wrong_engine_calls import CHECKPOINTS, NUMERICS, REQUESTS, Cases
from lfm2np.errors import CheckpointError, NumericsError, RequestError
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


def settled(*calls: Callable[[Scheduler], object]) -> Scheduler:
    """After a step, and these."""
    subject, plan = in_flight()
    subject.update(plan, {"a": [5, 9]})
    for call in calls:
        call(subject)
    return subject


def with_plan(*calls: Callable[[Scheduler, Any], object]) -> None:
    subject, plan = in_flight()
    for call in calls:
        call(subject, plan)


def waiting() -> Request:
    return Request("b", (1,), 1)


def forked(prompt: tuple[int, ...], most: int, salt: str = "m") -> None:
    settled().fork("a", Request("b", prompt, most, cache_salt=salt))


FORK = "request 'b': a fork needs the prompt of 'a'"
PLANS: Cases = (
    ("step 0: request 'a' got (), expected 1 to 4 tokens", lambda: answered({})),
    ("got (5, 6), expected 1 token", lambda: answered({"a": [5, 6]}, ())),
    ("got (5, 6, 7, 8, 9), expected 1 to 4 tokens", lambda: answered({"a": [5, 6, 7, 8, 9]})),
    ("got (4, 9), expected all but the last to be its first drafts (5, 6, 7)", lambda: answered({"a": [4, 9]})),
    ("got (8, 9), expected all but the last to be", lambda: answered({"a": [8, 9]})),
    ("got (5, 6, 9), but token 6 ends it", lambda: answered({"a": [5, 6, 9]})),
    ("step 0: tokens for 'b', which was not asked for any", lambda: answered({"a": [5, 9], "b": [1]})),
    ("step 0: an error of 'b', which it does", lambda: with_plan(lambda s, p: s.update(p, {"a": [5, 9]}, ["b"]))),
    ("step 0: drafts for 'a', which can't take any", lambda: with_plan(lambda s, p: s.add_drafts(p, {"a": [5]}))),
    ("schedule() while step 0 is in flight", lambda: with_plan(lambda s, p: s.schedule())),
    ("fork() while step 0 is in flight", lambda: with_plan(lambda s, p: s.fork("a", waiting()))),
    ("preempt() while step 0 is in flight", lambda: with_plan(lambda s, p: s.preempt("a"))),
    ("add_drafts() for step 0, which is not in flight", lambda: with_plan(lambda s, p: s.add_drafts(replace(p), {}))),
    ("update() for step 0, which is not in", lambda: with_plan(lambda s, p: s.update(replace(p), {"a": [5, 9]}))),
    ("drafts for 'b', which can't take any", lambda: with_plan(lambda s, p: s.add_drafts(p, {"b": [1]}))),
    ("step 0: drafts for 'a', which can't take any", lambda: drafts_too_early("z", budget=8)),
    ("step 0: drafts for 'a', which can't take any", lambda: drafts_too_early("A", budget=8)),
    ("step 0: drafts for 'a', which can't take any", lambda: drafts_too_early(None, budget=2)),
)
REFUSED: Cases = (
    ("request id 'a' is already in use", lambda: settled().add(Request("a", (1,), 1))),
    ("request id 'b' is already in use", lambda: settled().add(waiting(), [waiting()])),
    (
        "request 'b': 30 prompt tokens and max_tokens=30 need 30 blocks of 2; the pool has 20",
        lambda: settled().add(Request("b", (1,) * 30, 30)),
    ),
    (FORK, lambda: forked((1, 2), 9)),
    (FORK, lambda: forked((1, 2, 4), 9)),
    (FORK, lambda: forked((1, 2, 3), 9, "x")),
    (FORK, lambda: forked((1, 2, 3), 9, "a")),
    ("max_tokens 2, but 'a' already has 2 output tokens", lambda: forked((1, 2, 3), 2)),
    ("max_tokens 1, but 'a' already has 2 output tokens", lambda: forked((1, 2, 3), 1, "".join(("m", "")))),
    ("'b': not known, or finished", lambda: settled().finish("b", FinishReason.ABORT)),
    ("'a': not known, or finished", lambda: settled(lambda s: s.abort("a"), lambda s: s.abort("a"))),
    ("'a': not known, or finished", lambda: with_plan(lambda s, p: s.abort("a"), lambda s, p: s.abort("a"))),
    ("'b': waiting, can't be preempted", lambda: settled(lambda s: s.add(waiting()), lambda s: s.preempt("b"))),
    ("'a': preempted, can't be preempted", lambda: settled(lambda s: s.preempt("a"), lambda s: s.preempt("a"))),
    ("request id '': expected a string that is not empty", lambda: Request("", (1,), 1)),
    ("request id 1: expected a string that is not empty", lambda: Request(1, (1,), 1)),  # type: ignore[arg-type]
    ("'a': prompt of 0 tokens, expected at least 1", lambda: Request("a", (), 1)),
    ("'a': max_tokens 0, expected at least 1", lambda: Request("a", (1,), 0)),
    ("'a': max_tokens -1, expected at least 1", lambda: Request("a", (1,), -1)),
)


# --- sizes

LEAST = {"num_blocks": 1, "block_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_waiting_tokens": 0}
POLICY_NAMES = f"one of {', '.join(POLICIES)}"
RATIO = "a number, at least 0"
WRONG_SIZES: tuple[tuple[str, Any, str], ...] = (
    *(
        (name, value, f"a whole number, at least {least}")
        for name, least in LEAST.items()
        for value in (least - 1, least - 2, float(least + 1), str(least), True, None)
    ),
    *(("policy", value, POLICY_NAMES) for value in ("none", ["fcfs"])),
    *(("watermark", value, "0 <= watermark < 1") for value in (1.0, 1.5, -0.1, float("nan"))),
    *(("watermark", value, "a number") for value in ("x", True)),
    *(("waiting_served_ratio", value, RATIO) for value in (-1.0, 1e9, float("inf"))),
    ("waiting_served_ratio", None, "a number"),
)


def sized(name: str, value: object, expected: str) -> tuple[str, Callable[[], object]]:
    options: dict[str, Any] = {"num_blocks": 1, name: value}
    return f"{name} {value!r}: expected {expected}", lambda: SchedulerConfig(**options)


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


POOL: Cases = (
    ("a pool of 0 blocks: expected at least 1", lambda: BlockPool(0)),
    ("a pool of -1 blocks: expected at least 1", lambda: BlockPool(-1)),
    ("no block is free: all 3 are owned", lambda: pool(3, 0, lambda p: p.allocate())),
    ("no block is free: all 300 are owned", lambda: exhausted(300)),
    ("block 0 is free: it can't be shared", lambda: pool(0, 0, lambda p: p.share(0))),
    ("block 3: expected 0 to 2", lambda: pool(0, 0, lambda p: p.share(3))),
    ("block 300: expected 0 to 299", lambda: BlockPool(300).share(300)),
    ("block -1: expected 0 to 2", lambda: pool(0, 0, lambda p: p.release(-1))),
    ("block 1 is released, but no one owns it", lambda: pool(1, 0, lambda p: p.release(1))),
    ("block 1 is released, but no one owns it", lambda: pool(2, 0, lambda p: p.release_table((1, 1)))),
    ("block 2 is published, but no one owns it", lambda: pool(2, 0, lambda p: p.publish(2, b""))),
    ("block 0 is published twice", lambda: pool(1, 1, lambda p: p.publish(0, b"x"))),
    ("block 0 is to be written, but it is published", lambda: pool(1, 1, lambda p: p.require_writable(0))),
    ("block 0 is to be written, but it is owned by 2", lambda: pool(2, 0, lambda p: p.require_writable(0))),
    ("block 2 is to be written, but it is owned by 0", lambda: pool(2, 0, lambda p: p.require_writable(2))),
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
PROMPT = tuple(range(100, 300))
CUT = str([{"request_id": "a", "start": 0, "token_ids": list(PROMPT)}])[:200]
TRACES: Cases = (
    ("an empty trace: expected a header line", lambda: replay([])),
    ("line 1: kind 'add', version None: expected header, 4", lambda: replay(['{"kind": "add"}'])),
    ("line 1: kind 'add', version 4: expected header, 4", lambda: replay(['{"kind": "add", "version": 4}'])),
    ("version 3: expected header, 4: record the run again", lambda: told(version=3)),
    ("version 5: expected header, 4", lambda: told(version=5)),
    ("line 1: kind 'zeroth', version 4", lambda: told(kind="zeroth")),
    ("line 1: header: unknown field 'modell', expected blas_kernel, ", lambda: told(modell="x")),
    ("line 1: header: no field 'config', expected config, kind, version", lambda: told(config=None)),
    ("line 1: config: no field 'block_size', expected ", lambda: told(config={})),
    ("line 1: checksums 'no': expected true or false", lambda: told(checksums="no")),
    ("no end after line 1: the file was cut off, or its run broke off", told),
    ("no end after line 1: ", lambda: told(**BY_HAND)),
    ("line 2: the end of 7 lines, expected 1", lambda: told(END | {"lines": 7}, **BY_HAND)),
    ("line 3: behind the end in line 2", lambda: told(END, END, **BY_HAND)),
    ("line 2: sha256 None, expected ", lambda: told(END)),
    ("line 3: plan.step: the replay has 0, the trace 7", lambda: changed("step", 7)),
    ("line 3: plan: the replay has {'step': 0, ", lambda: changed("", 5)),
    ("line 3: plan.more: the replay has None, the trace 5", lambda: changed("more", 5)),
    ("line 3: plan.preempted: the replay has [], the trace ['a']", lambda: changed("preempted", ["a"])),
    (f"line 3: plan.scheduled: the replay has {CUT}, the trace []", lambda: changed("scheduled", [])),
    ("line 1: not a line of a trace: ", lambda: replay(["{"])),
    ("line 1: not a line of a trace: ", lambda: replay(["[]"])),
)
ALL: tuple[tuple[type[Exception], Cases], ...] = (
    (PlanError, PLANS),
    (RequestRefused, (*REFUSED, *(sized(*each) for each in WRONG_SIZES))),
    (PoolError, POOL),
    (TraceError, TRACES),
    (RequestError, REQUESTS),
    (CheckpointError, CHECKPOINTS),
    (NumericsError, NUMERICS),
)


@internal(
    "wrong-calls-are-refused",
    "A call that can't be right is refused at once, by the error that says so.",
    7,
    lambda: st.just("all"),
)
def wrong_calls(example: str) -> None:
    """All of them, always: there is nothing to draw."""
    for kind, message, call in [(kind, *case) for kind, cases in ALL for case in cases]:
        try:
            call()
        except kind as error:
            if message not in str(error):
                raise Violation(f"a wrong call is refused with {str(error)!r}, expected {message!r}") from None
            continue
        raise Violation(f"a wrong call was not refused, expected {kind.__name__}: {message}")
