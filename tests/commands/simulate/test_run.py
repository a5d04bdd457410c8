"""The clock: leaps count as steps do, and simple queues behave as their formulas say."""

from __future__ import annotations

import io
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from lfm2np.commands.simulate.cost import CostModel, preset
from lfm2np.commands.simulate.result import Scenario, distribution, latencies_of, queue, simulate, simulation_report
from lfm2np.commands.simulate.run import Counts, Simulation
from lfm2np.commands.simulate.traffic import NANOSECONDS, Arrival, Traffic
from lfm2np.oracle.report.as_html import as_html
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
        sliding_window=window,
        num_window_blocks=0 if window is None else 60,
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


@pytest.mark.parametrize("policy", POLICIES)
def test_leaps_count_to_the_nanosecond_as_steps_one_by_one(policy: str) -> None:
    leapt = beyond = 0
    first_seed = 3 * list(POLICIES).index(policy)  # other traffic and other sizes for each policy
    for seed in range(first_seed, first_seed + 3):
        config = drawn_config(seed, policy)
        leaping, stepping = (Simulation(config, VARYING, leaps=leaps) for leaps in (True, False))
        first, second = leaping.run(drawn(seed)), stepping.run(drawn(seed))
        leapt += second.single_steps - first.single_steps
        assert gaps_of(first) == gaps_of(second)
        both = [replace(each, single_steps=0, gaps=array("q"), gap_counts=array("q")) for each in (first, second)]
        assert both[0] == both[1]
        assert leaping.scheduler.prefix_cache.statistics == stepping.scheduler.prefix_cache.statistics
        assert leaping.scheduler.pool.free_order() == stepping.scheduler.pool.free_order()
        beyond += first.beyond
        assert len(spans_of(first, "e2e")) + first.aborted + sum(first.refused.values()) == 60
    assert leapt > 500 and beyond > 0


def test_a_request_alone_takes_one_step_for_its_prompt_and_each_further_token() -> None:
    counts = run(SchedulerConfig(8), [arrival(0, 0.5, 20, 4)])
    second = NANOSECONDS
    assert [spans_of(counts, name) for name in ("ttft", "e2e", "tpot")] == [[second], [4 * second], [second]]
    assert sum(counts.gap_counts) == 3 and set(counts.gaps) == {second}
    assert counts.end == round(4.5 * second)
    assert (counts.tokens, counts.output_tokens, counts.steps) == (23, 4, 4)


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
    figures, counts = simulate(Scenario(traffic, SchedulerConfig(4000, max_num_seqs=400), cost))
    assert max(counts.waiting) <= 10
    assert "too short to tell" in figures["queue"]["unclear"]
    assert as_text(simulation_report(figures, counts)).startswith("verdict    unclear whether saturated")


def test_a_simulation_ends_when_too_many_wait_and_says_who_is_left() -> None:
    counts = run(SchedulerConfig(8, max_num_seqs=1), [arrival(n, 0.0, 4, 1) for n in range(500)], most_waiting=100)
    assert counts.left == len(counts.arrived) == 500 and counts.steps == 0
    assert queue(counts)["saturated"] == {"since": 0.0, "waiting": 500, "requests_per_second": None}


def test_a_report_has_all_figures_and_a_page_the_course_of_the_queue() -> None:
    traffic = Traffic("poisson:prompt=100-900,output=40,requests=60", 9.0)
    figures, counts = simulate(Scenario(traffic, SchedulerConfig(60, max_num_seqs=2), preset("L4:LFM2-1.2B")))
    report = simulation_report(figures, counts)
    text = as_text(report)
    for words in ("60 of 60 finished" if not counts.refused else "refused", "published figures", "ITL", "prefixes"):
        assert words in text
    assert report.figures["requests"]["arrived"] == 60 and report.figures["steps"]["all"] == counts.steps
    assert "Requests that wait to be admitted" in as_html(report)


def test_a_request_that_leaves_is_aborted_at_its_time() -> None:
    counts = run(SchedulerConfig(8), [arrival(0, 0.0, 4, 50, abort_after=round(2.5 * NANOSECONDS))])
    assert (counts.aborted, spans_of(counts, "e2e"), counts.end) == (1, [], 3 * NANOSECONDS)


def test_an_end_before_max_tokens_gives_its_reserved_blocks_back() -> None:
    """Under a policy that reserves, the second waits for blocks that the first asked for, until it ends early."""
    config = SchedulerConfig(8, block_size=4, policy="waiting-served", watermark=0.0)
    both = [arrival(0, 0.0, 4, 5, max_tokens=28), arrival(1, 0.0, 4, 2)]
    assert sum(spans_of(run(config, both), "queued")) == 5 * NANOSECONDS
    assert sum(spans_of(run(config, [each._replace(max_tokens=None) for each in both]), "queued")) == 0


def test_a_trace_that_is_written_replays() -> None:
    file, config = io.StringIO(), drawn_config(1, "fcfs")
    writer = TraceWriter(file, config)
    counts = run(config, drawn(1), VARYING, trace=writer)
    writer.end()
    replayed = replay(io.StringIO(file.getvalue()))
    assert (replayed.steps, replayed.tokens) == (counts.steps, counts.output_tokens)
    assert replayed.unfinished == 0


def test_quantiles_are_values_that_such_a_share_does_not_exceed() -> None:
    values = np.array([5, 1, 4, 2, 3], np.int64) * NANOSECONDS
    assert distribution(values) == {"mean": 3.0, "p50": 3.0, "p90": 5.0, "p99": 5.0, "max": 5.0}
    often = distribution(values, np.array([1, 96, 1, 1, 1], np.int64))  # once 5 s, 96 times 1 s
    assert (often["p50"], often["p90"], often["p99"]) == (1.0, 1.0, 4.0)
    assert set(distribution(values[:0]).values()) == {None}
