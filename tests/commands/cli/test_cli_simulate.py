"""`lfm2np simulate` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lfm2np.commands.cli.program import main

pytestmark = pytest.mark.slow

SMALL = ("poisson:prompt=100,output=1-40,requests=60", "--rate", "5")
MANY = (*SMALL, "--sweep", "policy=fcfs,static", "--sweep", "rate=2,8")


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(ran(capsys, *words, "--json"))["figures"]
    return result


def test_a_drawn_trace_is_simulated_and_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    first = ran(capsys, *SMALL)
    assert first == ran(capsys, *SMALL)
    assert first.splitlines()[0] == "verdict    not saturated"
    assert "60 of 60 finished, in " in first and "published figures, not measured" in first
    assert "\nprefixes   0 % of 6,000 prompt tokens were cached\n" in first
    assert all(f" {name} " in first for name in ("TTFT", "TPOT", "ITL", "E2E", "QUEUED"))
    assert figures(capsys, *SMALL)["requests"]["finished"] == 60


def test_worker_processes_give_the_same_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert "at 8 requests a second choose policy fcfs" in ran(capsys, *MANY)
    assert figures(capsys, *MANY) == figures(capsys, *MANY, "--workers", "2")


def test_each_policy_has_one_line_that_says_its_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    text = ran(capsys, SMALL[0].replace("60", "30"), "--cost", "L4:LFM2-2.6B", "--capacity", "ttft_p99=0.5")
    for policy in ("fcfs", "prefill-first", "waiting-served", "static"):
        assert sum(f" {policy}: " in line and "requests a second (TTFT P99 " in line for line in text.splitlines()) == 1


def test_a_cost_model_is_fitted_to_measured_steps_and_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    steps, cost = tmp_path / "steps.csv", tmp_path / "cost.json"
    rows = [f"{n},{min(n, 4)},{100 + n * n},{0.002 + 0.0001 * n}" for n in range(1, 60)]
    steps.write_text("\n".join(["tokens,requests,context,seconds", *rows]))
    text = ran(capsys, "--fit", str(steps), "--output", str(cost))
    assert "of 59 steps, each predicted from others" in text
    assert "measured steps in steps.csv; off by 0 % a step" in ran(capsys, *SMALL, "--cost", str(cost))


def test_a_trace_of_generate_is_a_file_of_measured_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = str(tmp_path / "run.jsonl")
    assert main(["generate", "--chat", "copy: a b c d e f g", "--max-tokens", "20", "--trace", trace]) == 0
    capsys.readouterr()
    assert "steps, each predicted from others" in ran(capsys, "--fit", trace)


def test_requests_larger_than_the_pool_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    text = ran(capsys, "poisson:prompt=10-1000,output=5,requests=50", "--rate", "5", "--num-blocks", "20")
    assert "\nrefused    " in text and "blocks" in text
    verdict, because = text.splitlines()[:2]
    assert verdict.endswith(" requests refused") and "of 50 requests were refused; of the others the queue" in because
