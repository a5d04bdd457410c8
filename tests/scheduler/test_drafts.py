"""Drafts in the pure scheduler: rejected ones leave it as if there had been none.

What accepted ones do: internal_properties/schedules.py.
"""

import random
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler import POLICIES, BatchPlan, Request, Scheduler, SchedulerConfig, check

SIZES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 40),
        "block_size": st.sampled_from([1, 2, 3, 5, 16]),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(1, 40),
        "policy": st.sampled_from(sorted(POLICIES)),
        "prefix_caching": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.01, 0.2]),
    }
)
STOP = 5


def arrivals(choice: random.Random, config: SchedulerConfig) -> list[list[Request]]:
    """By step, each with the samples that are split off it; prompts begin alike."""
    room, drawn = config.num_blocks * config.block_size, []
    for index in range(12):
        length = choice.randint(1, min(30, room))
        most = choice.randint(1, min(12, room + 1 - length))
        ids = ([7] * choice.randint(0, length) + [choice.randint(0, 3) for _ in range(length)])[:length]
        names = [f"r{index}", *(f"r{index}.{k}" for k in range(choice.choice([0, 0, 2])))]
        drawn.append([Request(name, tuple(ids), most, stop_token_ids=frozenset([STOP])) for name in names])
        drawn[-1][0].priority, drawn[-1][0].prompt_logits = choice.randint(0, 3), choice.random() < 0.2
        drawn += [[]] * choice.randint(0, 4)
    return drawn


def answers(subject: Scheduler, plan: BatchPlan) -> dict[str, list[int]]:
    """One token for each that samples: a function of id and position, which no draft is."""
    sampled = [name for entry in plan.scheduled for name in entry.samples if name in subject.requests]
    alive = [subject.requests[name] for name in sampled if not subject.requests[name].is_finished]
    return {each.request_id: [random.Random(f"{each.request_id}:{each.num_tokens}").randint(0, 6)] for each in alive}


def state_of(subject: Scheduler) -> tuple[object, ...]:
    """All that a later plan depends on."""
    pool, live = subject.pool, subject.requests.values()
    requests = [
        (each.request_id, each.status, list(each.token_ids), each.num_computed_tokens, each.slot) for each in live
    ]
    tables = [tuple(each.tables) for each in live]
    kept = pool.free_order(), pool.block_of, pool.references, subject.memory.free_slots, subject.prefix_cache.statistics
    return requests, tables, *kept


@given(SIZES, st.integers(0, 2**32))
def test_rejected_drafts_leave_the_scheduler_as_if_there_had_been_none(sizes: dict[str, Any], seed: int):
    """Side by side with a scheduler that gets none: the same plans, tables, free list, keys, statistics."""
    config, choice = SchedulerConfig(**sizes), random.Random(seed)
    plain, lied = Scheduler(config), Scheduler(config)
    left = [arrivals(random.Random(seed), config) for _ in range(2)]
    while left[0] or plain.has_unfinished:
        for subject, waves in zip((plain, lied), left, strict=True):
            if waves and (wave := waves.pop(0)):
                subject.add(wave[0], wave[1:])
        plan, other = plain.schedule(), lied.schedule()
        takers = [entry.request_id for entry in other.scheduled if entry.samples == (entry.request_id,)]
        evictions = lied.pool.evictions
        other = lied.add_drafts(other, {name: [8] * choice.randint(1, 6) for name in takers})
        assert other.num_tokens <= config.max_num_batched_tokens
        assert lied.pool.evictions == evictions
        bare = tuple(entry.without_drafts(config.block_size) for entry in other.scheduled)
        assert replace(other, scheduled=bare) == plan
        unfinished = [live.request_id for live in plain.requests.values() if not live.is_finished]
        if unfinished and choice.random() < 0.05:
            name = choice.choice(unfinished)
            plain.abort(name), lied.abort(name)  # in flight
        errors = [entry.request_id for entry in plan.scheduled if choice.random() < 0.01]
        finished = [each.request_id for each in plain.update(plan, answers(plain, plan), errors)]
        assert [each.request_id for each in lied.update(other, answers(lied, other), errors)] == finished
        check(lied)
        assert state_of(lied) == state_of(plain)
