"""Which configurations a sweep runs, which it chooses, and how many requests a second each of them takes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lfm2np.commands.simulate.cost import CostModel
from lfm2np.commands.simulate.result import Scenario, simulate
from lfm2np.commands.simulate.sweep import (
    Target,
    best_runs,
    capacity,
    capacity_report,
    curve,
    read_settings,
    read_target,
    scenarios,
    summary,
    sweep_report,
)
from lfm2np.commands.simulate.traffic import Traffic
from lfm2np.errors import RequestError
from lfm2np.oracle.report.as_text import as_text
from scheduler import SchedulerConfig

pytestmark = pytest.mark.slow

COST = CostModel("drawn", "none", ({"1": 5e-3, "tokens": 4e-5, "requests": 1e-5},))
CONFIG = SchedulerConfig(4000, max_num_seqs=16, max_num_batched_tokens=512)


def scenario(rate: float = 5.0, requests: int = 40) -> Scenario:
    return Scenario(Traffic(f"poisson:prompt=200,output=1-100,requests={requests}", rate), CONFIG, COST)


def swept(*settings: str, target: Target | None = None, base: Scenario | None = None) -> dict[str, Any]:
    chosen = scenarios(base or scenario(), read_settings(settings))
    return summary(base or scenario(), [each for each, _ in chosen], [simulate(each) for _, each in chosen], target)


def test_settings_are_lists_and_ranges() -> None:
    settings = read_settings(
        ["policy=fcfs,static", "num_blocks=100:700", "waiting_served_ratio=0.1:3.2", "prefix_caching=true,false"]
    )
    assert settings == {
        "policy": ["fcfs", "static"],
        "num_blocks": [100, 200, 400, 700],
        "waiting_served_ratio": [0.1, 0.2, 0.4, 0.8, 1.6, 3.2],
        "prefix_caching": [True, False],
    }
    assert len(scenarios(scenario(), settings)) == 2 * 4 * 2, "of neither policy the ratio is read"
    many = ["num_blocks=1000:1064", "rate=1:9", "watermark=0.1:0.9", "max_num_seqs=1:1000", "block_size=1:1000"]
    assert scenarios(scenario(), read_settings(many))


def test_a_policy_that_does_not_read_a_setting_appears_once() -> None:
    result = swept("waiting_served_ratio=0.1,1,2", "policy=fcfs,waiting-served")
    rows = sorted((each["settings"]["policy"], each["settings"].get("waiting_served_ratio")) for each in result["runs"])
    assert rows == [("fcfs", None), *(("waiting-served", ratio) for ratio in (0.1, 1, 2))]
    lines = as_text(sweep_report(result, None)).splitlines()
    assert [line.split()[:2] for line in lines if line.split()[:1] == ["fcfs"]] == [["fcfs", "-"]]


TOO_MANY = [f"num_blocks={','.join(map(str, range(1, 202)))}", f"max_num_seqs={','.join(map(str, range(1, 52)))}"]
IMPOSSIBLE = [
    (["policy"], "'policy'"),
    (["policy=fcfs", "policy=static"], "given twice"),
    (["num_blocks=8:4"], "'8:4'"),
    (["num_block=8"], "'num_block'"),
    (["policy=fcfs,best"], "'best'"),
    (["rate=0"], "rate 0"),
    (TOO_MANY, "10000"),
]


@pytest.mark.parametrize(("texts", "named"), IMPOSSIBLE)
def test_settings_that_can_not_be_are_refused_before_anything_runs(texts: list[str], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        scenarios(scenario(), read_settings(texts))


@pytest.mark.parametrize("text", ["ttft=2", "ttft_p95=2", "ttft_p99=-1", "ttft_p99=nan", "ttft_p99=x", "ttft_p99=0"])
def test_a_target_is_a_metric_a_quantile_and_seconds(text: str) -> None:
    with pytest.raises(RequestError, match="expected a metric and seconds"):
        read_target(text)
    assert read_target("itl_p99=.5") == Target("itl", "p99", 0.5)


def test_at_each_rate_the_best_run_meets_the_target_and_is_not_saturated() -> None:
    """static makes requests wait for a batch: it misses what fcfs meets; at 50 a second both are saturated."""
    target = Target("ttft", "p99", 0.4)
    result = swept("policy=static,fcfs", "rate=4,50", base=scenario(requests=300), target=target)
    assert {rate: each["settings"]["policy"] for rate, each in best_runs(result).items()}[4] == "fcfs"
    report = sweep_report(result, target)
    assert (report.verdict, report.exit_code) == ("target met at 1 of 2 rates", 0)
    text = as_text(report)
    assert "at 4 requests a second choose policy fcfs" in text
    assert "at 50 requests a second none of the configurations serves this traffic" in text
    assert "misses the target" in text and "✕ saturated" in text
    assert "rests on 3 requests: simulate more" in text


def test_who_refuses_long_requests_is_not_best_for_that() -> None:
    result = swept("num_blocks=14,4000", "rate=5")
    assert [each["settings"]["num_blocks"] for each in result["runs"]] == [4000, 14]
    assert result["runs"][0]["lost"] == 0 < result["runs"][1]["lost"]


def test_a_curve_has_the_runs_that_are_not_saturated(monkeypatch: pytest.MonkeyPatch) -> None:
    result, drawn = swept("policy=static,fcfs", "rate=2:64"), list[Any]()
    monkeypatch.setattr("lfm2np.commands.simulate.sweep.picture", lambda *arguments: drawn.append(arguments))
    curve("a.svg", result, Target("ttft", "p99", 0.1))
    kept = [run for run in result["runs"] if not run["queue"]["saturated"]]
    ((path, lines, metric, _, target),) = drawn
    assert (path, metric, target) == ("a.svg", "TTFT P99", 0.1) and set(lines) == {"policy static", "policy fcfs"}
    assert sum(map(len, lines.values())) == len(kept) < len(result["runs"])


def test_a_curve_that_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    result = swept("policy=static,fcfs", "rate=2:4")
    with pytest.raises(RequestError, match="every run is saturated"):
        curve("a.svg", swept("policy=static", "rate=500:1000"), None)
    with pytest.raises(RequestError, match="expected a name that ends in"):
        curve("a.gif", result, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match="needs the extra `curves`"):
        curve("a.svg", result, None)


def test_memory_says_how_many_blocks_there_are() -> None:
    sized = [Scenario(Traffic("poisson"), SchedulerConfig(1, block_size=size), COST, 0.3) for size in (16, 256)]
    with pytest.raises(RequestError, match="GPU:MODEL"):
        sized[0].sized()
    named = CostModel("H100:LFM2-1.2B", "none", ({"1": 1.0},))
    blocks = [Scenario(each.traffic, each.config, named, 0.3).sized().num_blocks for each in sized]
    assert 10 < blocks[1] < blocks[0] / 10


# --- capacity


def one_slot(requests: int, seed: int = 0) -> Scenario:
    """A second a request."""
    return Scenario(
        Traffic(f"poisson:prompt=4,output=1,requests={requests}", seed=seed),
        SchedulerConfig(8, max_num_seqs=1, prefix_caching=False),
        CostModel("a second a step", "none", ({"1": 1.0},)),
    )


def test_the_capacity_of_a_server_with_one_slot_is_where_its_wait_reaches_the_target() -> None:
    """M/D/1, a second a request: the mean time to the first token is 1 + rate / 2 (1 - rate), 2 s at a rate of 2/3."""
    found = capacity(one_slot(3000, seed=1), Target("ttft", "mean", 2.0))
    assert found["rate"] == pytest.approx(2 / 3, rel=0.07)
    assert found["value"] <= 2.0
    few = one_slot(9).with_setting("max_num_seqs", 2)
    nothing = {"rate": 0.0, "value": None, "lost": None, "rests_on": "", "runs": 17}
    assert capacity(few, Target("ttft", "mean", 0.5)) == nothing


@pytest.mark.parametrize("requests", [100, 500])
def test_a_capacity_is_not_far_above_what_the_server_can_compute_in_a_short_trace_either(requests: int) -> None:
    """One request a second at most: 1.4 and 1.2 were found, where it is unclear whether the queue grows."""
    assert 0.8 < capacity(one_slot(requests), Target("ttft", "p99", 1e6))["rate"] < 1.1


def test_who_refuses_most_requests_is_not_first_and_how_many_is_said() -> None:
    base = replace(scenario(), traffic=Traffic("poisson:prompt=10-2000,output=5,requests=100"))
    chosen = scenarios(base, read_settings(["num_blocks=20,1000"]))
    target = Target("ttft", "p99", 1.0)
    found = [capacity(each, target) for _, each in chosen]
    assert found[0]["rate"] > found[1]["rate"] and found[0]["lost"] > 70 and found[1]["lost"] == 0
    first, second = capacity_report(base, target, [each for each, _ in chosen], found).findings
    assert first.words.startswith("num_blocks 1000: ") and "refused" not in first.words
    assert f" requests a second, {found[0]['lost']} % of them refused (TTFT P99 " in second.words
    assert first.words.endswith("P99 rests on 1 request: simulate more)")


def test_a_trace_that_any_rate_serves_is_too_short_to_tell() -> None:
    found = capacity(scenario(requests=3), Target("ttft", "p99", 1000.0))
    assert found["rate"] is None
    report = capacity_report(scenario(), Target("ttft", "p99", 1000.0), [{"policy": "fcfs"}], [found])
    assert "fcfs: meets the target at any rate: the trace is too short to tell" in as_text(report)


def test_a_capacity_is_said_in_one_line_a_configuration_the_highest_first() -> None:
    base, target = scenario(requests=60), Target("ttft", "p99", 0.3)
    chosen = scenarios(base, read_settings(["policy=static,fcfs", "max_num_seqs=4,16"]))
    found = [capacity(each, target) for _, each in chosen]
    report = capacity_report(base, target, [each for each, _ in chosen], found)
    lines = [finding.words for finding in report.findings]
    assert len(lines) == 4 and lines[0].startswith("fcfs, max_num_seqs 16: ")
    assert "requests a second (TTFT P99 " in lines[0]
    rates = [each["rate"] for each in report.figures["capacities"]]
    assert rates == sorted(rates, reverse=True)
    best = scenarios(base, {"policy": ["fcfs"], "max_num_seqs": [16]})[0][1]
    assert not target.is_met(simulate(best.with_setting("rate", 1.02 * rates[0])))


def test_a_trace_of_its_own_rate_is_swept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f'{{"at": {at}, "prompt_tokens": 50, "output_tokens": 5}}\n' for at in range(9)))
    result = swept("policy=fcfs,static", base=Scenario(Traffic(str(path)), CONFIG, COST))
    report = sweep_report(result, None)
    assert report.next_steps[0].startswith("choose policy ")
