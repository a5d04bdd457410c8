"""Which configuration is chosen, and how surely."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lfm2np.commands.simulate.cost import CostModel
from lfm2np.commands.simulate.histogram import bucket_of
from lfm2np.commands.simulate.page.sweep_page import sweep_report
from lfm2np.commands.simulate.scenario import Memory, Scenario, Traffic, simulate
from lfm2np.commands.simulate.sweep import (
    MOST_RUNS,
    RESAMPLINGS,
    read_settings,
    read_target,
    scenarios,
    summary,
)
from lfm2np.commands.simulate.traffic import NANOSECONDS
from lfm2np.errors import RequestError
from lfm2np.oracle.report.as_text import as_text
from scheduler import SchedulerConfig

COST = CostModel("drawn", "none", ({"1": 5e-3, "tokens": 4e-5, "requests": 1e-5},))


def scenario(traffic: str = "gamma:rate=5,cv=3,prompt=200,output=1-200,requests=200") -> Scenario:
    return Scenario(Traffic(traffic), SchedulerConfig(4000, max_num_seqs=16, max_num_batched_tokens=512), COST)


def invented(
    name: str, ttft: list[float], tpot: list[float], saturated: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run whose groups have one request each, with these seconds."""

    def values(seconds: list[float]) -> dict[str, float]:
        ordered = sorted(seconds)
        return {
            "mean": sum(seconds) / len(seconds),
            "p50": ordered[len(ordered) // 2],
            "p90": ordered[-1],
            "p99": ordered[-1],
            "max": ordered[-1],
        }

    groups = [
        {
            "ttft": [[bucket_of(round(first * NANOSECONDS)), 1]],
            "tpot": [[bucket_of(round(each * NANOSECONDS)), 1]],
            "e2e": [[bucket_of(round(each * NANOSECONDS)), 1]],
        }
        for first, each in zip(ttft, tpot, strict=True)
    ]
    seconds = {
        metric: values(ttft if metric == "ttft" else tpot) for metric in ("ttft", "tpot", "e2e", "itl", "queued")
    }
    more = {key: {"requests_per_second": 1.0} for key in ("throughput", "utilisation", "prefix_cache", "requests")}
    more |= {"requests": {"arrived": 8, "finished": 8}, "queue": {"unclear": None}, "beyond": None}
    result = {"seconds": seconds, "groups": groups, "preemptions": 0, "cost": {"name": "none"}, **more}
    return {"policy": name}, [{**result, "saturation": {"since": 1.0} if saturated else None}]


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
    assert len(scenarios(scenario(), settings)) == 2 * 4 * 2


def test_a_combination_that_its_policy_does_not_read_is_run_once_and_that_is_said() -> None:
    """Six combinations of which two, of fcfs, would be the same run again."""
    settings = read_settings(["waiting_served_ratio=0.1,1,2", "policy=fcfs,waiting-served"])
    chosen = scenarios(scenario("poisson:rate=5,prompt=50,output=5,requests=20"), settings)
    assert [each for each, _ in chosen] == [
        {"policy": "fcfs"},
        *({"waiting_served_ratio": ratio, "policy": "waiting-served"} for ratio in (0.1, 1, 2)),
    ]
    result = summary("x", settings, [(each, [simulate(run)]) for each, run in chosen], None)
    text = as_text(sweep_report(result))
    assert [line.split()[1:3] for line in text.splitlines() if line.split()[2:3] == ["fcfs"]] == [["-", "fcfs"]]
    assert "Left out: 2" in text and "waiting_served_ratio" in result["notes"][-1]


@pytest.mark.parametrize(
    "texts, message",
    [
        (["policy"], "expected NAME=VALUE"),
        (["policy=fcfs", "policy=static"], "given twice"),
        (["num_blocks=8:4"], "the second larger than the first"),
        (["num_block=8"], "setting 'num_block': expected one of"),
    ],
)
def test_settings_that_can_not_be_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        scenarios(scenario(), read_settings(texts))


def test_a_value_that_a_setting_can_not_have_is_refused_before_anything_runs() -> None:
    with pytest.raises(RequestError, match="policy 'best'"):
        scenarios(scenario(), read_settings(["policy=fcfs,best"]))
    with pytest.raises(RequestError, match=f"at most {MOST_RUNS}"):
        scenarios(scenario(), {"num_blocks": range(1000, 1100), "max_num_seqs": range(1, 102)})


@pytest.mark.parametrize("text", ["ttft=2", "ttft_p95=2", "ttft_p99=-1", "ttft_p99=nan", "itl_p99=2", "ttft_p99=x"])
def test_a_target_is_a_metric_a_quantile_and_seconds(text: str) -> None:
    with pytest.raises(RequestError, match="expected a metric and seconds"):
        read_target(text)


def test_the_choice_meets_the_target_with_the_shortest_time_per_token() -> None:
    runs = [
        invented("slow-first", [3.0] * 8, [0.01] * 8),
        invented("balanced", [1.0] * 8, [0.02] * 8),
        invented("beaten", [1.5] * 8, [0.03] * 8),
        invented("saturated", [0.1] * 8, [0.001] * 8, saturated=True),
    ]
    free, aimed, none = (
        summary("x", {"policy": []}, runs, target)
        for target in (None, read_target("ttft_p99=2"), read_target("ttft_p99=0.5"))
    )
    assert [run["settings"]["policy"] for run in free["runs"]] == ["slow-first", "balanced", "beaten", "saturated"]
    assert [run["on_front"] for run in free["runs"]] == [True, True, False, False]
    assert aimed["answer"] == [
        "Choose policy balanced: P99 time to first token 1 s, 20 ms per output token (the best of 3, 100 % sure)."
    ]
    assert "P99 rests on 0.08 requests: simulate more." in aimed["notes"]
    assert none["answer"][0].startswith("None meets the target; the nearest is policy balanced")
    assert "P99 time to first token below 500 ms" in none["notes"][0]
    only = summary("x", {"policy": []}, runs[3:], None)
    assert only["answer"] == ["Every run is saturated: none of these 1 configurations serves this traffic."]


def test_who_refuses_requests_is_not_chosen_for_being_fast() -> None:
    refusing, serving = invented("refusing", [0.1] * 8, [0.001] * 8), invented("serving", [1.0] * 8, [0.02] * 8)
    refusing[1][0]["requests"] = {"arrived": 8, "finished": 2}
    nothing = invented("nothing", [0.1] * 8, [0.001] * 8)
    nothing[1][0]["requests"] = {"arrived": 8, "finished": 0}
    result = summary("x", {"policy": []}, [nothing, refusing, serving], None)
    assert [(run["settings"]["policy"], run["lost"], run["on_front"]) for run in result["runs"]] == [
        ("serving", 0, True),
        ("refusing", 75, False),
        ("nothing", 100, False),
    ]
    assert result["answer"][0].startswith("Choose policy serving")
    assert "No run finished a request" in summary("x", {"policy": []}, [nothing], None)["answer"][0]


def test_a_choice_that_may_be_saturated_says_so() -> None:
    run = invented("near", [1.0] * 8, [0.02] * 8)
    run[1][0]["queue"] = {"unclear": "the load is near capacity"}
    said = "Whether it is saturated is unclear: the load is near capacity."
    assert said in summary("x", {}, [run], None)["notes"]


def test_a_choice_whose_steps_were_not_measured_says_so() -> None:
    run = invented("large", [1.0] * 8, [0.02] * 8)
    run[1][0]["beyond"] = 0.25
    notes = summary("x", {}, [run], None)["notes"]
    assert "25 % of the busy time is in steps larger than any that was measured." in notes


def test_runs_that_come_out_the_same_are_ties() -> None:
    runs = [invented(name, [1.0] * 8, [0.02, 0.03] * 4) for name in ("a", "b", "c", "d")]
    result = summary("x", {"policy": []}, runs, None)
    assert "100 % sure" in result["answer"][0]
    assert "The same times with policy b or policy c and 1 more." in result["notes"]


def test_the_certainty_is_the_share_of_resamplings_as_counted_by_hand() -> None:
    """The first is better but for one group in four, which is drawn k times of four with binomial probability: it is
    better on the whole where 4 k is below its advantage in the others, 2 (4 - k), so for k = 0 or 1."""
    runs = [invented("a", [1.0] * 4, [0.02, 0.02, 0.02, 0.05]), invented("b", [1.0] * 4, [0.03, 0.03, 0.03, 0.03])]
    assert runs[0][1][0]["seconds"]["tpot"]["mean"] < 0.03
    result = summary("x", {"policy": []}, runs, None)
    expected = (3 / 4) ** 4 + 4 * (1 / 4) * (3 / 4) ** 3
    assert result["share"] == pytest.approx(expected, abs=3 * (expected * (1 - expected) / RESAMPLINGS) ** 0.5)
    assert "else mostly policy b" in result["answer"][0]


def test_loads_are_answered_one_by_one() -> None:
    chosen = scenarios(scenario(), read_settings(["speed=1,2", "policy=fcfs,static"]))
    result = summary("x", {"speed": [1, 2], "policy": []}, [(each, [simulate(run)]) for each, run in chosen], None)
    assert [run["settings"]["speed"] for run in result["runs"]] == [1, 1, 2, 2]
    assert len(result["answer"]) == 2
    assert result["answer"][1].startswith("With speed 2: choose policy")
    assert all(answer in as_text(sweep_report(result)) for answer in result["answer"])
    assert len(result["notes"]) == len(set(result["notes"]))


def test_the_key_of_a_result_changes_with_all_that_it_depends_on() -> None:
    base = scenario()
    others = [run for _, run in scenarios(base, read_settings(["speed=1,2", "drafts=0,1", "num_blocks=4000,5000"]))]
    file = replace(base, traffic=Traffic("trace.jsonl"))
    keys = {run.key("") for run in others} | {file.key("content"), file.key("other content")}
    assert len(keys | {scenario("poisson:rate=1,prompt=2,output=3").key("")}) == 11
    for field, value in (("name", "other"), ("overhead", 1.0), ("largest", {"tokens": 1, "requests": 1, "read": 1})):
        assert replace(base, cost=replace(COST, **{field: value})).key("") not in keys
    assert base.key("content") in {run.key("content") for run in others}


def test_blocks_of_a_memory_hold_their_keys_values_and_a_checkpoint() -> None:
    base = replace(scenario(), memory=Memory(1_000_000, per_token=100, per_state=4000))
    blocks = [run.sized().num_blocks for _, run in scenarios(base, read_settings(["block_size=16,160"]))]
    assert blocks == [1_000_000 // (1600 + 4000), 1_000_000 // (16000 + 4000)]


def test_parameters_of_a_generator_are_loads() -> None:
    chosen = scenarios(scenario(), read_settings(["rate=2,8", "output=50,10~1.5", "policy=fcfs,static"]))
    assert {run.traffic.source for _, run in chosen} == {
        f"gamma:cv=3,prompt=200,requests=200,rate={rate},output={output}"
        for rate in (2, 8)
        for output in (50, "10~1.5")
    }
    result = summary("x", {"rate": []}, [(each, [simulate(run)]) for each, run in chosen], None)
    assert len(result["answer"]) == 4
    assert any(line.startswith("With rate 8, output 10~1.5: choose policy fcfs") for line in result["answer"])


@pytest.mark.parametrize("setting", ["speed=0", "speed=fast", "drafts=-1", "drafts=1.5"])
def test_loads_and_drafts_are_numbers(setting: str) -> None:
    with pytest.raises(RequestError, match=setting.split("=")[0]):
        scenarios(scenario(), read_settings([setting]))
