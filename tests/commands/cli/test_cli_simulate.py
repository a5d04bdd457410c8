"""`lfm2np simulate` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lfm2np.commands.cli.program import main
from lfm2np.commands.simulate import scenario

SMALL = "poisson:rate=5,prompt=100,output=1-40,requests=60"
MANY = ["--sweep", "policy=fcfs,static", "--sweep", "max_num_seqs=2,8"]


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(ran(capsys, *words, "--json"))["figures"]
    return result


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code, and the one line that says why."""
    code = main(["simulate", *words])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return code, lines[0]


def test_a_drawn_trace_is_simulated_and_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    first = ran(capsys, SMALL)
    assert first == ran(capsys, SMALL)
    assert first.splitlines()[0] == "verdict    not saturated"
    assert f"{SMALL}, seed 0" in first and "60 of 60 finished, in " in first
    assert "published figures, not measured" in first
    result = figures(capsys, SMALL)
    assert result["requests"]["finished"] == 60
    assert "groups" not in result


def test_a_trace_is_saved_read_again_and_its_steps_replay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved, trace, html = tmp_path / "saved.jsonl", tmp_path / "trace.jsonl", tmp_path / "page.html"
    short = SMALL.replace("requests=60", "requests=3")
    drawn = ran(capsys, short, "--save-trace", str(saved), "--trace", str(trace), "--html", str(html))
    again = ran(capsys, str(saved))
    assert [line for line in drawn.splitlines() if not line.startswith(("traffic", "again"))] == [
        line for line in again.splitlines() if not line.startswith(("traffic", "again"))
    ]
    assert html.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert main(["replay", str(trace)]) == 0
    assert main(["draw", str(trace), "-o", str(tmp_path / "drawing.html")]) == 0


def test_a_part_of_a_trace_begins_at_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    part = figures(capsys, SMALL, "--within", "2:6")
    assert 10 < part["requests"]["finished"] < 30
    assert part["throughput"]["seconds"] < 5


def test_a_sweep_goes_on_where_it_broke_off(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.jsonl"
    first = ran(capsys, SMALL, *MANY, "--save", str(file))
    assert "next       Choose policy fcfs" in first
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    file.write_text("".join(lines[:3]) + lines[3][:50])  # as a crash leaves it
    calls: list[object] = []
    monkeypatch.setattr(
        "lfm2np.commands.cli.simulate.simulate", lambda each: calls.append(each) or scenario.simulate(each)
    )
    assert main(["simulate", SMALL, *MANY, "--save", str(file)]) == 0
    output = capsys.readouterr()
    assert output.out == first and "torn" in output.err
    assert len(calls) == 1
    file.write_text(lines[0].replace('"policy": "fcfs"', '"policy": "fcfx"', 1))
    code, line = refused(capsys, SMALL, *MANY, "--save", str(file))
    assert code == 1 and "changed since it was written" in line


def test_worker_processes_give_the_same_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, SMALL, *MANY, "--workers", "2") == ran(capsys, SMALL, *MANY)


def test_several_seeds_are_several_traces(capsys: pytest.CaptureFixture[str]) -> None:
    single, more = (figures(capsys, SMALL, *MANY, "--seeds", n) for n in ("1", "2"))
    assert single["runs"][0]["seconds"] != more["runs"][0]["seconds"]


def test_a_cost_model_is_fitted_to_measured_steps_and_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    steps, cost = tmp_path / "steps.csv", tmp_path / "cost.json"
    rows = [f"{n},{min(n, 4)},{100 + n * n},{0.002 + 0.0001 * n}" for n in range(1, 60)]
    steps.write_text("\n".join(["tokens,requests,context,seconds", *rows]))
    text = ran(capsys, "--fit", str(steps), "--out", str(cost))
    assert "of 59 steps, each predicted from others" in text
    assert "measured steps in steps.csv" in ran(capsys, SMALL, "--cost", str(cost))


def test_drafts_are_accepted_as_generate_reports_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "generated.json"
    assert main(["generate", "--chat", "copy: a b c a b c a b c", "--speculative", "ngram", "--json"]) == 0
    report.write_text(capsys.readouterr().out)
    with_drafts = figures(capsys, SMALL, "--drafts", "2", "--acceptance", str(report))
    assert with_drafts["drafts"]["proposed"] > with_drafts["drafts"]["accepted"] > 0
    always = figures(capsys, SMALL, "--drafts", "2", "--acceptance", "1")
    assert always["steps"]["all"] < figures(capsys, SMALL)["steps"]["all"]


TRACES = {
    "negative.jsonl": '{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n',
    "order.jsonl": "".join(
        f'{{"timestamp": {at}, "input_length": 5, "output_length": 5, "hash_ids": [1]}}\n' for at in (5, 3)
    ),
    "columns.csv": "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6805900,374\n",
    "unknown.txt": "one two three\n",
    "empty.csv": "",
}


@pytest.mark.parametrize(
    "words, expected",
    [
        ((), "expected a trace (or a generator), or --fit"),
        (("nowhere.csv",), "'nowhere.csv': no such file, and no generator: expected one of poisson"),
        (("poissn:rate=4",), "no such file, and no generator"),
        ((SMALL, "--rate", "3"), "--rate 3: the generator has its own"),
        ((SMALL, "--within", "500:501"), "no request in this part of it"),
        ((SMALL, "--memory", "1", "--sweep", "num_blocks=5,6"), "num_blocks: --memory says"),
        (("poisson:rate=fast,prompt=1,output=1",), "rate 'fast': expected a number"),
        (("negative.jsonl",), "negative.jsonl:1: timestamp -1: expected"),
        (("order.jsonl",), "order.jsonl:2: time 0.003: expected at least"),
        (("columns.csv",), "columns.csv"),
        (("unknown.txt",), "unknown.txt"),
        (("empty.csv",), "empty.csv: empty"),
        ((SMALL, "--cost", "H100:GPT-5"), "expected GPU:MODEL"),
        ((SMALL, "--drafts", "2"), "drafts need --acceptance"),
        ((SMALL, "--target", "ttft_p99=1"), "--target goes with --sweep"),
        ((SMALL, "--speed", "0"), "--speed 0.0: expected a number above 0"),
        ((SMALL, "--within", "5:2"), "--within '5:2': expected seconds"),
        ((SMALL, "--memory", "1", "--num-blocks", "5"), "expected one of them"),
        ((SMALL, "--html", "nowhere/page.html"), "nowhere/page.html: can't be written"),
        ((SMALL, "--trace", "nowhere/trace.jsonl"), "nowhere/trace.jsonl: can't be written"),
        ((SMALL, "--num-blocks", "0"), "num_blocks 0: expected a whole number"),
    ],
)
def test_what_can_not_be_simulated_is_one_line(
    words: tuple[str, ...],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in TRACES.items():
        Path(name).write_text(text)
    code, line = refused(capsys, *words)
    assert code in (2, 3)
    assert expected in line


def test_requests_larger_than_the_pool_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    text = ran(capsys, "poisson:rate=5,prompt=10-1000,output=5,requests=50", "--num-blocks", "20")
    assert "\nrefused    " in text and "blocks" in text
