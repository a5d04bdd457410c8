"""`lfm2np score --requests`, `--workers`, `--save` and `--merge`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lfm2np.commands.cli import main
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.target import Abilities

pytestmark = pytest.mark.slow

REQUESTS: list[dict[str, Any]] = [
    {"request_id": "first", "prompt_token_ids": [1, 2, 3]},
    {"prompt": "hello"},
    {"prompt": "hel", "completion": "lo"},
    {"prompt_token_ids": [1, 7], "completion_token_ids": [250, 4, 4]},
]


def written(path: Path, requests: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return str(path)


def test_the_sequences_of_a_file_score_as_each_alone(model, tmp_path, answer):
    options = ["score", "--model", str(model)]
    many = answer(*options, "--requests", written(tmp_path / "r.jsonl", REQUESTS))
    outputs = many["outputs"]
    assert [output["request_id"] for output in outputs] == ["first", "1", "2", "3"]
    alone = [
        answer(*options, "--prompt-ids", "1,2,3"),
        answer(*options, "--prompt", "hello"),
        answer(*options, "--prompt", "hel", "--completion", "lo"),
        answer(*options, "--prompt-ids", "1,7", "--completion-ids", "250,4,4"),
    ]
    for output, other in zip(outputs, alone, strict=True):
        for name in ("token_ids", "scores", "total_logprob"):
            assert output[name] == other[name]
    tokens = sum(len(output["token_ids"]) - 1 for output in outputs)
    assert (many["summary"]["requests"], many["summary"]["tokens"]) == (4, tokens)
    assert all(report["summary"]["tokens_per_second"] > 0 for report in (many, *alone))


def test_worker_processes_and_a_file_of_results_give_the_same(model, tmp_path, answer, capsys):
    options = ["score", "--model", str(model), "--requests", written(tmp_path / "r.jsonl", REQUESTS)]
    results = str(tmp_path / "results.jsonl")
    here, there = answer(*options), answer(*options, "--workers", "2", "--save", results)
    again = answer(*options, "--save", results)
    assert here["outputs"] == there["outputs"] == again["outputs"]
    assert again["summary"]["tokens"] == 0 and again["summary"]["tokens_per_second"] is None
    assert main([*options, "--save", results]) == 0
    assert "all known before" in capsys.readouterr().out


def test_files_of_two_machines_are_merged_if_each_line_is_right(model, tmp_path, answer, failure, capsys):
    options = ["score", "--model", str(model), "--requests"]
    parts = [str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    for part, requests in zip(parts, (REQUESTS[:2], REQUESTS[2:]), strict=True):
        answer(*options, written(tmp_path / "part.jsonl", requests), "--save", part)
    merge = ["score", "--merge", *parts, "-o", str(tmp_path / "all.jsonl"), "--model", str(model), "--spot-check", "2"]
    report = answer(*merge)
    assert report["items"] == 4 and len(report["checked"]) == 2
    assert main(merge) == 0
    assert capsys.readouterr().out.endswith("4 items from 2 files; 2 computed again\n")
    whole = answer(*options, written(tmp_path / "r.jsonl", REQUESTS), "--save", str(tmp_path / "all.jsonl"))
    assert whole["summary"]["tokens"] == 0
    code, message = failure("score", "--output", parts[0], "--merge", parts[0])
    assert code == 2 and "of the checkpoint of SHA-256" in message
    (tmp_path / "all.jsonl").unlink()
    lines = [json.loads(line) for line in Path(parts[0]).read_text().splitlines()]
    lines[1]["sha256"] = "0" * 64
    written(Path(parts[0]), lines)
    code, message = failure(*merge)
    assert code == 1
    assert "one.jsonl line 2: score of [1, " in message and f"sha256 '{'0' * 64}', expected" in message
    assert not (tmp_path / "all.jsonl").exists()


def test_requests_that_overflow_are_told_beside_the_others(overflowing, tmp_path, capsys):
    words = ["score", "--model", str(overflowing), "--requests", written(tmp_path / "r.jsonl", REQUESTS[:2])]
    assert main([*words, "--json"]) == 4
    captured = capsys.readouterr()
    assert all("overflow exact" in output["error"] for output in json.loads(captured.out)["outputs"])
    assert "2 of 2 requests can't be computed, first first: " in captured.err
    assert main(words) == 4
    assert "overflow exact" in capsys.readouterr().out


@pytest.mark.night
@pytest.mark.rounding
def test_check_and_vectors_take_workers_and_results(
    tmp_path: Path, answer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the trained fixture, whose tokens have texts."""
    results = str(tmp_path / "results.jsonl")
    words = ["check", "lfm2np.suite.adapters:own", "--cases", "short-prompts", "--save", results]
    first, second = answer(*words, "--workers", "2"), answer("check", results, "--save", results)
    assert first["verdict"] == second["verdict"] == "EXACT"
    tokens, tokens_again = (report["figures"]["scoring"]["tokens"] for report in (first, second))
    assert 2 * tokens == 3 * tokens_again > 0  # of two emulated engines, and only at first of the truth, which is kept
    assert second["figures"]["scoring"]["tokens_per_second"] > 0
    assert main(["vectors", "verify", "--workers", "2", "--save", results]) == 0
    assert capsys.readouterr().out.startswith("verdict    EXACT\n")


@pytest.mark.rounding
def test_a_check_that_has_its_verdict_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file has answers and truths: after an interrupt while it judges, no request is sent and no truth computed
    again; after its verdict the engine may be another."""
    path = tmp_path / "check.jsonl"
    words = ["check", "lfm2np.suite.adapters:own", "--cases", "short-prompts", "--save", str(path), "--json"]

    def interrupted(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lfm2np.oracle.check.total", interrupted)
        assert main(words) == 130
    lines = path.read_bytes().count(b"\n")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("lfm2np.suite.adapters.Own.add", interrupted)
        patch.setattr("lfm2np.oracle.engines.python_target.PythonTarget.probe", known_abilities)
        assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "EXACT"
    assert path.read_bytes().count(b"\n") == lines + 1  # the verdict: no answer, and no truth
    assert main(words) == 3
    assert "a check that ended with EXACT" in capsys.readouterr().err
    assert main(["check", str(path), "--json"]) == 0
    assert main([*words[:2], "--seed", "1", *words[2:]]) == 3


def known_abilities(target: PythonTarget) -> Abilities:
    return Abilities("own", tells_logprobs=True, tells_prompt_logprobs=True, at_once=16, can_abort=True)
