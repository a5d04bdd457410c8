"""Sizes that nobody gave: a run without a finding says that they were assumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from served_here import folder

from lfm2np.commands.cli import main
from lfm2np.oracle.engines.records import Answer
from lfm2np.suite.adapters import Own, own
from lfm2np.suite.fuzz import campaign
from lfm2np.suite.fuzz.draw_traces import Around, drawn_trace

OWN = "lfm2np.suite.adapters:own"
pytestmark = pytest.mark.rounding
GIVEN = ("--block-size", "4", "--max-num-batched-tokens", "16", "--max-num-seqs", "2", "--max-model-len", "28")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fuzz(*arguments: str) -> int:
    return main(["fuzz", "--examples", "2", *arguments, "--model", str(folder())])


def test_a_run_without_a_finding_warns_of_sizes_that_were_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz(OWN) == 0
    verdict, *_, sizes, not_tested = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert "max_num_batched_tokens 64 (assumed)" in sizes
    assert verdict == "verdict    no finding" and not_tested.startswith("not tested ")
    assert "assumed: give --block-size, --max-num-batched-tokens" in not_tested
    assert fuzz(OWN, *GIVEN) == 0
    shown = capsys.readouterr().out
    assert "max_num_batched_tokens 16, " in shown and "not tested" not in shown


class Silent:
    """Reports no log-probabilities."""

    lacks = frozenset({"sampling", "samples", "processors", "stops", "logprobs"})

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        self.inner = own(model, sizes)

    def generate(self, requests: Any) -> list[list[Answer]]:
        return [[Answer(answer.token_ids, finish_reason="length")] for (answer,) in self.inner.generate(requests)]


def test_without_log_probabilities_the_report_says_that_only_tokens_were_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fuzz("test_sizes:Silent", *GIVEN, "--without", "text") == 0
    assert "not tested tokens only: no log-probabilities were reported" in capsys.readouterr().out


@pytest.mark.slow
def test_a_stale_state_after_preemption_is_found_without_any_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 traces around blocks of 16 and chunks of 512 alone had not found it."""
    monkeypatch.setattr(campaign, "FIRST_REPLAYS", 1)
    monkeypatch.setattr(campaign, "LAST_REPLAYS", 2)
    assert main(["fuzz", "stale_engine:factory", "--examples", "24", "--shrink-minutes", "0", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    row = finding["evidence"]
    assert (finding["kind"], row["failed"]) == ("wrong", 2)
    assert main(["fuzz", "stale_engine:right", "--examples", str(row["traces"]), "--out", "right"]) == 0


class Reports(Own):
    sizes: ClassVar = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 2, "max_model_len": 28}


def test_sizes_that_an_engine_reports_are_not_assumed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lfm2np.suite.adapters.Own", Reports)
    assert fuzz(OWN, "--json") == 0
    report = json.loads(capsys.readouterr().out)["figures"]
    assert report["assumed"] == []
    assert report["sizes"] == Reports.sizes


def test_where_sizes_are_assumed_prompts_reach_common_borders_and_some_traces_are_crowds() -> None:
    around = Around(16, 64, 8, 1024, tuple(range(20, 60)), assumed=("block_size",))
    seen: Counter[str] = Counter()

    for number in range(60):
        trace = drawn_trace(around, str(number))
        lengths = [len(sent.prompt_token_ids) for sent in trace.requests]
        seen.update(str(size) for size in (64, 256, 512) if any(abs(length - size) <= 1 for length in lengths))
        at_once = sum(sent.num_tokens for sent in trace.requests if sent.after is None)
        seen["full"] += at_once > 1024 and max(lengths) <= 300
    assert all(seen[size] >= 3 for size in ("64", "256", "512")) and seen["full"] >= 2, seen
