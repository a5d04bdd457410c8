"""Drafts in the pure scheduler: they take what is left over, and rejected ones leave the scheduler as it was."""

import dataclasses
import io
import random
from collections.abc import Iterator

import pytest

from scheduler import (
    POLICIES,
    BatchPlan,
    Request,
    Scheduler,
    SchedulerConfig,
    TraceWriter,
    check,
    most_drafts,
    reasons,
    replay,
)


def random_config(choice: random.Random, policy: str) -> SchedulerConfig:
    num_blocks = choice.randint(6, 40)
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=choice.choice([1, 2, 3, 5, 16]),
        max_num_seqs=choice.randint(1, 8),
        max_num_batched_tokens=choice.randint(1, 40),
        policy=policy,
        prefix_caching=choice.random() < 0.7,
        watermark=choice.choice([0.0, 0.01, 0.2]),
    )


def random_requests(choice: random.Random, config: SchedulerConfig) -> list[tuple[int, Request, list[Request]]]:
    room = config.num_blocks * config.block_size
    drawn = []
    for index in range(25):
        length = choice.randint(1, min(30, room))
        most = choice.randint(1, min(12, room + 1 - length))
        ids = ([7] * choice.randint(0, length) + [choice.randint(0, 3) for _ in range(length)])[:length]
        request = Request(
            f"r{index}",
            tuple(ids),
            most,
            priority=choice.randint(0, 3),
            stop_token_ids=frozenset([5]),
            prompt_logits=choice.random() < 0.2,
        )
        forks = [Request(f"r{index}.{k}", request.prompt_token_ids, most) for k in range(choice.choice([0, 0, 2]))]
        drawn.append((choice.randint(0, 60), request, forks))
    return sorted(drawn, key=lambda pair: pair[0])


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
    return {one.request_id: one.token_ids[one.num_prompt_tokens :] for one in everyone}, step, file.getvalue()


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
