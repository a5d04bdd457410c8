"""The clock: leaps count as steps do, and simple queues behave as their formulas say."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.commands.simulate import generators
from lfm2np.commands.simulate.cost import CostModel
from lfm2np.commands.simulate.drawn_acceptance import Acceptance, acceptance_of, read_acceptance
from lfm2np.commands.simulate.histogram import MOST_BINS, Course, Histogram
from lfm2np.commands.simulate.page.simulation import simulation_report
from lfm2np.commands.simulate.report import as_json, queue, saturation
from lfm2np.commands.simulate.run import Simulation
from lfm2np.commands.simulate.statistics import Statistics
from lfm2np.commands.simulate.traffic import NANOSECONDS, Arrival
from lfm2np.errors import RequestError
from lfm2np.oracle.report.as_text import as_text
from scheduler import POLICIES, SchedulerConfig, TraceWriter, replay

SECOND = CostModel("a second a step", "none", ({"1": 1.0},))
FEATURES = {"1": 3e-3, "tokens[:8]": 1e-4, "tokens": 2e-5, "read": 3e-8, "checkpoints": 1e-6}
LARGEST = {"tokens": 40, "requests": 5, "read": 300}
VARYING = CostModel("all features", "none", (FEATURES,), largest=LARGEST)


def arrival(number: int, at: float, prompt: int, outputs: int, **more: int) -> Arrival:
    return Arrival(round(at * NANOSECONDS), ((4 * number, prompt),), outputs, 4 * number + 1, **more)


def drawn(seed: int) -> Iterator[Arrival]:
    """Requests that share prefixes, differ in length and priority, ask for more than they get, and leave."""
    rng, at = random.Random(seed), 0.0
    for number in range(60):
        at += rng.expovariate(4.0)
        shared = rng.choice([0, 0, 40])
        prompt = ((2, shared),) * (shared > 0) + ((4 * number + 4, rng.randint(1, 120)),)
        outputs = rng.randint(1, 90)
        leaves = round(rng.expovariate(0.5) * NANOSECONDS) if rng.random() < 0.2 else None
        asked = rng.choice([None, outputs, outputs + 30])
        yield Arrival(
            round(at * NANOSECONDS), prompt, outputs, 4 * number + 1, asked, rng.choice([0, 0, -1, 1]), leaves
        )


def drawn_config(seed: int, policy: str) -> SchedulerConfig:
    rng = random.Random(seed)
    window = rng.choice([None, None, 30])
    return SchedulerConfig(
        num_blocks=rng.choice([30, 60, 400]),
        max_num_seqs=rng.choice([3, 8, 40]),
        max_num_batched_tokens=rng.choice([16, 64, 512]),
        policy=policy,
        prefix_caching=rng.random() < 0.7,
        num_host_blocks=rng.choice([0, 20]),
        sliding_window=window,
        num_window_blocks=0 if window is None else 60,
    )


def run(
    config: SchedulerConfig, arrivals: Iterator[Arrival] | list[Arrival], cost: CostModel = SECOND, **more: object
) -> Statistics:
    return Simulation(config, cost, **more).run(arrivals)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_leaps_count_to_the_nanosecond_as_steps_one_by_one(policy: str) -> None:
    leapt = beyond = 0
    first_seed = 3 * list(POLICIES).index(policy)  # other traffic and other sizes for each policy
    for seed in range(first_seed, first_seed + 3):
        config = drawn_config(seed, policy)
        leaping, stepping = (Simulation(config, VARYING, leaps=leaps) for leaps in (True, False))
        first, second = leaping.run(drawn(seed)), stepping.run(drawn(seed))
        leapt += second.real_steps - first.real_steps
        assert replace(first, real_steps=0) == replace(second, real_steps=0)
        assert leaping.scheduler.prefix_cache.statistics == stepping.scheduler.prefix_cache.statistics
        assert leaping.scheduler.pool.free_order() == stepping.scheduler.pool.free_order()
        beyond += first.beyond
        assert first.finished + first.aborted + sum(first.refused.values()) == 60
    assert leapt > 500 and beyond > 0


def test_a_request_alone_takes_one_step_for_its_prompt_and_each_further_token() -> None:
    statistics = run(SchedulerConfig(8), [arrival(0, 0.5, 20, 4)])
    whole = statistics.whole()
    assert (whole.ttft.total, whole.e2e.total, whole.tpot.total) == (NANOSECONDS, 4 * NANOSECONDS, NANOSECONDS)
    assert statistics.itl.buckets == dict.fromkeys(whole.tpot.buckets, 3)
    assert statistics.end == round(4.5 * NANOSECONDS)
    assert (statistics.prompt_tokens, statistics.output_tokens, statistics.steps) == (19, 4, 4)


def test_time_in_steps_beyond_what_was_measured_is_reported() -> None:
    cost = CostModel("small steps", "none", ({"1": 1.0},), largest={"tokens": 10, "requests": 4, "read": 22})
    simulation = Simulation(SchedulerConfig(8), cost)
    statistics = simulation.run([arrival(0, 0.0, 20, 5)])  # too many tokens in step 0, too much to read in 3 and 4
    assert statistics.beyond == 3 * NANOSECONDS
    text = as_text(simulation_report(as_json(statistics, simulation.scheduler, cost, "drawn")))
    assert "60 % of the busy time is in steps larger than any that was measured" in text


def test_what_arrives_during_a_step_waits_for_its_end() -> None:
    statistics = run(SchedulerConfig(8), [arrival(0, 0.0, 3, 3), arrival(1, 0.25, 3, 1)])
    assert statistics.queued.total == round(0.75 * NANOSECONDS)
    assert statistics.whole().ttft.total == round(1.0 * NANOSECONDS + 1.75 * NANOSECONDS)


def test_a_queue_with_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: with Poisson arrivals and one constant service time D, the mean wait is rho D / 2 (1 - rho)."""
    for rate, requests in ((0.3, 4000), (0.7, 12000)):
        arrivals = generators.parse(f"poisson:rate={rate},prompt=4,output=1,requests={requests}", seed=1)
        statistics = run(SchedulerConfig(8, max_num_seqs=1, prefix_caching=False), arrivals)
        mean = statistics.queued.mean
        assert mean is not None
        assert mean / NANOSECONDS == pytest.approx(rate / (2 * (1 - rate)), rel=0.05)
        assert statistics.busy / statistics.end == pytest.approx(rate, rel=0.02)


def test_littles_law_holds_exactly() -> None:
    """Requests times time that ran is the sum of the times that they ran, each from its admission to its end."""
    arrivals = list(generators.parse("gamma:rate=6,cv=2,prompt=100,output=1-80,requests=300", seed=3))
    statistics = run(SchedulerConfig(4000, max_num_seqs=10), arrivals, VARYING)
    assert statistics.preemptions == 0
    assert sum(statistics.running.bins) == statistics.whole().e2e.total - statistics.queued.total
    assert sum(statistics.waiting.bins) == statistics.queued.total


def verdict_at(rate: float, requests: int, seed: int, slots: int = 1) -> str:
    """Of a server that finishes one request a second in each slot."""
    spec = f"poisson:rate={rate},prompt=4,output=1,requests={requests}"
    config = SchedulerConfig(8 * slots, max_num_seqs=slots, prefix_caching=False)
    statistics = run(config, generators.parse(spec, seed))
    unclear = queue(statistics)["unclear"]
    return "saturated" if saturation(statistics, 0) else "unclear" if unclear else "stable"


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


def course_of(*parts: tuple[float, int], first: int = 0) -> Statistics:
    """Requests at even times, so many a second for so long, after `first` at once; one a second is served."""
    times, at = [0.0] * first, 0.0
    for rate, seconds in parts:
        times += [at + index / rate for index in range(round(rate * seconds))]
        at += seconds
    return run(SchedulerConfig(8, max_num_seqs=1), [arrival(number, each, 4, 1) for number, each in enumerate(times)])


def test_a_backlog_that_grows_and_an_overload_at_the_end_are_saturated_and_one_that_is_over_is_reported() -> None:
    assert saturation(course_of((1.1, 3000), first=300), 0) is not None
    late = saturation(course_of((0.5, 600), (1.5, 300)), 0)
    assert late is not None and late["since"] == pytest.approx(600, abs=10)
    over = course_of((1.5, 600), (0.001, 1000), (1.0, 1))
    assert saturation(over, 0) is None
    assert queue(over)["longest"] == pytest.approx(300, abs=3)
    assert queue(over)["longest_at"] == pytest.approx(600, abs=2)


def test_a_server_that_still_fills_at_the_end_is_unclear() -> None:
    """More than it can do, but its slots are not full yet: steps become slower and slower."""
    cost = CostModel("by requests", "none", ({"requests": 0.02},))
    simulation = Simulation(SchedulerConfig(4000, max_num_seqs=400), cost)
    statistics = simulation.run(generators.parse("poisson:rate=3,prompt=4,output=20,requests=300", seed=1))
    assert statistics.most_waiting < 10
    assert "too short to tell" in queue(statistics)["unclear"]
    assert "unclear whether saturated" in as_text(
        simulation_report(as_json(statistics, simulation.scheduler, cost, "drawn"))
    )


def test_a_simulation_ends_when_too_many_wait_and_says_who_is_left() -> None:
    simulation = Simulation(SchedulerConfig(8, max_num_seqs=1), SECOND)
    statistics = simulation.run((arrival(number, 0.0, 4, 1) for number in range(500)), most_waiting=100)
    result = as_json(statistics, simulation.scheduler, SECOND, "at once", len(simulation.live))
    assert result["requests"]["left"] == 101
    assert result["saturation"]["waiting"] == 101
    assert "101 left when the simulation ended" in as_text(simulation_report(result))
    assert "SATURATED: the queue grows without bound from 0 us on, all at once, to 101" in as_text(
        simulation_report(result)
    )


def test_a_million_requests_at_once_are_counted_as_refused_or_simulated() -> None:
    statistics = run(SchedulerConfig(4, block_size=4), [arrival(number, 0.0, 100, 1) for number in range(1000)])
    assert statistics.requests == 0
    assert list(statistics.refused.values()) == [1000]


def test_a_request_that_leaves_is_aborted_at_its_time() -> None:
    statistics = run(SchedulerConfig(8), [arrival(0, 0.0, 4, 50, abort_after=round(2.5 * NANOSECONDS))])
    assert (statistics.aborted, statistics.finished, statistics.end) == (1, 0, 3 * NANOSECONDS)


def test_an_end_before_max_tokens_gives_its_reserved_blocks_back() -> None:
    """Under a policy that reserves, the second waits for blocks that the first asked for, until it ends early."""
    config = SchedulerConfig(8, block_size=4, policy="waiting-served", watermark=0.0)
    both = [arrival(0, 0.0, 4, 5, max_tokens=28), arrival(1, 0.0, 4, 2)]
    assert run(config, both).queued.total == 5 * NANOSECONDS
    assert run(config, [replace(each, max_tokens=None) for each in both]).queued.total == 0


def test_accepted_drafts_are_tokens_of_the_same_step() -> None:
    config = SchedulerConfig(100)
    always = run(config, [arrival(0, 0.0, 4, 9)], num_drafts=3, accepts=Acceptance((1.0,)).draw)
    never = run(config, [arrival(0, 0.0, 4, 9)], num_drafts=3, accepts=Acceptance((0.0,)).draw)
    assert (always.steps, always.accepted_drafts, always.output_tokens) == (3, 6, 9)
    assert (never.steps, never.accepted_drafts, never.output_tokens) == (9, 0, 9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 9), st.integers(1, 6))
def test_whether_a_draft_is_accepted_does_not_depend_on_how_many_follow(
    shares: list[float], number: int, position: int, drafts: int
) -> None:
    acceptance = Acceptance(tuple(shares))
    fewer, more = acceptance.draw(number, position, drafts), acceptance.draw(number, position, drafts + 1)
    assert fewer == min(more, drafts)


def test_acceptance_is_drawn_at_its_rate_and_read_from_counts() -> None:
    acceptance = acceptance_of([1000, 800, 100], [800, 480, 30])
    assert acceptance.shares == pytest.approx((0.8, 0.75, 0.5))
    draws = [acceptance.draw(number, 0, 3) for number in range(20_000)]
    assert np.mean(draws) == pytest.approx(0.8 + 0.8 * 0.75 + 0.8 * 0.75 * 0.5, rel=0.03)
    assert read_acceptance("0.5,0.25").shares == (0.5, 0.25)
    with pytest.raises(RequestError, match=r"acceptance 1\.5: expected a share from 0 to 1"):
        read_acceptance("1.5")


def test_a_trace_that_is_written_replays() -> None:
    file, config = io.StringIO(), drawn_config(1, "fcfs")
    writer = TraceWriter(file, config)
    statistics = run(config, drawn(1), VARYING, trace=writer)
    writer.end()
    replayed = replay(io.StringIO(file.getvalue()))
    assert (replayed.steps, replayed.tokens) == (statistics.steps, statistics.output_tokens)
    assert replayed.unfinished == 0


def test_requests_out_of_order_are_refused() -> None:
    with pytest.raises(RequestError, match="expected the order of arrival"):
        run(SchedulerConfig(8), [arrival(0, 1.0, 4, 1), arrival(1, 0.5, 4, 1)])


# --- how it is counted


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=50), st.integers(1, 3))
def test_a_histogram_of_many_is_that_of_each(values: list[int], times: int) -> None:
    singly, together = Histogram(), Histogram()
    for value in values:
        singly.add(value, times)
    together.add_many(np.array(values, np.int64), times)
    assert singly == together
    middle = sorted(values)[(len(values) - 1) // 2]
    quantile = singly.quantile(0.5)
    assert quantile is not None
    assert 0 <= quantile - middle <= middle / 256
    assert abs(quantile - middle) <= middle / 256
    assert singly.mean == sum(values) / len(values)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**32), st.integers(0, 9)), max_size=20))
def test_a_course_keeps_its_sum_however_often_its_bins_widen(pieces: list[tuple[int, int, int]]) -> None:
    course = Course()
    for begin, length, value in pieces:
        course.over(begin, begin + length, value)
    assert sum(course.bins) == sum(length * value for _, length, value in pieces)
    assert len(course.bins) <= MOST_BINS
