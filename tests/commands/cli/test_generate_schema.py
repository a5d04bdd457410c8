"""generate.schema.json against what `lfm2np generate --json` really prints, whichever way and however many prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import write_model
from jsonschema import Draft202012Validator

import lfm2np
from lfm2np.commands.cli import main
from lfm2np.commands.cli.shared.generate_output import FORMAT_VERSION

SCHEMA = json.loads(Path(lfm2np.__file__).with_name("commands").joinpath("schemas", "generate.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)
ONE = ["--chat", "sort: 7 2 9 4"]
CRAMPED = ["--max-tokens", "8", "--block-size", "1", "--num-blocks", "40", "--max-num-batched-tokens", "3"]
TWO = [*ONE, "--chat", "add: 20 + 97"]
LINES: list[dict[str, object]] = [
    {"prompt": "sort: 3 1 2 ->", "max_tokens": 5, "request_id": "a", "logprobs": 2, "stop": ["2"]},
    {"prompt_token_ids": [1, 17, 42], "temperature": 1.5, "seed": 3, "n": 3, "arrival_step": 4, "priority": 1},
    {"prompt": "sort: 3 1 2 ->", "prompt_logprobs": 1, "stop_token_ids": [285, 281], "cache_salt": "x"},
    {"prompt": "sort: 3 1 2 ->", "max_tokens": 4, "include_stop_str_in_output": True, "stop": ["1"], "min_tokens": 1},
    {"prompt": "sort: 3 1 2 ->", "max_tokens": 1, "stop": [" 1 x"], "request_id": "held back until the end"},
    {"prompt_token_ids": [5], "max_tokens": 6, "ignore_eos": True, "logprobs": 0, "repetition_penalty": 1.3},
]
OPTIONS = [
    [*ONE],
    [*TWO],
    ["--prompt", "sort: 3 1 ->", "--max-tokens", "3", "--logprobs", "0"],
    ["--prompt-ids", "1,17,42", "--max-tokens", "3", "--logprobs", "2"],
    [*TWO, "--logprobs", "512", "--max-tokens", "1"],
    [*ONE, "--sequential"],
    [*TWO, "--sequential", "--logprobs", "1"],
    [*ONE, "--prove"],
    [*TWO, "--prove", "--temperature", "1.2", "--seed", "7"],
    [*ONE, "--speculative", "ngram"],
    [*TWO, "--speculative", "draft", "--prove"],
    [*TWO, *CRAMPED],
    [*TWO, "--no-prefix-caching", "--policy", "static", "--max-num-seqs", "1"],
    [*TWO, "--numerics", "bfloat16"],
    ["--requests", "FILE", "--prove"],
]


@pytest.fixture
def requests(tmp_path: Path) -> str:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """The one JSON object on standard output; NaN and Infinity are none."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert main(["generate", *arguments, "--json"]) == code
    (line,) = capsys.readouterr().out.splitlines()
    parsed: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return parsed


def test_the_schema_is_one_and_of_the_version_that_is_written() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["format_version"] == {"const": FORMAT_VERSION}


@pytest.mark.rounding
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_what_is_printed_is_of_the_schema(capsys, requests: str, options: list[str]) -> None:
    arguments = [requests if word == "FILE" else word for word in options]
    VALIDATOR.validate(printed(capsys, *arguments))


def test_a_checkpoint_without_a_tokenizer_has_ids_and_no_text(tmp_path: Path, capsys) -> None:
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    for way in ([], ["--sequential"], ["--prove"]):
        report = printed(capsys, "--model", str(model), "--prompt-ids", "1,2", "--max-tokens", "3", *way)
        VALIDATOR.validate(report)
        assert report["outputs"][0]["outputs"][0]["text"] is None


@pytest.mark.parametrize("way", [[], ["--sequential"], ["--prove"]])
def test_a_refused_request_is_told_in_the_summary(tmp_path: Path, capsys, way: list[str]) -> None:
    file = tmp_path / "requests.jsonl"
    lines = [{"prompt": "sort: 1 ->"}, {"prompt_token_ids": [1] * 5000, "request_id": "long"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    report = printed(capsys, "--requests", str(file), *way, code=2)
    VALIDATOR.validate(report)
    assert [output["request_id"] for output in report["outputs"]] == ["0"]
    assert list(report["summary"]["refused"]) == ["long"]
    assert "prompt of 5000 tokens" in report["summary"]["refused"]["long"]


def test_a_proof_that_fails_is_told_in_the_summary(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfm2np.commands.cli.generate.compare", lambda *records: "a difference")
    report = printed(capsys, *ONE, "--prove", code=1)
    VALIDATOR.validate(report)
    assert report["summary"]["proved"] is False
