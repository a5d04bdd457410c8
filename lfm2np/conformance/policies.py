"""Demands on the scheduler's policies: the bounds that policy.py states, where no token shows them."""

from __future__ import annotations

from hypothesis import strategies as st

from lfm2np.conformance.demands import Property
from lfm2np.conformance.driver import Violation
from lfm2np.conformance.protocol import Factory
from scheduler import BatchPlan, Request, Scheduler, SchedulerConfig

LONGEST_WAIT = 9  # steps between two tokens of a decode under prefill-first: eight without, then one with


def answer(subject: Scheduler, plan: BatchPlan) -> None:
    subject.update(plan, {name: [9] for entry in plan.scheduled for name in entry.samples})


def waiting_served_counts(factory: Factory, example: tuple[int, int, int, int]) -> None:
    """TGI's rule: the queue is let in once floor(running * ratio) wait, or after so many decode steps."""
    running, waiting, quarters, most = example
    config = SchedulerConfig(
        num_blocks=100, policy="waiting-served", waiting_served_ratio=quarters / 4, max_waiting_tokens=most
    )
    subject = Scheduler(config)
    for index in range(running):
        subject.add(Request(f"r{index}", (1, 2, index), 50))
    answer(subject, subject.schedule())
    for index in range(waiting):
        subject.add(Request(f"w{index}", (1, 3, index), 50))
    decodes = 0
    while True:
        plan = subject.schedule()
        if plan.admitted:
            break
        answer(subject, plan)
        decodes += 1
        if decodes > most + 1:
            raise Violation(f"{waiting} wait beside {running} that run: not let in after {decodes} decode steps")
    expected = 0 if waiting >= running * quarters // 4 else max(0, most - 1)
    if decodes != expected:
        raise Violation(
            f"{waiting} wait beside {running} that run, ratio {quarters / 4}, max_waiting_tokens {most}: let in after "
            f"{decodes} decode steps, expected {expected}"
        )
    if [entry.request_id for entry in plan.scheduled] != list(plan.admitted):
        raise Violation("the queue is let in, but decoding does not pause")


def decodes_wait_at_most(factory: Factory, example: tuple[int, int]) -> None:
    """Prompts that fill every step and end with their first token: the worst stream for a decode."""
    budget, slots = example
    config = SchedulerConfig(
        num_blocks=80, block_size=2, max_num_seqs=slots, max_num_batched_tokens=budget, policy="prefill-first"
    )
    subject = Scheduler(config)
    target = Request("target", (1,), 4)
    subject.add(target)
    answer(subject, subject.schedule())
    waited = 0
    for step in range(60):
        subject.add(Request(f"p{step}", tuple(range(budget)), 1))
        plan = subject.schedule()
        served = any(entry.request_id == "target" for entry in plan.scheduled)
        answer(subject, plan)
        waited = 0 if served else waited + 1
        if target.is_finished:
            return
        if waited >= LONGEST_WAIT:
            raise Violation(f"a decode waits {waited} steps behind prompts, the bound is {LONGEST_WAIT - 1}")
    raise Violation(f"a decode of 4 tokens did not end within 60 steps of at most {LONGEST_WAIT} each")


POLICIES: tuple[Property, ...] = (
    Property(
        "waiting-served-counts",
        "Under waiting-served the queue is let in as soon as the ratio, or the count of decode steps, says so.",
        4,
        ("own",),
        (),
        lambda: st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(0, 8), st.integers(1, 6)),
        waiting_served_counts,
    ),
    Property(
        "decodes-wait-at-most",
        "Under prefill-first no decode waits more than eight steps.",
        7,
        ("own",),
        (),
        lambda: st.tuples(st.integers(2, 10), st.integers(2, 4)),
        decodes_wait_at_most,
        0.3,
    ),
)
