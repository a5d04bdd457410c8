"""The clock: leaps leave and count all that steps do, and simple queues behave as their formulas say."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from lfm2np.commands.simulate.cost import CostModel
from lfm2np.commands.simulate.leap import leap
from lfm2np.commands.simulate.result import Scenario, distribution, latencies_of, queue, simulate, simulation_report
from lfm2np.commands.simulate.run import Counts, Simulation, block_keys
from lfm2np.commands.simulate.traffic import NANOSECONDS, Arrival, Traffic
from lfm2np.oracle.report.as_text import as_text
from scheduler import POLICIES, PrefixCache, Request, Scheduler, SchedulerConfig

pytestmark = pytest.mark.slow

SECOND = CostModel("a second a step", "none", ({"1": 1.0},))
FEATURES = {"1": 3e-3, "tokens[:8]": 1e-4, "tokens": 2e-5, "read": 3e-8, "checkpoints": 1e-6}
LARGEST = {"tokens": 40, "requests": 5, "read": 300}
VARYING = CostModel("all features", "none", (FEATURES,), largest=LARGEST)


def arrival(number: int, at: float, prompt: int, outputs: int) -> Arrival:
    return Arrival(round(at * NANOSECONDS), ((4 * number, prompt),), outputs, 4 * number + 1)


def drawn(seed: int) -> Iterator[Arrival]:
    """Requests that share prefixes, and differ in length and priority."""
    rng, at = random.Random(seed), 0.0
    for number in range(60):
        at += rng.expovariate(4.0)
        shared = rng.choice([0, 0, 40])
        prompt = ((2, shared),) * (shared > 0) + ((4 * number + 4, rng.randint(1, 120)),)
        outputs = rng.randint(1, 90)
        yield Arrival(round(at * NANOSECONDS), prompt, outputs, 4 * number + 1, rng.choice([0, 0, -1, 1]))


def drawn_config(seed: int, policy: str) -> SchedulerConfig:
    rng = random.Random(seed)
    window, size = rng.choice([None, None, None, 30]), rng.choice([1, 4, 16, 16])
    return SchedulerConfig(
        num_blocks=rng.choice([256, 480, 3200]) // size,
        block_size=size,
        max_num_seqs=rng.choice([3, 8, 40]),
        max_num_batched_tokens=rng.choice([3, 16, 64, 512]),
        policy=policy,
        prefix_caching=rng.random() < 0.7,
        sliding_window=window,
        num_window_blocks=0 if window is None else 960 // size,
        waiting_served_ratio=rng.choice([0.0, 0.3, 1.2]),
        max_waiting_tokens=rng.choice([0, 5, 20]),
        watermark=rng.choice([0.0, 0.01, 0.2]),
    )


def run(config: SchedulerConfig, arrivals: Iterable[Arrival], cost: CostModel = SECOND, **more: object) -> Counts:
    of_run = {name: more.pop(name) for name in ("most_waiting",) if name in more}
    return Simulation(config, cost, **more).run(arrivals, **of_run)  # type: ignore[arg-type]


def spans_of(counts: Counts, name: str) -> list[int]:
    """Nanoseconds of each request that got so far."""
    values, _ = latencies_of(counts)[name]
    return [int(value) for value in values]


def gaps_of(counts: Counts) -> list[tuple[int, int]]:
    return sorted(zip(counts.gaps, counts.gap_counts, strict=True))


def everything(scheduler: Scheduler) -> list[Any]:
    """All that a scheduler holds."""
    memory = scheduler.memory
    counters = {name: value for name, value in vars(scheduler).items() if isinstance(value, int | frozenset)}
    policy = {name: value for name, value in vars(scheduler.policy).items() if name != "settings"}
    requests = [
        [getattr(request, field.name) for field in fields(Request) if field.name != "forks"]
        for request in scheduler.requests.values()
    ]
    names = [[request.request_id for request in queue] for queue in (scheduler.waiting, scheduler.running)]
    held = [memory.free_slots, scheduler.prefix_cache.statistics, memory.groups[0].evicted]
    return [counters, policy, requests, names, held, *(vars(group.pool) for group in memory.groups)]


def seen(simulation: Simulation, seed: int, states: list[Any]) -> Iterator[Arrival]:
    """Arrivals that note, before each is added, what the scheduler holds."""
    for each in drawn(seed):
        states.append(copy.deepcopy(everything(simulation.scheduler)))
        yield each


@pytest.mark.parametrize("policy", POLICIES)
def test_leaps_leave_all_as_steps_one_by_one_and_count_to_the_nanosecond(policy: str) -> None:
    leapt = beyond = 0
    first_seed = 4 * list(POLICIES).index(policy)  # other traffic and other sizes for each policy
    for seed in range(first_seed, first_seed + 4):
        config = drawn_config(seed, policy)
        leaping, stepping = (Simulation(config, VARYING, leaps=leaps) for leaps in (True, False))
        states: tuple[list[Any], list[Any]] = ([], [])
        first, second = (
            each.run(seen(each, seed, noted)) for each, noted in zip((leaping, stepping), states, strict=True)
        )
        for number, (one, other) in enumerate(zip(*states, strict=True)):
            assert one == other, f"seed {seed}, at arrival {number}"
        assert everything(leaping.scheduler) == everything(stepping.scheduler)
        leapt += second.single_steps - first.single_steps
        assert gaps_of(first) == gaps_of(second)
        both = [replace(each, single_steps=0, gaps=array("q"), gap_counts=array("q")) for each in (first, second)]
        assert both[0] == both[1]
        beyond += first.beyond
        assert len(spans_of(first, "e2e")) + sum(first.refused.values()) == 60
    assert leapt > 500 and beyond > 0


def test_a_leap_that_ends_early_publishes_no_block_beyond_it() -> None:
    """Of nine steps five fit into the pool; behind nine a block would be full."""
    tokens = {"a": 7, "b": 8}
    leaping, stepping = (Scheduler(SchedulerConfig(4, block_size=4, watermark=0.0)) for _ in range(2))
    for scheduler, steps in ((leaping, 1), (stepping, 6)):
        for name, token in tokens.items():
            scheduler.add(Request(name, (token,) * 3, 12))
        for _ in range(steps):
            scheduler.update(scheduler.schedule(), {name: [token] for name, token in tokens.items()})
    assert leap(leaping, 9, tokens).steps == 5
    assert everything(leaping) == everything(stepping)


def test_blocks_have_equal_keys_exactly_where_the_schedulers_hashes_are_equal() -> None:
    rng, pairs, blocks = random.Random(0), set[tuple[bytes, bytes]](), 0
    for _ in range(200):
        runs = tuple((rng.randint(1, 2), rng.randint(1, 5)) for _ in range(rng.randint(2, 5)))
        ids = tuple(token for token, count in runs for _ in range(count))
        hashes = PrefixCache([], 3, enabled=True).keys(Request("a", ids, 1), len(ids) // 3)
        keys = block_keys(Arrival(0, runs[:-1], runs[-1][1], runs[-1][0]), 3)
        pairs.update(zip(keys, hashes, strict=True))
        blocks += len(keys)
    assert len({key for key, _ in pairs}) == len({key for _, key in pairs}) == len(pairs) < 0.8 * blocks


def test_a_request_alone_takes_one_step_for_its_prompt_and_each_further_token() -> None:
    counts = run(SchedulerConfig(8), [arrival(0, 0.5, 20, 4)])
    second = NANOSECONDS
    assert [spans_of(counts, name) for name in ("ttft", "e2e", "tpot")] == [[second], [4 * second], [second]]
    assert sum(counts.gap_counts) == 3 and set(counts.gaps) == {second}
    assert counts.end == round(4.5 * second)
    assert (counts.tokens, counts.output_tokens, counts.steps) == (23, 4, 4)


def test_time_in_steps_beyond_what_was_measured_is_reported() -> None:
    cost = CostModel("small steps", "none", ({"1": 1.0},), largest={"tokens": 10, "requests": 4, "read": 22})
    counts = run(SchedulerConfig(8), [arrival(0, 0.0, 20, 5)], cost)  # step 0 is too large; 3 and 4 read too much
    assert counts.beyond == 3 * NANOSECONDS
    few = replace(cost, largest={"tokens": 10})
    assert run(SchedulerConfig(8), [arrival(0, 0.0, 20, 5)], few).beyond == NANOSECONDS
    report = simulation_report(simulate(Scenario(Traffic("poisson:requests=1", 1.0), SchedulerConfig(99), cost)))
    assert "100 % of the busy time is in steps larger than any that was measured" in as_text(report)


def test_what_arrives_during_a_step_waits_for_its_end() -> None:
    counts = run(SchedulerConfig(8), [arrival(0, 0.0, 3, 3), arrival(1, 0.25, 3, 1)])
    assert spans_of(counts, "queued") == [0, round(0.75 * NANOSECONDS)]
    assert spans_of(counts, "ttft") == [NANOSECONDS, round(1.75 * NANOSECONDS)]


def test_a_queue_with_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: with Poisson arrivals and one constant service time D, the mean wait is rho D / 2 (1 - rho)."""
    for rate, requests in ((0.3, 4000), (0.7, 12000)):
        arrivals = Traffic(f"poisson:prompt=4,output=1,requests={requests}", rate, seed=1).arrivals()
        counts = run(SchedulerConfig(8, max_num_seqs=1, prefix_caching=False), arrivals)
        mean = np.mean(spans_of(counts, "queued")) / NANOSECONDS
        assert mean == pytest.approx(rate / (2 * (1 - rate)), rel=0.05)
        assert counts.busy / counts.end == pytest.approx(rate, rel=0.02)


def test_littles_law_holds_exactly() -> None:
    """Requests times time that ran is the sum of the times that they ran, each from its admission to its end."""
    arrivals = Traffic("poisson:prompt=100,output=1-80,requests=300", 6.0, seed=3).arrivals()
    counts = run(SchedulerConfig(4000, max_num_seqs=10), arrivals, VARYING)
    assert counts.preemptions == 0
    assert counts.running == sum(spans_of(counts, "e2e")) - sum(spans_of(counts, "queued"))


# --- whether the queue grows without bound


def verdict_of(counts: Counts) -> str:
    figures = queue(counts)
    return "saturated" if figures["saturated"] else "unclear" if figures["unclear"] else "stable"


def verdict_at(rate: float, requests: int, seed: int) -> str:
    """Of a server that finishes one request a second."""
    arrivals = Traffic(f"poisson:prompt=4,output=1,requests={requests}", rate, seed).arrivals()
    return verdict_of(run(SchedulerConfig(8, max_num_seqs=1, prefix_caching=False), arrivals))


@pytest.mark.parametrize(
    "rate, never", [(0.5, "saturated unclear"), (0.9, "saturated"), (0.97, "saturated"), (1.5, "stable unclear")]
)
def test_the_verdict_on_a_load_is_not_wrong(rate: float, never: str) -> None:
    """Near capacity it may be unclear; it never says the wrong thing."""
    for requests, seeds in ((500, 6), (2000, 1)):
        verdicts = [verdict_at(rate, requests, seed) for seed in range(seeds)]
        assert not set(verdicts) & set(never.split()), verdicts


def test_an_overload_just_above_capacity_is_seen_when_it_lasts() -> None:
    assert [verdict_at(1.1, 4000, seed) for seed in range(2)] == ["saturated"] * 2


def course_of(*parts: tuple[float, int], first: int = 0) -> Counts:
    """Requests at even times, so many a second for so long, after `first` at once; one a second is served."""
    times, at = [0.0] * first, 0.0
    for rate, seconds in parts:
        times += [at + index / rate for index in range(round(rate * seconds))]
        at += seconds
    return run(SchedulerConfig(8, max_num_seqs=1), [arrival(number, each, 4, 1) for number, each in enumerate(times)])


def test_a_backlog_that_grows_and_an_overload_at_the_end_are_saturated_and_one_that_is_over_is_reported() -> None:
    assert verdict_of(course_of((1.1, 3000), first=300)) == "saturated"
    late = queue(course_of((0.5, 600), (1.5, 300)))["saturated"]
    assert late["since"] == pytest.approx(600, abs=10)
    over = course_of((1.5, 600), (0.001, 1000), (1.0, 1))
    assert verdict_of(over) != "saturated"
    assert queue(over)["longest"] == pytest.approx(300, abs=3)
    assert queue(over)["longest_at"] == pytest.approx(600, abs=2)


def test_a_server_that_still_fills_at_the_end_is_unclear() -> None:
    """More than it can do, but its slots are not full yet: steps become slower and slower."""
    cost = CostModel("by requests", "none", ({"requests": 0.02},))
    traffic = Traffic("poisson:prompt=4,output=20,requests=300", 3.0, seed=1)
    figures = simulate(Scenario(traffic, SchedulerConfig(4000, max_num_seqs=400), cost))
    assert figures["queue"]["longest"] <= 10
    assert "too short to tell" in figures["queue"]["unclear"]
    assert as_text(simulation_report(figures)).startswith("verdict    unclear whether saturated")


def test_a_simulation_ends_when_too_many_wait_and_says_who_is_left() -> None:
    counts = run(SchedulerConfig(8, max_num_seqs=1), [arrival(n, 0.0, 4, 1) for n in range(500)], most_waiting=100)
    assert counts.left == len(counts.arrived) == 500 and counts.steps == 0
    assert queue(counts)["saturated"] == {"since": 0.0, "waiting": 500, "requests_per_second": None}


def test_a_thousand_requests_larger_than_the_pool_are_counted_by_reason() -> None:
    counts = run(SchedulerConfig(4, block_size=4), [arrival(number, 0.0, 100 + number, 1) for number in range(1000)])
    assert not counts.arrived and counts.refused == {"100 prompt tokens: the pool has 4 blocks": 1000}


def test_quantiles_are_values_that_such_a_share_does_not_exceed() -> None:
    values = np.array([5, 1, 4, 2, 3], np.int64) * NANOSECONDS
    assert distribution(values) == {"mean": 3.0, "p50": 3.0, "p90": 5.0, "p99": 5.0, "max": 5.0}
    often = distribution(values, np.array([1, 96, 1, 1, 1], np.int64))  # once 5 s, 96 times 1 s
    assert (often["p50"], often["p90"], often["p99"]) == (1.0, 1.0, 4.0)
    assert set(distribution(values[:0]).values()) == {None}
