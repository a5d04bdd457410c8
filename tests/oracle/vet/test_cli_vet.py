"""`lfm2np vet` as it is called: what it says of recorded answers and of providers, honest or odd, and what it keeps."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from provider import chat, serving
from quantise import write_types

import lfm2np
from lfm2np.commands.cli import main
from lfm2np.oracle.vet.provider_answers import ReplyFile

SCHEMA = json.loads((Path(lfm2np.__file__).parent / "oracle/schemas/report.schema.json").read_text(encoding="utf-8"))
FIXTURES = lfm2np.trained_fixture().parent
TRAINED, ANSWERS = FIXTURES / "trained", FIXTURES / "answers"
MODEL = lfm2np.load()
pytestmark = pytest.mark.rounding  # emulated engines have rounding errors of the machine
FEW = ("--planned", "4", "--max-tokens", "12")
# for what does not hang on the verdict, which never comes here
ALONE = ("--candidate", f"bf16={TRAINED}", "--planned", "2", "--max-tokens", "6")


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    (quantised,) = write_types(TRAINED, ["Q4_0"], tmp_path_factory.mktemp("vet"))
    return [
        *("--candidate", f"bf16={TRAINED}", "--candidate", f"q4={quantised}"),
        *("--sampling", "temperature=1", "--sampling", "temperature=1 top_k=40 min_p=0.05"),
    ]


def run(*words: str) -> int:
    return main(["vet", *FEW, *words])


def honest(body: dict[str, Any], number: int) -> tuple[int, Any]:
    """The trained fixture itself."""
    ids = MODEL.tokenizer.encode_chat(body["messages"])
    params = lfm2np.SamplingParams(temperature=body["temperature"], max_tokens=body["max_tokens"], seed=number)
    with lock:
        (output,) = engine().generate([ids], params)
    completion = output.outputs[0]
    return 200, chat(completion.text or "", list(completion.token_ids), finish_reason=completion.finish_reason)


lock = threading.Lock()
engine = functools.cache(lfm2np.LLM)


# --- recorded answers of real engines


def first_lines(output: str) -> list[str]:
    """Verdict and reason, without their names."""
    return [line[11:] for line in output.splitlines()[:2]]


def test_the_checkpoint_behind_recorded_answers_is_found(candidates, tmp_path, capsys):
    page = tmp_path / "page.html"
    words = [*candidates[:4], "--json", "--html", str(page)]
    assert run("--from", str(ANSWERS / "transformers-bfloat16.jsonl"), *words) == 0
    output = json.loads(capsys.readouterr().out)
    Draft202012Validator(SCHEMA).validate(output)
    assert (output["verdict"], output["figures"]["accepted"], output["exit_code"]) == ("ACCEPTED", "bf16", 0)
    assert output["figures"]["plan"]["needed_with_logprobs"]["bf16"] < 100
    assert "hardest to tell from" in page.read_text(encoding="utf-8")  # the plan
    assert run("--from", str(ANSWERS / "llama.cpp-Q4_0.jsonl"), *candidates) == 1
    shown = capsys.readouterr()
    verdict, why = first_lines(shown.out)
    assert verdict == "NOT THE CLAIM" and why.startswith(
        "it is q4, sampled temperature=1 top_k=40 min_p=0.05, not bf16"
    )
    assert "ProofError" in shown.err and "if it is" in shown.err  # the plan
    assert "sampled tokens, entropy" in shown.err
    assert shown.out.count("not rejected") == 1


def test_a_list_without_the_truth_ends_in_none_of_these(candidates, capsys):
    words = ["--candidate", f"bf16={TRAINED}", "--candidate", f"draft={FIXTURES / 'draft'}", *candidates[4:]]
    assert run("--from", str(ANSWERS / "llama.cpp-Q4_0.jsonl"), *words) == 1
    assert first_lines(capsys.readouterr().out)[0] == "NONE OF THESE"


def test_too_few_answers_are_undecided(candidates, tmp_path, capsys):
    few = tmp_path / "few.jsonl"
    line = (ANSWERS / "transformers-bfloat16.jsonl").read_text(encoding="utf-8").splitlines()[0]
    raw = {name: value for name, value in json.loads(line).items() if name in ("messages", "text", "token_ids")}
    few.write_text(json.dumps(raw) + "\n", encoding="utf-8")
    assert run("--from", str(few), *candidates) == 2
    output = capsys.readouterr().out
    verdict, why = first_lines(output)
    assert verdict == "UNDECIDED" and why.startswith("after 20 tokens: bf16")
    assert "prompt tokens not reported" in output
    assert "\nnext " in output


# --- providers


def test_an_honest_provider_is_accepted_and_saved_answers_are_used_again(candidates, tmp_path, capsys):
    words = [*candidates[:4], "--save", str(tmp_path / "a.jsonl"), "--json"]
    with serving(honest) as (url, requests):
        assert run(url, *words) == 0
        count, first = len(requests), json.loads(capsys.readouterr().out)
        assert run(url, *words) == 0
        again = json.loads(capsys.readouterr().out)
    assert len(requests) == count  # all answers were there
    assert first == again and first["figures"]["accepted"].startswith("bf16") and not first["not_tested"]
    assert requests[0]["body"]["temperature"] == 1.0 and requests[0]["path"] == "/v1/chat/completions"


@pytest.mark.slow
def test_an_interrupt_keeps_what_came(candidates, tmp_path, capsys):
    saved = tmp_path / "a.jsonl"

    class Interrupt(ReplyFile):
        def append(self, replies: Any) -> None:
            super().append(replies)
            raise KeyboardInterrupt

    with serving(honest) as (url, requests), pytest.MonkeyPatch.context() as patch:
        patch.setattr("lfm2np.oracle.vet.api.ReplyFile", Interrupt)
        assert run(url, *candidates, "--save", str(saved)) == 130
        patch.undo()
        before = len(requests)
        assert len(ReplyFile(saved).replies) == before == 8
        assert run(url, *candidates, "--save", str(saved), "--tokens", "40") in (0, 2)
    texts = [str(request["body"]["messages"]) for request in requests]
    assert len(set(texts)) == len(texts)  # nothing is asked twice


def test_no_key_is_in_any_output_or_file(tmp_path, capsys, monkeypatch):
    key, saved = "sk-very-secret-4711", tmp_path / "a.jsonl"
    monkeypatch.setenv("LFM2NP_API_KEY", key)

    def leaky(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return honest(body, number) if number < 4 else (400, {"error": {"message": f"bad key {key}"}})

    with serving(leaky, {"X-Echo": f"Bearer {key}"}) as (url, requests):
        run(url, *ALONE, "--tokens", "20", "--save", str(saved), "--json")
    shown = capsys.readouterr()
    assert requests[0]["headers"]["Authorization"] == f"Bearer {key}"
    files = "".join(path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.jsonl"))
    assert key not in shown.out + shown.err + files
    assert "HTTP 400" in shown.out


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        pytest.param(lambda body, number: (500, {"error": "overloaded"}), "HTTP 500", marks=pytest.mark.slow),
        pytest.param(lambda body, number: (200, {"choices": []}), "answers without choices", marks=pytest.mark.slow),
        (lambda body, number: (200, chat("", finish_reason="length")), "empty answers"),
        pytest.param(
            lambda body, number: (200, b'{"choices": [{"mess'), "the connection broke", marks=pytest.mark.slow
        ),
        (lambda body, number: (200, chat("As a language model, I can't.", None)), "another number of tokens"),
    ],
)
def test_odd_answers_are_counted_and_left_out(odd, why, capsys, monkeypatch):
    monkeypatch.setattr("lfm2np.oracle.engines.http_client.LONGEST_PAUSE", 0.0)

    def play(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return honest(body, number) if number % 2 == 0 else odd(body, number)

    with serving(play) as (url, _):
        assert run(url, *ALONE, "--tokens", "20", "--at-once", "1", "--json") == 2
    left_out = json.loads(capsys.readouterr().out)["not_tested"]
    assert left_out or why == "the connection broke"  # which is tried again
    assert not left_out or any(why in reason for reason in left_out)


def test_a_provider_that_never_answers_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("lfm2np.oracle.engines.http_client.LONGEST_PAUSE", 0.0)
    monkeypatch.setattr("lfm2np.oracle.vet.vetting.MOST_SILENT", 2)
    with serving(lambda body, number: (429, {"error": "slow down"}), {"Retry-After": "0"}) as (url, _):
        assert run(url, *ALONE) == 3
    assert capsys.readouterr().err.splitlines()[-1].startswith("lfm2np: TargetError: no usable answer")
    assert run("http://127.0.0.1:9", *ALONE) == 3
    assert "no connection" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_an_injected_prefix_shows(candidates, capsys):
    def injects(body: dict[str, Any], number: int) -> tuple[int, Any]:
        system = {"role": "system", "content": "Answer in numbers."}
        return honest({**body, "messages": [system, *body["messages"]]}, number)

    words = [*candidates[:4], "--inserted-system", "Answer in numbers.", "--tokens", "1000"]
    with serving(injects) as (url, _):
        assert run(url, *words) == 1
    assert "'Answer in numbers.'" in first_lines(capsys.readouterr().out)[1]


@pytest.mark.slow
def test_a_strict_server_is_asked_for_less(candidates, capsys):
    def strict(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if {"logprobs", "return_token_ids"} & set(body):
            return 400, {"error": {"message": "unknown field"}}
        return honest(body, number)

    with serving(strict) as (url, requests):
        assert run(url, *candidates, "--tokens", "20") in (0, 2)
    assert [sorted({"logprobs", "return_token_ids"} & set(request["body"])) for request in requests[:5]] == [
        ["logprobs", "return_token_ids"],
        ["logprobs"],
        ["return_token_ids"],
        [],
        [],
    ]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "--candidate"),
        (("http://127.0.0.1:9", "--candidate", "a"), "expected NAME=DIR"),
        (("--candidate", f"a={TRAINED}"), "either URL or --from"),
        (("--from", "none.jsonl", "--candidate", f"a={TRAINED}"), "no such file"),
        (("http://127.0.0.1:9", "--candidate", f"a={TRAINED}", "--claim", "b"), "claim 'b'"),
        (("http://127.0.0.1:9", "--candidate", f"a={TRAINED}", "--cost", "1"), "--prompt-price"),
        (("http://127.0.0.1:9", "--candidate", f"a={TRAINED}", "--alpha", "1"), "alpha 1"),
        (("http://127.0.0.1:9", "--candidate", f"a={TRAINED}", "--sampling", "x=1"), "sampling 'x=1'"),
        (("http://u:p@h", "--candidate", f"a={TRAINED}"), "user or password"),
    ],
)
def test_what_cannot_be_met_is_one_line_and_3(words, why, capsys):
    try:
        status = run(*words)
    except SystemExit as ending:
        status = int(ending.code or 0)
    assert status == 3
    assert why in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"text": "a"}', '{"prompt": "a", "text": 3}', '{"prompt": "a", "token_ids": [-1]}']
)
def test_damaged_lines_are_named(line, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    assert run("--from", str(path), *ALONE) == 3
    assert "a.jsonl line 1" in capsys.readouterr().err.splitlines()[-1]


def test_a_changed_line_is_refused(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    content = Path(ANSWERS / "llama.cpp-Q4_0.jsonl").read_text(encoding="utf-8")
    path.write_text(content.replace('"finish_reason": "stop"', '"finish_reason": "length"', 1), encoding="utf-8")
    assert run("--from", str(path), *ALONE) == 3
    assert "changed since it was written" in capsys.readouterr().err
