"""`lfm2np score --requests`, `--workers`, `--save` and `--merge`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import write_model
from test_cli import answer, failure, overflowing

from lfm2np.commands.cli import main
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.target import Abilities

REQUESTS: list[dict[str, Any]] = [
    {"request_id": "first", "prompt_token_ids": [1, 2, 3]},
    {"prompt": "hello"},
    {"prompt": "hel", "completion": "lo"},
    {"prompt_token_ids": [1, 7], "completion_token_ids": [250, 4, 4]},
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def written(path: Path, requests: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return str(path)


def test_the_sequences_of_a_file_score_as_each_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["score", "--model", str(model)]
    many = answer(capsys, *options, "--requests", written(tmp_path / "r.jsonl", REQUESTS))
    outputs: Any = many["outputs"]
    assert [output["request_id"] for output in outputs] == ["first", "1", "2", "3"]
    alone = [
        answer(capsys, *options, "--prompt-ids", "1,2,3"),
        answer(capsys, *options, "--prompt", "hello"),
        answer(capsys, *options, "--prompt", "hel", "--completion", "lo"),
        answer(capsys, *options, "--prompt-ids", "1,7", "--completion-ids", "250,4,4"),
    ]
    for output, other in zip(outputs, alone, strict=True):
        assert {name: output[name] for name in ("token_ids", "scores", "total_logprob")} == {
            name: other[name] for name in ("token_ids", "scores", "total_logprob")
        }
    summary: Any = many["summary"]
    tokens = sum(len(output["token_ids"]) - 1 for output in outputs)
    assert (summary["requests"], summary["tokens"]) == (4, tokens)
    assert summary["tokens_per_second"] > 0
    assert all(report["summary"]["tokens_per_second"] > 0 for report in alone)  # type: ignore[index]


def test_worker_processes_and_a_file_of_results_give_the_same(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["score", "--model", str(model), "--requests", written(tmp_path / "r.jsonl", REQUESTS)]
    here = answer(capsys, *options)
    results = str(tmp_path / "results.jsonl")
    there = answer(capsys, *options, "--workers", "2", "--save", results)
    assert there["outputs"] == here["outputs"]
    again = answer(capsys, *options, "--save", results)
    assert again["outputs"] == here["outputs"]
    assert again["summary"]["tokens"] == 0 and again["summary"]["tokens_per_second"] is None  # type: ignore[index]
    assert main([*options, "--save", results]) == 0
    assert "all known before" in capsys.readouterr().out


def test_files_of_two_machines_are_merged(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["score", "--model", str(model), "--requests"]
    parts = [str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    for part, requests in zip(parts, (REQUESTS[:2], REQUESTS[2:]), strict=True):
        answer(capsys, *options, written(tmp_path / "part.jsonl", requests), "--save", part)
    merge = ["score", "--merge", *parts, "-o", str(tmp_path / "all.jsonl"), "--model", str(model), "--spot-check", "2"]
    report = answer(capsys, *merge)
    assert report["items"] == 4
    assert len(report["checked"]) == 2  # type: ignore[arg-type]
    assert main(merge) == 0
    assert capsys.readouterr().out.endswith("4 items from 2 files; 2 computed again\n")
    whole = answer(capsys, *options, written(tmp_path / "r.jsonl", REQUESTS), "--save", str(tmp_path / "all.jsonl"))
    assert whole["summary"]["tokens"] == 0  # type: ignore[index]


def test_a_merge_that_is_refused_writes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, part = written(tmp_path / "r.jsonl", REQUESTS), tmp_path / "one.jsonl"
    answer(capsys, "score", "--model", str(model), "--requests", requests, "--save", str(part))
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    lines[2]["sha256"] = "0" * 64
    written(part, lines)
    options = ["score", "--merge", str(part), "-o", str(tmp_path / "all.jsonl"), "--model", str(model)]
    code, message = failure(capsys, *options)
    assert code == 1
    assert "one.jsonl line 3: score of [1, " in message and f"sha256 '{'0' * 64}', expected" in message
    assert failure(capsys, *options, "--completion-ids", "1") == (
        2,
        "lfm2np: RequestError: --completion-ids: is not used by --merge\n",
    )
    code, message = failure(capsys, "score", "--output", str(part), "--merge", str(part))
    assert code == 2
    assert "of the checkpoint of SHA-256" in message
    code, message = failure(
        capsys, "score", "--merge", str(tmp_path / "none.jsonl"), "-o", str(part), "--model", str(model)
    )
    assert code == 2
    assert "no such file" in message
    (tmp_path / "empty.jsonl").touch()
    code, message = failure(
        capsys, "score", "--merge", str(tmp_path / "empty.jsonl"), "-o", str(part), "--model", str(model)
    )
    assert code == 2
    assert "no results" in message
    assert not (tmp_path / "all.jsonl").exists()


def test_requests_that_overflow_are_told_beside_the_others(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overflowing(model)
    requests = written(tmp_path / "r.jsonl", REQUESTS[:2])
    assert main(["score", "--model", str(model), "--requests", requests, "--json"]) == 4
    captured = capsys.readouterr()
    assert all("overflow exact" in output["error"] for output in json.loads(captured.out)["outputs"])
    assert "2 of 2 requests can't be computed, first first: " in captured.err
    assert main(["score", "--model", str(model), "--requests", requests]) == 4
    assert "overflow exact" in capsys.readouterr().out


BAD_LINES: list[tuple[dict[str, Any], str]] = [
    ({}, "either prompt or prompt_token_ids"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "either prompt or prompt_token_ids"),
    ({"prompt": "a", "completion": "b", "completion_token_ids": [1]}, "not both"),
    ({"prompt": 3}, "prompt 3: expected a string"),
    ({"prompt": "a", "request_id": ""}, "request_id '': expected a string"),
    ({"prompt": "a", "max_tokens": 3}, "'max_tokens': expected some of completion, "),
    ({"prompt_token_ids": [1]}, "1 token to score"),
    ({"prompt_token_ids": [1, 300]}, "300"),
    ({"prompt_token_ids": [1], "completion_token_ids": []}, "none, expected at least one"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: dict[str, Any], message: str
) -> None:
    requests = written(tmp_path / "r.jsonl", [REQUESTS[0], line])
    code, error = failure(capsys, "score", "--model", str(model), "--requests", requests)
    assert code == 2
    assert f"{requests}, line 2: " in error and message in error


BAD_OPTIONS: list[tuple[list[str], str]] = [
    (["score", "--prompt", "a", "--workers", "2"], "--workers, --dask and --save go with --requests"),
    (["score", "--prompt", "a", "--save", "f"], "--workers, --dask and --save go with --requests"),
    (["score", "--prompt", "a", "--dask", "tcp://h:1"], "--workers, --dask and --save go with --requests"),
    (["score", "--requests", "REQUESTS", "--completion", "a"], "--requests has prompts and completions in its lines"),
    (["score", "--requests", "REQUESTS", "--system", "a"], "--requests has prompts and completions in its lines"),
    (["score", "--requests", "REQUESTS", "--workers", "-1"], "--workers -1: expected a whole number, at least 0"),
    (
        ["score", "--requests", "REQUESTS", "--save", "f", "--numerics", "float32"],
        "numerics float32, expected exact",
    ),
    (["score", "--requests", "TWICE"], "two requests have one request_id: '1'"),
    (["score", "--requests", "EMPTY"], "no requests, expected one JSON object a line"),
]


def test_a_cluster_needs_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    options = ["score", "--requests", written(tmp_path / "r.jsonl", [{"prompt": "a"}]), "--dask", "tcp://h:1"]
    code, error = failure(capsys, *options)
    assert code == 2
    assert "needs the extra `dask`: pip install 'lfm2np[dask]'" in error
    with pytest.raises(SystemExit, match="2"):
        main([*options, "--workers", "2"])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), BAD_OPTIONS)
def test_options_that_do_not_go_together_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    files = {
        "REQUESTS": written(tmp_path / "r.jsonl", REQUESTS),
        "TWICE": written(tmp_path / "t.jsonl", [{"prompt": "ab", "request_id": "1"}, {"prompt": "ab"}]),
        "EMPTY": written(tmp_path / "e.jsonl", []),
    }
    code, error = failure(capsys, *(files.get(argument, argument) for argument in arguments), "--model", str(model))
    assert code == 2
    assert message in error


@pytest.mark.slow
@pytest.mark.rounding
def test_check_and_vectors_take_workers_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the trained fixture, whose tokens have texts."""
    results = str(tmp_path / "results.jsonl")
    words = ["check", "lfm2np.suite.adapters:own", "--cases", "short-prompts", "--save", results, "--json"]
    assert main([*words, "--workers", "2"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["check", results, "--save", results, "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert first["verdict"] == second["verdict"] == "EXACT"
    assert first["figures"]["scoring"]["tokens"] >= 2 * second["figures"]["scoring"]["tokens"] > 0
    assert second["figures"]["scoring"]["tokens_per_second"] > 0
    assert main(["vectors", "verify", "--workers", "2", "--save", results]) == 0
    assert "bit for bit as computed here" in capsys.readouterr().out
    code = main(["vectors", "verify", "--save", str(tmp_path)])
    assert code == 3
    assert "can't be read" in capsys.readouterr().err


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
