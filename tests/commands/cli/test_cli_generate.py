"""`lfm2np generate` with several requests, --prove, --sequential, --trace, --json; `lfm2np draw --replay`."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import lfm2np
from lfm2np.commands.cli import generate, main
from lfm2np.commands.cli.shared.generate_output import FORMAT_VERSION, print_calls
from lfm2np.commands.cli.shared.requests import Job
from lfm2np.engine.outputs import CompletionOutput
from lfm2np.engine.sampling.params import SamplingParams

pytestmark = pytest.mark.slow

SCHEMA = json.loads(Path(lfm2np.__file__).with_name("commands").joinpath("schemas", "generate.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)
CHATS = ["sort: 7 2 9 4 1", "add: 20 + 97", "count: 23 to 26"]
ANSWERS = ["1 2 4 7 9", "117", "23 24 25 26"]


def chats() -> list[str]:
    return [word for chat in CHATS for word in ("--chat", chat)]


def test_several_prompts_are_batched_and_proved(answer, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", *chats(), "--prove"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[38:] for line in lines[:3]] == ANSWERS
    assert lines[-1] == "verified: every token and every logit equals sequential generation, bit for bit"
    report = answer("generate", *chats(), "--prove", "--block-size", "1", "--max-num-batched-tokens", "5")
    assert [output["outputs"][0]["text"] for output in report["outputs"]] == ANSWERS
    assert report["summary"]["proved"] is True
    assert report["summary"]["steps"] > 9


@pytest.mark.parametrize("options", [[], ["--seed", "3"], ["--sequential"], ["--block-size", "2"], ["--trace", "FILE"]])
def test_one_prompt_is_answered_by_its_text_alone(tmp_path: Path, capsys, options: list[str]):
    words = [str(tmp_path / "trace.jsonl") if word == "FILE" else word for word in options]
    assert main(["generate", "--chat", CHATS[0], *words]) == 0
    assert capsys.readouterr().out == f"{ANSWERS[0]}\n"


@pytest.mark.parametrize(
    ("options", "row"),
    [(["--prove"], "speed-up over sequential"), (["--speculative", "ngram"], "mean accepted length")],
)
def test_figures_follow_the_text_of_one_prompt_where_they_were_asked_for(capsys, options: list[str], row: str):
    assert main(["generate", "--chat", CHATS[0], *options]) == 0
    text, empty, *figures = capsys.readouterr().out.splitlines()
    assert (text, empty) == (ANSWERS[0], "")
    assert any(line.startswith(row) for line in figures)


class Written(io.StringIO):
    """Standard output that is no terminal, and what each write to it was."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


@pytest.mark.parametrize("way", [[], ["--sequential"]])
def test_text_of_one_prompt_comes_as_it_is_generated(monkeypatch: pytest.MonkeyPatch, way: list[str]):
    written = Written()
    monkeypatch.setattr("sys.stdout", written)
    assert main(["generate", "--chat", CHATS[2], *way]) == 0
    assert [piece for piece in written.pieces if piece] == [*re.findall(r" ?\d", ANSWERS[2]), "\n"]


@pytest.mark.parametrize("way", [[], ["--sequential"]])
def test_log_probabilities_of_several_prompts_stand_under_their_lines(capsys, way: list[str]):
    assert main(["generate", "--chat", CHATS[1], "--logprobs", "1"]) == 0
    alone = capsys.readouterr().out.splitlines()
    assert len(alone) == 4
    assert main(["generate", *chats(), "--logprobs", "1", *way]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(CHATS[1]))
    assert lines[first][38:] == ANSWERS[1]
    assert lines[first + 1 : first + 5] == alone
    assert lines[first + 5].startswith(CHATS[2])


@pytest.mark.rounding
def test_float32_is_not_batch_invariant_and_the_proof_says_so(capsys: pytest.CaptureFixture[str]):
    """The control: --prove can fail, with exit code 1 and the first difference, wherever this machine has it."""
    longer = ["--chat", "count: 23 to 31"]
    code = main(["generate", *chats(), *longer, "--prove", "--numerics", "float32"])
    captured = capsys.readouterr()
    assert code == 1
    assert re.search(
        r"ProofError: request \d: output token \d+: logits: logit of token \d+ is -?[\d.e-]+, alone it is -?[\d.e-]+$",
        captured.err,
        re.MULTILINE,
    )


def test_calls_of_a_reply_are_shown(capsys: pytest.CaptureFixture[str]):
    tokenizer = lfm2np.load().tokenizer
    ids = tuple(tokenizer.encode_more("So: <|tool_call_start|>[f(a='x'), g()]<|tool_call_end|><|im_end|>"))
    sample = CompletionOutput(0, "So: [f(a='x'), g()]", ids, None, "stop", None)
    print_calls(Job("0", (1, 6), None, "", SamplingParams()), sample, tokenizer)
    assert capsys.readouterr().out == 'call: f {"a": "x"}\ncall: g {}\n'


def test_a_request_file_gives_each_request_its_own_parameters(tmp_path: Path, answer):
    lines = [
        {"prompt": "sort: 3 1 2 ->", "max_tokens": 5, "request_id": "a"},
        {"prompt_token_ids": [1, 17, 42], "temperature": 1.5, "seed": 3, "n": 2, "arrival_step": 4, "priority": 1},
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    options, trace = ["--requests", str(file), "--prove", "--policy", "priority"], str(tmp_path / "trace.jsonl")
    first, second = answer("generate", *options, "--trace", trace)["outputs"]
    assert first["request_id"] == "a"
    assert len(second["outputs"]) == 2
    assert answer("draw", trace, "--replay")["outputs"]["1#1"] == second["outputs"][1]["token_ids"]


def test_a_trace_that_is_cut_at_any_line_border_is_refused_unless_a_part_is_wished(tmp_path: Path, answer, capsys):
    trace = tmp_path / "trace.jsonl"
    assert main(["generate", *chats(), "--trace", str(trace)]) == 0
    lines = trace.read_text().splitlines(keepends=True)
    for count in range(1, len(lines)):
        trace.write_text("".join(lines[:count]))
        capsys.readouterr()
        assert main(["draw", str(trace), "--replay"]) == 3
        assert f"no end after line {count}: the file was cut off, or its run broke off" in capsys.readouterr().err
        replayed = answer("draw", str(trace), "--replay", "--partial")
        assert (replayed["unfinished"] > 0) == (1 < count < len(lines) - 1)
    assert main(["draw", str(trace), "--terminal"]) == 3
    assert main(["draw", str(trace), "--terminal", "--partial"]) == 0
    trace.write_text("".join(lines[:-1])[:-9])  # a run that was killed within a line
    for shown in ("--terminal", "--replay"):
        assert main(["draw", str(trace), shown, "--partial"]) == 0


@pytest.mark.parametrize(
    ("field", "value"), [("text", "x"), ("finish_reason", "x"), ("stop_reason", 7), ("logprobs", ())]
)
def test_a_proof_names_what_is_reported_otherwise_than_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], field: str, value: object
):
    """With the same tokens and logits."""
    run_sequential = generate.run_sequential

    def altered(*arguments: Any) -> generate.Ran:
        ran = run_sequential(*arguments)
        (name, output), *_ = ran.outputs.items()
        samples = tuple(replace(sample, **{field: value}) for sample in output.outputs)
        return replace(ran, outputs={**ran.outputs, name: replace(output, outputs=samples)})

    monkeypatch.setattr(generate, "run_sequential", altered)
    assert main(["generate", "--prompt-ids", "1,17,42", "--max-tokens", "2", "--prove"]) == 1
    assert f": {field}: " in capsys.readouterr().err


# --- speculative decoding


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_speculation_changes_the_steps_and_nothing_else(answer, capsys: pytest.CaptureFixture[str], kind: str):
    assert main(["generate", *chats(), "--speculative", kind]) == 0
    text = capsys.readouterr().out
    assert [line[38:] for line in text.splitlines()[:3]] == ANSWERS
    assert "\nmean accepted length " in text
    report = answer("generate", *chats(), "--prove", "--speculative", kind, "--num-speculative-tokens", "3")
    drafts = report["summary"]["speculative"]
    assert drafts["drafter"] == kind
    assert drafts["proposed"] == sum(drafts["proposed_at"]) > 0
    assert (
        drafts["accepted"]
        == sum(drafts["accepted_at"])
        == sum(o["metrics"]["accepted_tokens"] for o in report["outputs"])
    )
    assert report["summary"]["steps"] < 9 or kind == "ngram"


def test_random_drafts_are_proved_against_one_position_after_the_other(tmp_path: Path, answer):
    trace = tmp_path / "trace.jsonl"
    options = ["--speculative", "draft", "--draft-sampling", "random", "--temperature", "1.4", "--trace", str(trace)]
    options += ["--model", str(lfm2np.trained_fixture()), "--draft-model", str(lfm2np.draft_fixture())]
    report = answer("generate", *chats(), "--prove", *options)
    assert report["summary"]["speculative"]["accepted"] > 0
    replayed = answer("draw", str(trace), "--replay")["outputs"]
    assert replayed == {output["request_id"]: output["outputs"][0]["token_ids"] for output in report["outputs"]}
    drafts = [json.loads(line).get("drafts") for line in trace.read_text().splitlines()]
    assert any(drafts)


# --- --json

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


def test_the_schema_is_one_and_of_the_version_that_is_written() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["format_version"] == {"const": FORMAT_VERSION}


@pytest.mark.rounding
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_what_is_printed_is_of_the_schema(answer, requests: str, options: list[str]) -> None:
    VALIDATOR.validate(answer("generate", *(requests if word == "FILE" else word for word in options)))


def test_a_checkpoint_without_a_tokenizer_has_ids_and_no_text(model: Path, answer) -> None:
    (model / "tokenizer.json").unlink()
    for way in ([], ["--sequential"], ["--prove"]):
        report = answer("generate", "--model", str(model), "--prompt-ids", "1,2", "--max-tokens", "3", *way)
        VALIDATOR.validate(report)
        assert report["outputs"][0]["outputs"][0]["text"] is None


@pytest.mark.parametrize("way", [[], ["--sequential"], ["--prove"]])
def test_a_refused_request_is_told_in_the_summary(tmp_path: Path, answer, way: list[str]) -> None:
    file = tmp_path / "requests.jsonl"
    long = {"prompt_token_ids": [1] * 5000, "request_id": "long"}
    lines = [{"prompt": "sort: 1 ->"}, long, {"prompt": "a", "logit_bias": {"512": 1}, "request_id": "bias"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    report = answer("generate", "--requests", str(file), *way, code=2)
    VALIDATOR.validate(report)
    assert [output["request_id"] for output in report["outputs"]] == ["0"]
    refused = report["summary"]["refused"]
    assert list(refused) == ["long", "bias"]
    assert refused["long"].startswith(f"{file}, line 2: prompt of 5000 tokens")
    assert refused["bias"].startswith(f"{file}, line 3: logit_bias 512: expected a token id, 0 to ")


def test_a_proof_that_fails_is_told_in_the_summary(answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfm2np.commands.cli.generate.compare", lambda *records: "a difference")
    report = answer("generate", *ONE, "--prove", code=1)
    VALIDATOR.validate(report)
    assert report["summary"]["proved"] is False
