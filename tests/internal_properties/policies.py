"""The policies: their bounds, and exactly who is admitted."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from internal_properties.internal import internal, require
from lfm2np.suite.properties.property import Violation
from scheduler import BatchPlan, Request, Scheduler, SchedulerConfig

LONGEST_WAIT = 9  # steps between two tokens of a decode under prefill-first: eight without, then one with


def answer(subject: Scheduler, plan: BatchPlan) -> None:
    subject.update(plan, {name: [9] for entry in plan.scheduled for name in entry.samples})


@internal(
    "waiting-served-counts",
    "Under waiting-served the queue is let in as soon as the ratio, or the count of decode steps, says so.",
    4,
    lambda: st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(0, 8), st.integers(0, 6)),
    weight=5.0,
)
def waiting_served_counts(example: tuple[int, int, int, int]) -> None:
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
    require(decodes, expected, "decode steps until the queue is let in", example)
    require([entry.request_id for entry in plan.scheduled], list(plan.admitted), "scheduled", "decoding does not pause")


@internal(
    "batches-meet-limits",
    "Under waiting-served a batch enters up to the last slot and the last block beside the watermark.",
    7,
    lambda: st.tuples(st.integers(1, 6), st.integers(0, 9), st.integers(-1, 2), st.integers(-1, 2), st.integers(0, 4)),
    weight=10.0,
)
def batches_meet_limits(example: tuple[int, int, int, int, int]) -> None:
    """As many run as the batch must have; slots, or blocks beside the watermark, are about as many as that takes."""
    running, waiting, spare_slots, spare_blocks, watermark = example
    num_blocks = 2 * running + watermark + spare_blocks
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_num_seqs=2 * running + spare_slots,
        policy="waiting-served",
        waiting_served_ratio=1.0,
        watermark=min(0.99, (watermark + 0.5) / num_blocks),
    )
    subject = Scheduler(config)
    for index in range(running):
        subject.add(Request(f"r{index}", (1, 2, index), 9))
    answer(subject, subject.schedule())
    require(len(subject.running), running, "run, as they fit beside the watermark:", config)
    for index in range(waiting):
        subject.add(Request(f"w{index}", (1, 3, index), 9))
    most = min(waiting, config.max_num_seqs - running, num_blocks - running - int(config.watermark * num_blocks))
    expected = [f"w{index}" for index in range(most)] if most >= running else []
    require(list(subject.schedule().admitted), expected, f"admitted of {waiting} beside {running}:", config)


@st.composite
def crowds(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[int, int]], list[tuple[int, int]]]:
    """Sizes, those that come first and those that come later: (prompt tokens, max_tokens) each."""
    config = {
        "policy": draw(st.sampled_from(("waiting-served", "static"))),
        "num_blocks": draw(st.integers(6, 40)),
        "block_size": draw(st.integers(1, 3)),
        "max_num_seqs": draw(st.integers(3, 8)),
        "max_num_batched_tokens": draw(st.integers(2, 16)),
        "watermark": draw(st.sampled_from((0.0, 0.15, 0.3))),
        "waiting_served_ratio": draw(st.sampled_from((1.0, 1.5, 2.0, 0.5, 0.0))),
    }
    prompts = st.integers(1, 6)
    early = draw(st.lists(st.tuples(prompts, st.integers(3, 6)), min_size=1, max_size=3))
    late = draw(st.lists(st.tuples(prompts, st.integers(1, 6)), min_size=2, max_size=6))
    return config, early, late


@internal(
    "batches-fit",
    "Under waiting-served and static exactly those enter that fit together, with their whole length.",
    7,
    crowds,
    weight=20.0,
)
def batches_fit(example: tuple[dict[str, Any], list[tuple[int, int]], list[tuple[int, int]]]) -> None:
    """Whole requests enter, in order, as long as they fit; under waiting-served a batch that is too small does not."""
    wishes, early, late = example
    config = SchedulerConfig(max_waiting_tokens=1000, prefix_caching=False, **wishes)
    subject = Scheduler(config)
    for index, (prompt, most) in enumerate(early + late):
        if index == len(early):
            expected = expected_batch(subject)
            plan = subject.schedule()
            require(list(plan.admitted), expected, "admitted", "the first batch")
            answer(subject, plan)
        if -(-(prompt + most - 1) // config.block_size) <= config.num_blocks:
            subject.add(Request(str(index), (7,) * prompt, most))
    must_decode = False  # after decodes paused for a batch
    while subject.has_unfinished:
        decoding = [request.request_id for request in subject.running if request.is_decoding]
        prefilling = {request.request_id for request in subject.running if not request.is_decoding}
        expected = [] if must_decode else expected_batch(subject)
        plan = subject.schedule()
        if prefilling and not {entry.request_id for entry in plan.scheduled} <= prefilling:
            raise Violation(f"step {plan.step}: decoding does not pause while {prefilling} are computed")
        if expected:
            must_decode = bool(decoding)
        elif any(entry.request_id in decoding for entry in plan.scheduled):
            must_decode = False
        require(list(plan.admitted), expected, "admitted", f"step {plan.step}")
        answer(subject, plan)


def expected_batch(subject: Scheduler) -> list[str]:
    """Who enters: nobody beside a prompt that is being computed; at least the ratio's number beside decodes.

    A static batch has no one beside it, and does not look at the token budget.
    """
    config, running, waiting = subject.config, subject.running, list(subject.waiting)
    is_static = config.policy == "static"
    if any(is_static or not request.is_decoding for request in running):
        return []
    least = max(1, int(len(running) * config.waiting_served_ratio)) if running else 0
    entered: list[Request] = []
    tokens = blocks = 0
    for request in waiting:
        beside = bool(running or entered)
        spare = int(config.watermark * config.num_blocks) if beside else 0
        tokens += request.num_prompt_tokens
        blocks += -(-(request.num_prompt_tokens + request.max_tokens - 1) // config.block_size)
        before, most = tokens - request.num_prompt_tokens, config.max_num_batched_tokens
        no_tokens = not is_static and (before >= most or (entered and tokens > most))
        no_slot = len(running) + len(entered) == config.max_num_seqs
        if no_slot or no_tokens or blocks > subject.pool.num_free - spare:
            break
        entered.append(request)
    return [request.request_id for request in entered] if len(entered) >= least else []


@internal(
    "decodes-wait-their-turn",
    "Under prefill-first a decode waits eight steps behind prompts, no more and no less.",
    7,
    lambda: st.tuples(st.integers(2, 10), st.integers(3, 5), st.integers(1, 12)),
)
def decodes_wait_their_turn(example: tuple[int, int, int]) -> None:
    """Prompts that fill every step and end with their first token: the worst stream for a decode."""
    budget, slots, chunks = example
    config = SchedulerConfig(
        num_blocks=120, block_size=2, max_num_seqs=slots, max_num_batched_tokens=budget, policy="prefill-first"
    )
    subject = Scheduler(config)
    subject.add(Request("target", (1,) * (chunks * budget), 4))
    first = max(chunks, LONGEST_WAIT - 1)  # its prompt was of steps without decodes, too
    expected = [*range(chunks), *(first + LONGEST_WAIT * turn for turn in range(3))]
    served = []
    for step in range(expected[-1] + 1):
        plan = subject.schedule()
        served += [step] * any(entry.request_id == "target" for entry in plan.scheduled)
        answer(subject, plan)
        subject.add(Request(f"p{step}", tuple(100 * step + place for place in range(budget)), 1))
    require(served, expected, "steps that serve a decode", "behind prompts")


@internal(
    "decodes-go-first",
    "Under prefill-first a decode that is due goes before an older prompt.",
    7,
    lambda: st.tuples(st.integers(2, 5), st.integers(1, 14)),
)
def decodes_go_first(example: tuple[int, int]) -> None:
    """A long prompt that is computed again, and that came before: a decode waits eight steps behind it, no more."""
    budget, chunks = example
    subject = Scheduler(
        SchedulerConfig(
            num_blocks=200, block_size=2, max_num_batched_tokens=budget, policy="prefill-first", prefix_caching=False
        )
    )
    subject.add(Request("old", (1,) * (budget * chunks), 4))
    subject.add(Request("target", (2,), 4))
    while not all(request.is_decoding for request in subject.running) or len(subject.running) < 2:
        answer(subject, subject.schedule())
    answer(subject, subject.schedule())  # both decode
    subject.preempt("old")
    full_steps = subject.requests["old"].num_tokens // budget
    due = min(full_steps, LONGEST_WAIT - 1)
    for step in range(due + 1):
        plan = subject.schedule()
        served = [entry.request_id for entry in plan.scheduled]
        require("target" in served, step == due, "is served:", f"step {step} after a prompt of {full_steps} steps")
        answer(subject, plan)


@internal(
    "priority-is-worth-steps",
    "One level of priority is worth a thousand steps of waiting, no more and no less.",
    7,
    lambda: st.tuples(st.integers(0, 2), st.integers(-1, 1), st.integers(1, 1500)),
    weight=3.0,
)
def priority_is_worth_steps(example: tuple[int, int, int]) -> None:
    levels, later, step = example
    subject = Scheduler(SchedulerConfig(num_blocks=8, max_num_seqs=1, policy="priority"))
    subject.step = step
    subject.add(Request("patient", (1,), 1, priority=levels))
    subject.step = step + 1000 * levels + later
    subject.add(Request("urgent", (1,), 1))
    first = "patient" if later >= 0 else "urgent"
    plan = subject.schedule()
    require(plan.admitted, (first,), "admitted", f"{subject.step - step} steps after one of priority {levels}")
