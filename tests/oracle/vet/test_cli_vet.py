"""`lfm2np vet` as it is called: what it says of recorded answers and of providers, honest or odd, and what it keeps."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_player import Handler, playing
from of_schema import validator
from quantise import write_types

import lfm2np
from lfm2np.commands.cli import main
from lfm2np.oracle.engines.file_target import Transcript

FIXTURES = lfm2np.trained_fixture().parent
TRAINED, ANSWERS = FIXTURES / "trained", FIXTURES / "answers"
MODEL = lfm2np.load()
pytestmark = [pytest.mark.rounding, pytest.mark.slow]  # emulated engines have rounding errors of the machine
ALONE = ("--candidate", f"bf16={TRAINED}")  # for what does not hang on the verdict, which never comes
OWN_DEFAULTS = ("--sampling", "temperature=1", "--sampling", "temperature=1 top_k=40 min_p=0.05")
BF16, Q4 = ANSWERS / "transformers-bfloat16.jsonl", ANSWERS / "llama.cpp-Q4_0.jsonl"
PROBE = "The"


Play = Callable[[dict[str, Any], int], tuple[int, Any]]


def chat(text: str, ids: list[int] | None = None, finish_reason: str = "stop") -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    token_ids = {} if ids is None else {"token_ids": ids}
    usage = {"prompt_tokens": 20, "completion_tokens": len(ids or text.split())}
    return {"choices": [choice | token_ids], "usage": usage}


@contextlib.contextmanager
def serving(play: Play, **headers: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the requests that came: body, headers and path."""
    requests: list[dict[str, Any]] = []

    def answer(handler: Handler) -> bool:
        path, fields, body = handler.server.seen[-1]
        if handler.command != "POST":
            return False
        requests.append({"body": body, "headers": fields, "path": path})
        status, content = play(body, len(requests) - 1)
        handler.say(content, status, **headers)
        return True

    with playing(lambda path, body: None) as player:
        player.trouble = answer
        yield player.url, requests


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    (quantised,) = write_types(TRAINED, ["Q4_0"], tmp_path_factory.mktemp("vet"))
    return ["--candidate", f"bf16={TRAINED}", "--candidate", f"q4={quantised}"]


def run(*words: object) -> int:
    return main(["vet", *map(str, words)])


def honest(body: dict[str, Any], number: int) -> tuple[int, Any]:
    """The trained fixture itself."""
    ids = MODEL.tokenizer.encode_chat(body["messages"])
    params = lfm2np.SamplingParams(temperature=body["temperature"], max_tokens=body["max_tokens"], seed=number)
    with lock:
        (output,) = engine().generate([ids], params)
    completion = output.outputs[0]
    ids = list(completion.token_ids) if "return_token_ids" in body else None
    return 200, chat(completion.text or "", ids, finish_reason=completion.finish_reason)


lock = threading.Lock()
engine = functools.cache(lfm2np.LLM)


def asked(requests: list[dict[str, Any]]) -> list[str]:
    """The questions, without what finds out about the server."""
    texts = [request["body"]["messages"][0]["content"] for request in requests if "messages" in request["body"]]
    return [text for text in texts if text != PROBE]


# --- recorded answers of real engines


def test_the_checkpoint_behind_recorded_answers_is_found(candidates, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert run(BF16, *candidates, "--json", "--report", page) == 0
    output = json.loads(capsys.readouterr().out)
    validator("report").validate(output)
    assert (output["verdict"], output["figures"]["accepted"], output["exit_code"]) == ("ACCEPTED", "bf16", 0)
    assert "e-value against it" in page.read_text(encoding="utf-8")


def test_the_wrong_quantisation_is_told_with_how_its_tokens_were_sampled_and_a_list_without_the_truth(
    candidates, capsys
):
    q4 = f"of the candidates it is q4, sampled {OWN_DEFAULTS[3]}, not bf16"
    for words, expected in ((candidates, q4), ((*ALONE, "--candidate", f"draft={FIXTURES / 'draft'}"), "")):
        assert run(Q4, *words, *OWN_DEFAULTS) == 1
        verdict, why = (line[11:] for line in capsys.readouterr().out.splitlines()[:2])
        assert verdict == ("NOT THE CLAIM" if expected else "NONE OF THESE") and why.startswith(expected)


def test_too_few_answers_are_undecided_and_it_says_how_many_more(candidates, tmp_path, capsys):
    few = tmp_path / "few.jsonl"
    line = json.loads(BF16.read_text(encoding="utf-8").splitlines()[0])
    del line["answer"]["logprobs"], line["sha256"]
    few.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert run(few, *candidates, "--json") == 2
    output = json.loads(capsys.readouterr().out)
    assert output["verdict"] == "UNDECIDED" and 10 < output["figures"]["more_tokens"] < 1000
    assert run(few, *candidates) == 2
    assert "more tokens tell these apart, if it is " in capsys.readouterr().out


def test_a_candidate_that_is_there_twice_is_named_at_once(candidates, tmp_path, capsys):
    shutil.copytree(TRAINED, tmp_path / "copy")
    assert run(Q4, *candidates, "--candidate", f"again={tmp_path / 'copy'}", *OWN_DEFAULTS) == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert "candidates bf16 and again: the same, all " in line and "leave one out" in line


# --- providers


@pytest.mark.night
def test_a_provider_of_texts_is_vetted(candidates, capsys):
    def strict(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if {"logprobs", "return_token_ids"} & set(body):
            return 400, {"error": {"message": "unknown field"}}
        return honest(body, number)

    with serving(strict) as (url, requests):
        assert run(url, *candidates, "--chat", "--tokens", "1000") == 0
    assert requests[-1]["path"] == "/v1/chat/completions"
    wanted = {"messages": [], "max_tokens": 32, "temperature": 1.0, "top_p": 1.0}
    assert {**requests[-1]["body"], "messages": []} == wanted


def test_a_provider_that_only_continues_texts_is_vetted(candidates, capsys):
    """No text has the chat template's tokens: it gets the questions as they are."""

    def continuing(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if not isinstance(body.get("prompt"), str):
            return 400, {"error": {"message": "expected a text"}}
        ids = MODEL.tokenizer.encode(body["prompt"])
        params = lfm2np.SamplingParams(temperature=body["temperature"], max_tokens=body["max_tokens"], seed=number)
        with lock:
            (output,) = engine().generate([ids], params)
        completion = output.outputs[0]
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(completion.token_ids)}
        choice = {"text": completion.text, "finish_reason": completion.finish_reason}
        return 200, {"choices": [choice], "usage": usage}

    with serving(continuing) as (url, requests):
        assert run(url, *candidates, "--tokens", "1000") == 0
    assert "of the candidates it is bf16" in capsys.readouterr().out
    assert requests[-1]["path"] == "/v1/completions"


def test_an_interrupt_keeps_what_came_and_nothing_is_asked_twice(tmp_path, monkeypatch, capsys):
    saved = tmp_path / "a.jsonl"
    words = [*ALONE, "--chat", "--max-tokens", "6", "--at-once", "1", "--save", str(saved)]
    append, kept = Transcript.append, []

    def interrupted(self: Transcript, *pair: Any) -> None:
        append(self, *pair)
        kept.append(pair)
        if len(kept) == 3:
            raise KeyboardInterrupt

    with serving(honest) as (url, requests):
        with monkeypatch.context() as patch:
            patch.setattr(Transcript, "append", interrupted)
            assert run(url, *words, "--tokens", "20") == 130
        answered = [request.message for request, _ in Transcript(saved).pairs()]
        assert run(url, *words, "--tokens", "20") == 2
        again = asked(requests)
        assert run(url, *words, "--tokens", "20") == 2
        assert asked(requests) == again  # all answers were there
        assert run(saved, *ALONE) == 2  # a file of answers like any other
        assert run(url, *words, "--tokens", "20", "--seed", "1") == 3
    assert len(answered) >= 3 and all(again.count(question) == 1 for question in answered)
    assert "another request" in capsys.readouterr().err.splitlines()[-1]


def test_no_key_is_in_any_output_or_file(tmp_path, capsys, monkeypatch):
    key, saved = "sk-very-secret-4711", tmp_path / "a.jsonl"
    monkeypatch.setenv("LFM2NP_API_KEY", key)

    def leaky(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return honest(body, number) if number % 2 else (400, {"error": {"message": f"bad key {key}"}})

    with serving(leaky, X_Echo=f"Bearer {key}") as (url, requests):
        run(url, *ALONE, "--chat", "--tokens", "20", "--save", saved, "--json")
    shown = capsys.readouterr()
    assert requests[0]["headers"]["Authorization"] == f"Bearer {key}"
    assert key not in shown.out + shown.err + saved.read_text(encoding="utf-8")
    assert "answers left out" in shown.out


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ((429, {"error": "slow down"}), "429"),
        ((500, {"error": "overloaded"}), "500"),
        ((200, {"choices": []}), "a response without choices[0]"),
        ((200, chat("", finish_reason="length")), "an empty answer"),
        ((200, chat("", [600])), "token_ids[0] 600"),
    ],
)
def test_a_provider_that_never_answers_is_one_line(reply, why, capsys, monkeypatch):
    monkeypatch.setattr("lfm2np.oracle.engines.http_client.LONGEST_PAUSE", 0.0)

    def play(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return honest(body, number) if body["messages"][0]["content"] == PROBE else reply

    with serving(play, Retry_After="0") as (url, _):
        assert run(url, *ALONE, "--chat") == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("lfm2np: TargetError: no usable answer") and why in line


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "TARGET"),
        (("http://127.0.0.1:9", *ALONE), "no connection"),
        (("http://127.0.0.1:9", "--candidate", "a"), "expected NAME=PATH"),
        (("http://127.0.0.1:9", *ALONE, *ALONE), "each name once"),
        (("none.jsonl", *ALONE), "no such file"),
        (("http://127.0.0.1:9", *ALONE, "--alpha", "1"), "alpha 1"),
        (("http://127.0.0.1:9", *ALONE, "--sampling", "x=1"), "x: unknown sampling parameter"),
        (("http://127.0.0.1:9", *ALONE, "--sampling", "temperature=x"), "sampling temperature: not JSON"),
        (("http://127.0.0.1:9", *ALONE, "--sampling", "temperature=0"), "lfm2np check"),
        (("http://u:p@h", *ALONE), "user or password"),
        (("my:factory", *ALONE, "--chat"), "for a chat"),
    ],
)
def test_what_cannot_be_met_is_one_line_and_3(words, why, capsys):
    try:
        status = run(*words)
    except SystemExit as ending:
        status = int(ending.code or 0)
    assert status == 3
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_a_changed_line_is_refused(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text(Q4.read_text(encoding="utf-8").replace('"stop"', '"length"', 1), encoding="utf-8")
    assert run(path, *ALONE) == 3
    assert "changed since it was written" in capsys.readouterr().err
