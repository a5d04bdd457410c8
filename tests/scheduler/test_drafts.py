"""Drafts in the pure scheduler: they take what is left over, and rejected ones leave the scheduler as it was."""

import dataclasses
import io
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest
from test_random_schedules import random_config, random_requests

from scheduler import (
    POLICIES,
    BatchPlan,
    PlanError,
    Request,
    Scheduler,
    SchedulerConfig,
    TraceWriter,
    check,
    most_drafts,
    reasons,
    replay,
)


def next_token(request: Request, ahead: int) -> int:
    """What a model would say `ahead` tokens after the newest: a function of id and position, 5 is a stop token."""
    place = f"{request.request_id}:{request.num_output_tokens + ahead}"
    return random.Random(place).randint(0, 6)


def takers(subject: Scheduler, plan: BatchPlan) -> Iterator[Request]:
    for entry in plan.scheduled:
        if entry.samples == (entry.request_id,):
            yield subject.requests[entry.request_id]


def answers(subject: Scheduler, plan: BatchPlan) -> dict[str, list[int]]:
    """Every sampled request's tokens: drafts as long as they are what the model says, then one more."""
    tokens_by_request: dict[str, list[int]] = {}
    for entry in plan.scheduled:
        for name in entry.samples:
            if name not in subject.requests or subject.requests[name].is_finished:
                continue  # aborted
            request = subject.requests[name]
            drafts, tokens = entry.drafts, [next_token(request, 0)]
            while request.reason_to_end(tokens[-1], request.num_output_tokens + len(tokens)) is None:
                if len(tokens) > len(drafts) or tokens[-1] != drafts[len(tokens) - 1]:
                    break
                tokens.append(next_token(request, len(tokens)))
            tokens_by_request[name] = tokens
    return tokens_by_request


def state_of(subject: Scheduler) -> tuple[object, ...]:
    """All that a later plan depends on."""
    requests = [
        (
            request.request_id,
            request.status,
            request.token_ids,
            request.num_computed_tokens,
            tuple(request.tables),
            request.slot,
        )
        for request in subject.requests.values()
    ]
    pool, cache = subject.pool, subject.prefix_cache
    return (requests, pool.free_order(), pool.block_of, pool.references, subject.memory.free_slots, cache.statistics)


def without_drafts(plan: BatchPlan) -> BatchPlan:
    entries = []
    for entry in plan.scheduled:
        stop = entry.stop - entry.num_drafts
        entries.append(
            dataclasses.replace(
                entry,
                token_ids=entry.token_ids[: stop - entry.start],
                num_drafts=0,
                block_table=(),
                checkpoints=tuple(checkpoint for checkpoint in entry.checkpoints if checkpoint[0] <= stop),
            )
        )
    return dataclasses.replace(plan, scheduled=tuple(entries))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(5))
def test_rejected_drafts_leave_the_scheduler_as_if_there_had_been_none(policy: str, seed: int):
    """Side by side with a scheduler that gets none: the same plans, tables, free list, keys, statistics."""
    config = random_config(random.Random(seed), policy)
    plain, lied = Scheduler(config), Scheduler(config)
    arrivals = [random_requests(random.Random(seed + 1000), config) for _ in range(2)]
    choice, step, drafted = random.Random(seed), 0, 0
    while arrivals[0] or plain.has_unfinished:
        while arrivals[0] and arrivals[0][0][0] <= step:
            for subject, left in zip((plain, lied), arrivals, strict=True):
                _, request, forks = left.pop(0)
                subject.add(request, forks)
        plan, other = plain.schedule(), lied.schedule()
        lies = {
            taker.request_id: [(next_token(taker, 0) + 1) % 7] * choice.randint(1, 6) for taker in takers(lied, other)
        }
        evictions = lied.pool.evictions
        other = lied.add_drafts(other, lies)
        assert other.num_tokens <= config.max_num_batched_tokens
        assert lied.pool.evictions == evictions
        assert without_drafts(other) == without_drafts(plan)
        drafted += sum(entry.num_drafts for entry in other.scheduled)
        unfinished = [live.request_id for live in plain.requests.values() if not live.is_finished]
        if unfinished and choice.random() < 0.05:
            name = choice.choice(unfinished)
            plain.abort(name), lied.abort(name)  # in flight
        errors = [entry.request_id for entry in plan.scheduled if choice.random() < 0.01]
        finished = [one.request_id for one in plain.update(plan, answers(plain, plan), errors)]
        assert [one.request_id for one in lied.update(other, answers(lied, other), errors)] == finished
        check(lied)
        assert state_of(lied) == state_of(plain)
        step += 1
    assert not lied.has_unfinished
    assert drafted > 0 or config.max_num_batched_tokens == 1 or policy == "static"


def run(config: SchedulerConfig, seed: int, right: float) -> tuple[dict[str, list[int]], int, str]:
    """Outputs, steps and the trace of a random run whose drafts are right with that probability, token by token."""
    subject, choice, step = Scheduler(config), random.Random(seed), 0
    file = io.StringIO()
    trace = TraceWriter(file, config)
    left, everyone = random_requests(random.Random(seed), config), []
    while left or subject.has_unfinished:
        while left and left[0][0] <= step:
            _, request, forks = left.pop(0)
            subject.add(request, forks)
            trace.add(request, forks)
            everyone += [request, *forks]
        plan, drafts = subject.schedule(), {}
        for one in takers(subject, plan):
            tokens = [next_token(one, ahead) for ahead in range(choice.randint(0, 9))]
            drafts[one.request_id] = [t if choice.random() < right else (t + 1) % 7 for t in tokens]
        if right:
            plan = subject.add_drafts(plan, drafts)
        for entry in plan.scheduled:
            assert entry.num_drafts <= max(0, most_drafts(subject.requests[entry.request_id]))
            assert len(entry.block_table) == -(-entry.stop // config.block_size)
            assert len(set(entry.block_table)) == len(entry.block_table)
        assert plan.num_tokens <= config.max_num_batched_tokens
        tokens = answers(subject, plan)
        finished = reasons(subject.update(plan, tokens))
        state = (len(subject.waiting), len(subject.running), subject.pool.num_free)
        trace.step(plan, drafts if right else {}, tokens, [], finished, state, None)
        check(subject)
        step += 1
    trace.end()
    assert subject.pool.num_free == config.num_blocks
    return {one.request_id: one.output_token_ids for one in everyone}, step, file.getvalue()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4))])
def test_any_drafts_give_the_same_outputs_within_the_budget_and_replay(policy: str, seed: int):
    config = random_config(random.Random(seed), policy)
    plain, steps, _ = run(config, seed, right=0.0)
    for right in (0.5, 1.0):
        outputs, fewer, trace = run(config, seed, right)
        assert outputs == plain
        assert fewer <= steps * 1.3 + 5
        replayed = replay(trace.splitlines())
        assert {name: ids for name, ids in outputs.items() if ids} == replayed.outputs


def test_right_drafts_are_taken_whole():
    subject = Scheduler(SchedulerConfig(num_blocks=20, block_size=2))
    request = Request("a", (1, 2, 3), 9)
    subject.add(request)
    plan = subject.add_drafts(subject.schedule(), {"a": [11, 12, 13, 14]})
    (entry,) = plan.scheduled
    assert (entry.token_ids, entry.drafts, entry.num_drafts) == ((1, 2, 3, 11, 12, 13, 14), (11, 12, 13, 14), 4)
    assert len(entry.block_table) == 4
    subject.update(plan, {"a": [11, 12, 99]})
    assert (request.output_token_ids, request.num_computed_tokens) == ([11, 12, 99], 5)
    assert len(request.tables[0]) == 3
    assert len(subject.pool.block_of) == 2, "the block of 2, 3 and 11 is published, with the accepted token only"
    check(subject)


@pytest.mark.parametrize(
    ("tokens", "fragment"),
    [
        ({}, "1 to 3 tokens"),
        ({"a": []}, "1 to 3 tokens"),
        ({"a": [11, 12, 13, 14]}, "1 to 3 tokens"),
        ({"a": [12, 13]}, "its first drafts"),
        ({"a": [11, 11, 13]}, "its first drafts"),
        ({"a": [11], "b": [1]}, "'b', which was not asked"),
    ],
)
def test_answers_that_the_plan_does_not_allow_are_refused(tokens: Mapping[str, Sequence[int]], fragment: str):
    subject = Scheduler(SchedulerConfig(num_blocks=20, block_size=2))
    subject.add(Request("a", (1, 2, 3), 9))
    plan = subject.add_drafts(subject.schedule(), {"a": [11, 12]})
    before = state_of(subject)
    with pytest.raises(PlanError, match=fragment):
        subject.update(plan, tokens)
    assert state_of(subject) == before, "no change"
    subject.update(plan, {"a": [11, 7]})
    check(subject)


def test_tokens_after_the_one_that_ends_a_request_are_refused():
    for request in (Request("a", (1, 2), 9, stop_token_ids=frozenset([11])), Request("a", (1, 2), 9)):
        subject = Scheduler(SchedulerConfig(num_blocks=20, block_size=2))
        subject.add(request)
        plan = subject.add_drafts(subject.schedule(), {"a": [11, 12]})
        if request.stop_token_ids:
            with pytest.raises(PlanError, match="token 11 ends it"):
                subject.update(plan, {"a": [11, 12]})
            assert subject.update(plan, {"a": [11]}) == [request]
        else:
            assert subject.update(plan, {"a": [11, 12]}) == []


def test_drafts_for_a_request_that_takes_none_are_refused():
    """In the middle of a prompt, before its samples are split off, or not in the plan at all."""
    subject = Scheduler(SchedulerConfig(num_blocks=20, block_size=2, max_num_batched_tokens=4))
    subject.add(Request("long", (1,) * 6, 3))
    subject.add(Request("later", (1,), 3))
    plan = subject.schedule()
    for name in ("long", "later", "nobody"):
        with pytest.raises(PlanError, match=f"drafts for '{name}'"):
            subject.add_drafts(plan, {name: [1]})
    subject.update(plan, {})
    with pytest.raises(PlanError, match="not in flight"):
        subject.add_drafts(plan, {})
    forked = Scheduler(SchedulerConfig(num_blocks=20))
    forked.add(Request("a", (1, 2), 3), [Request("b", (1, 2), 3)])
    with pytest.raises(PlanError, match="drafts for 'a'"):
        forked.add_drafts(forked.schedule(), {"a": [1]})


def test_a_draft_never_takes_a_cached_block():
    """Two blocks in all: one is needed, one holds a prefix that may be wanted again."""
    subject = Scheduler(SchedulerConfig(num_blocks=2, block_size=2))
    subject.add(Request("a", (1, 2), 1))
    subject.update(subject.schedule(), {"a": [3]})
    subject.add(Request("b", (5, 6), 3))
    plan = subject.add_drafts(subject.schedule(), {"b": [7, 8]})
    assert [entry.drafts for entry in plan.scheduled] == [()]
    assert len(subject.pool.block_of) == 1
