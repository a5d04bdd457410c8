"""Leaping over steps of decodes leaves all that the scheduler holds as taking them would: schedules of all policies."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from lfm2np.commands.simulate.leap import Leap, leap, most_steps
from scheduler import POLICIES, BatchPlan, PlanError, Request, RequestRefused, Scheduler, SchedulerConfig, check

END = 9  # stops who listens to it
DRAWN = 60  # schedules
RARE = (202,)  # of those: windowed blocks run out in a leap


def drawn_config(rng: random.Random) -> SchedulerConfig:
    window, size = rng.choice([None, None, 1, 3, 8, 13]), rng.choice([1, 2, 4, 16])
    return SchedulerConfig(
        num_blocks=rng.randint(60, 240) // size,
        block_size=size,
        max_num_seqs=rng.choice([1, 2, 4, 8, 12]),
        max_num_batched_tokens=rng.choice([3, 8, 32]),
        policy=rng.choice(list(POLICIES)),
        waiting_served_ratio=rng.choice([0.0, 0.3, 1.2]),
        max_waiting_tokens=rng.choice([0, 1, 5, 20]),
        prefix_caching=rng.random() < 0.8,
        watermark=rng.choice([0.0, 0.01, 0.2]),
        sliding_window=window,
        num_window_blocks=0 if window is None else rng.randint(60, 240) // size,
    )


def drawn_request(rng: random.Random, number: int, config: SchedulerConfig) -> Request:
    """With the tokens of one of two families, so that prefixes are shared."""
    most = min(config.num_blocks, config.num_window_blocks or config.num_blocks) * config.block_size
    prompt, new = rng.randint(1, max(1, min(40, most // 2))), rng.randint(1, max(1, min(40, most // 2)))
    family = rng.choice([1, 2])
    shared = rng.randint(0, prompt)
    ids = (family,) * shared + (100 + number,) * (prompt - shared)
    stops = frozenset({END}) if rng.random() < 0.5 else frozenset()
    return Request(f"r{number}", ids, new, stops, priority=rng.choice([0, 0, -1, 2]), cache_salt="s" * (family == 2))


class Schedule:
    """A drawn course of events on one scheduler: by steps, or with leaps where `leaps`."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.config = drawn_config(rng)
        self.scheduler = Scheduler(self.config)
        self.arrivals = sorted(rng.randint(0, 100) for _ in range(rng.randint(1, 20)))
        self.requests = [drawn_request(rng, number, self.config) for number in range(len(self.arrivals))]
        self.ends = {request.request_id: rng.randint(1, 40) for request in self.requests}
        self.aborts = sorted((rng.randint(0, 150), f"r{rng.randint(0, 19)}") for _ in range(rng.choice([0, 0, 1, 3])))

    def begin(self) -> None:
        """What arrives, and who is aborted, at this step."""
        scheduler = self.scheduler
        while self.arrivals and (self.arrivals[0] <= scheduler.step or not scheduler.has_unfinished):
            self.arrivals.pop(0)
            request = self.requests.pop(0)
            with contextlib.suppress(RequestRefused):  # larger than the pool
                scheduler.add(request)
        while self.aborts and self.aborts[0][0] <= scheduler.step:
            _, name = self.aborts.pop(0)
            if name in scheduler.requests:
                scheduler.abort(name)

    def until_event(self) -> int:
        events = [*self.arrivals[:1], *(step for step, _ in self.aborts[:1])]
        return min(events, default=10**9) - self.scheduler.step

    def token(self, name: str, number: int) -> int:
        """The output token with that number, counted from 0."""
        return END if number + 1 == self.ends[name] else 50 + number % 3

    def step(self) -> BatchPlan:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        names = [name for entry in plan.scheduled for name in entry.samples]
        tokens = {name: [self.token(name, scheduler.requests[name].num_output_tokens)] for name in names}
        scheduler.update(plan, tokens)
        return plan

    def leap(self) -> Leap | None:
        """None: the next step has to be taken."""
        scheduler = self.scheduler
        count = min(most_steps(scheduler), self.until_event())
        for request in scheduler.running if count > 0 else ():
            if request.stop_token_ids:
                left = self.ends[request.request_id] - request.num_output_tokens
                count = min(count, left) if left > 0 else count
        if count <= 0:
            return None
        tokens = {
            request.request_id: [
                self.token(request.request_id, request.num_output_tokens + index) for index in range(count)
            ]
            for request in scheduler.running
        }
        result = leap(scheduler, count, tokens)
        return result if result.steps else None


def everything(scheduler: Scheduler) -> list[Any]:
    """All that a scheduler holds."""
    memory, cache = scheduler.memory, scheduler.prefix_cache
    pools = [group.pool for group in memory.groups]
    counters = {name: value for name, value in vars(scheduler).items() if isinstance(value, int | frozenset)}
    policy = {name: value for name, value in vars(scheduler.policy).items() if name != "settings"}
    requests = [
        [getattr(request, field.name) for field in fields(Request) if field.name != "forks"]
        for request in scheduler.requests.values()
    ]
    names = [[request.request_id for request in queue] for queue in (scheduler.waiting, scheduler.running)]
    held = [memory.free_slots, cache.statistics, memory.groups[0].evicted]
    return [counters, policy, requests, names, held, *(vars(pool) for pool in pools)]


def pairs(seed: int) -> Iterator[tuple[Schedule, Schedule, Leap | None, list[BatchPlan]]]:
    """The same schedule twice, side by side: with leaps, and by as many steps."""
    leaping, stepping = Schedule(seed), Schedule(seed)
    while True:
        leaping.begin()
        stepping.begin()
        if not leaping.scheduler.has_unfinished and not leaping.arrivals:
            return
        result = leaping.leap()
        if result is None:
            yield leaping, stepping, None, [leaping.step(), stepping.step()]
        else:
            yield leaping, stepping, result, [stepping.step() for _ in range(result.steps)]


def require_equal(seed: int) -> tuple[int, int]:
    """Steps that were leapt over, and taken."""
    leapt = taken = 0
    for leaping, stepping, result, plans in pairs(seed):
        assert everything(leaping.scheduler) == everything(stepping.scheduler), f"seed {seed}, step {taken + leapt}"
        check(leaping.scheduler)
        if result is None:
            assert plans[0] == plans[1]
            taken += 1
            continue
        leapt += result.steps
        for plan in plans:  # what a leap says that they were
            assert not plan.moves and not plan.admitted and not plan.preempted
            assert all(len(entry.token_ids) == 1 and entry.samples == (entry.request_id,) for entry in plan.scheduled)
            for entry in plan.scheduled:
                live = leaping.scheduler.requests.get(entry.request_id)
                if live is not None:
                    assert entry.block_table == live.tables[0][: len(entry.block_table)]
                    assert entry.slot == live.slot
    return leapt, taken


@pytest.mark.parametrize("policy", POLICIES)
def test_a_leap_leaves_all_as_the_steps_would(policy: str) -> None:
    seeds = [seed for seed in (*range(DRAWN), *RARE) if drawn_config(random.Random(seed)).policy == policy]
    steps = [require_equal(seed) for seed in seeds]
    assert sum(leapt for leapt, _ in steps) > sum(taken for _, taken in steps) / 2


def test_what_can_not_be_leapt_over_is_refused_and_changes_nothing() -> None:
    scheduler = Scheduler(SchedulerConfig(8))
    scheduler.add(Request("a", (1, 2), max_tokens=9, stop_token_ids=frozenset({END})))
    scheduler.update(scheduler.schedule(), {"a": [7]})
    before = repr(everything(scheduler))
    for count, tokens, message in (
        (9, [7] * 9, "leap() over 9 steps: expected 1 to 8"),
        (2, [7], "leap(): 1 tokens for 'a', expected 2"),
        (3, [7, END, 7], "leap(): 'a' ends before the last of 3 steps"),
    ):
        with pytest.raises(PlanError) as error:
            leap(scheduler, count, {"a": tokens})
        assert str(error.value) == message
    assert repr(everything(scheduler)) == before
    assert [request.request_id for request in leap(scheduler, 8, {"a": [7] * 8}).finished] == ["a"]
    assert not scheduler.has_unfinished


def test_stop_tokens_may_come_as_a_list() -> None:
    scheduler = Scheduler(SchedulerConfig(8))
    scheduler.add(Request("a", (1, 2), max_tokens=9, stop_token_ids=[END]))  # type: ignore[arg-type]
    scheduler.update(scheduler.schedule(), {"a": [7]})
    assert [request.request_id for request in leap(scheduler, 3, {"a": [7, 7, END]}).finished] == ["a"]
