"""`check --cases chats`: a right server is right, and each planted fault is named, on the fixture that calls tools."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from served_app import Served, serving

import lfm2np
from lfm2np.checkpoint.loaded import chat_fixture
from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.commands.cli.program import main
from lfm2np.commands.serve import answers, app, jobs
from lfm2np.commands.serve.settings import Settings
from lfm2np.oracle import chats
from lfm2np.oracle.engines.http_client import BadReply, HttpClient, TimedOut

pytestmark = [pytest.mark.rounding, pytest.mark.slow]  # formats are emulated
FIXTURE = chat_fixture()
CHATS = ("--cases", "chats")
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(lfm2np.load(FIXTURE), Settings("chat"), num_blocks=200) as server:
        yield server


def checked(served: Served, capsys: pytest.CaptureFixture[str], *names: str, code: int) -> dict[str, Any]:
    """The report on some of the cases, or on all."""
    every = chats.CASES["chats"]
    with pytest.MonkeyPatch.context() as patch:
        chosen = [case for case in every if case["name"] in names] or every
        patch.setattr(chats, "CASES", {**chats.CASES, "chats": chosen})
        words = ["check", f"http://127.0.0.1:{served.port}", *CHATS, "--model", str(FIXTURE), "--json"]
        assert main(words) == code
    return dict(json.loads(capsys.readouterr().out))


# --- faults


def of_prompts(change: Callable[[Tokenizer, list[dict[str, Any]], dict[str, Any]], list[int]]) -> Patch:
    """The server makes its prompts so, of tokenizer, messages and options."""

    def chat_ids(model: Any, messages: Any, body: Any) -> list[int]:
        plain = [each.model_dump(exclude_none=True) for each in messages]
        plain = [{**each, "content": each.get("content") or ""} for each in plain]
        return change(model.tokenizer, plain, {"tools": body.tools})

    def patch(on: pytest.MonkeyPatch) -> None:
        on.setattr(jobs, "chat_ids", chat_ids)
        on.setattr(app, "chat_ids", chat_ids)

    return patch


def of_pieces(change: Callable[[dict[str, Any], Any, Any], object]) -> Patch:
    """The server changes each choice, whole or piece, of what is being answered and the sample."""
    piece = answers.Chats.piece

    def changed(self: Any, sent: Any, output: Any, sample: Any) -> dict[str, Any]:
        before = sent.num_tokens
        choice = piece(self, sent, output, sample)
        change(choice, self, sample.token_ids[before:])
        return choice

    return lambda on: on.setattr(answers.Chats, "piece", changed)


def keeping_thoughts(tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
    other = copy.copy(tokenizer)
    assert tokenizer.chat.template is not None
    template = tokenizer.chat.template.replace('.split("</think>")[-1]', "")
    other.chat = replace(tokenizer.chat, template=template)
    return other.encode_chat(messages, **options)


def leaking(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    if answer.body.stream:
        tokenizer = answer.model.tokenizer
        spelled = [tokenizer.token_bytes(token_id) or tokenizer.token(token_id).encode() for token_id in ids]
        choice["delta"] = {"content": b"".join(spelled).decode().removesuffix("<|im_end|>")}


def with_objects(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    for call in choice["delta"].get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])


def with_thoughts(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    thought = choice["delta"].pop("reasoning_content", None)
    if thought is not None and not answer.body.stream:
        choice["delta"]["content"] = f"<think>{thought}</think>{choice['delta']['content']}"


def without_call_ids(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    for call in choice["delta"].get("tool_calls", ()):
        del call["id"]


def without_types(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    for call in choice["delta"].get("tool_calls", ()):
        del call["type"]


def with_arguments(old: str, new: str) -> Patch:
    def change(choice: dict[str, Any], answer: Any, ids: Any) -> None:
        for call in choice["delta"].get("tool_calls", ()):
            call["function"]["arguments"] = call["function"]["arguments"].replace(old, new)

    return of_pieces(change)


def counting_calls(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    for call in choice["delta"].get("tool_calls", ()):
        call["id"] = f"call_{call['index']}"


def counting_all_calls(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    """Those of the history, too."""
    past = sum(len(message.tool_calls or ()) for message in answer.body.messages)
    for call in choice["delta"].get("tool_calls", ()):
        call["id"] = f"call_{past + call['index']}"


def without_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in each.items() if key != "tool_calls"} for each in messages]


def by_usage(patch: Patch) -> Patch:
    """The prompt is seen by its count alone."""

    def both(on: pytest.MonkeyPatch) -> None:
        patch(on)
        post = HttpClient.post

        def only_chats(self: HttpClient, path: str, *rest: Any) -> Any:
            if path in ("/tokenize", "/apply-template"):
                raise BadReply("HTTP 404", 404)
            return post(self, path, *rest)

        on.setattr(HttpClient, "post", only_chats)
        on.setattr(answers.Chats, "shared", lambda *_: {})

    return both


def without_tools(tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
    return tokenizer.encode_chat(messages)


def sorting_tools(tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
    return tokenizer.encode_chat(messages, json.loads(json.dumps(options["tools"], sort_keys=True)))


def with_nulls(tools: Any) -> Any:
    return [{**tool, "function": {"name": "", "description": None, **tool["function"]}} for tool in tools or ()] or None


FAULTS: dict[str, tuple[Patch, tuple[str, ...], str, set[str]]] = {
    # cases; the finding's words, and the responses that have it
    "double BOS, and what is extra": (
        of_prompts(lambda tokenizer, messages, options: [1, *tokenizer.encode_chat(messages, **options)]),
        ("plain",),
        "prompt: the BOS is there twice, by ids in the response; expected '15 tokens'; got '16 tokens'; "
        "at 'token 1'; missing ''; extra '<|startoftext|>'",
        {"plain", "plain, streamed"},
    ),
    "double BOS": (
        of_prompts(lambda tokenizer, messages, options: [1, *tokenizer.encode_chat(messages, **options)]),
        ("plain", "tools"),
        "prompt: the BOS is there twice",
        {"plain", "plain, streamed", "tools", "tools, streamed"},
    ),
    "tools dropped": (
        of_prompts(without_tools),
        ("plain", "tools"),
        "prompt: the tools are missing",
        {"tools", "tools, streamed"},
    ),
    "tools dropped, by counts": (
        by_usage(of_prompts(without_tools)),
        ("plain", "tools", "list"),
        "prompt: the tools are missing, by usage",
        {"tools", "tools, streamed", "list", "list, streamed"},
    ),
    "tools dropped, by one count": (
        by_usage(of_prompts(without_tools)),
        ("plain", "tools"),
        "prompt: perhaps the tools are missing, by usage",
        {"tools", "tools, streamed"},
    ),
    "keys of tools sorted, by counts of which one has another explanation": (
        by_usage(of_prompts(sorting_tools)),
        ("tools", "system-and-tools"),
        "prompt: not what the template gives, by usage",
        {"tools", "tools, streamed", "system-and-tools", "system-and-tools, streamed"},
    ),
    "keys of tools sorted": (
        of_prompts(sorting_tools),
        ("plain", "tools"),
        "prompt: not what the template gives, by ids in the response; expected '39 tokens'; got '60 tokens'; at ",
        {"tools", "tools, streamed"},
    ),
    "null descriptions": (
        of_prompts(lambda tokenizer, messages, options: tokenizer.encode_chat(messages, with_nulls(options["tools"]))),
        ("plain", "tools"),
        "prompt: descriptions that tools lack are null",
        {"tools", "tools, streamed"},
    ),
    "history dropped": (
        of_prompts(lambda tokenizer, messages, options: tokenizer.encode_chat(without_calls(messages), **options)),
        ("tools", "history"),
        "prompt: the history's calls are missing",
        {"history", "history, streamed"},
    ),
    "markup leaked in streams": (
        of_pieces(leaking),
        ("plain", "prose-and-call"),
        "markup leaked in content",
        {"prose-and-call, streamed"},
    ),
    "arguments as an object": (
        of_pieces(with_objects),
        ("plain", "nested"),
        "arguments not as text of JSON",
        {"nested", "nested, streamed"},
    ),
    "past thinking kept": (
        of_prompts(keeping_thoughts),
        ("plain", "past-thinking"),
        "prompt: past thinking is kept",
        {"past-thinking", "past-thinking, streamed"},
    ),
    "system dropped": (
        of_prompts(lambda tokenizer, messages, options: tokenizer.encode_chat(messages[-1:], **options)),
        ("plain", "system"),
        "prompt: the system message is missing",
        {"system", "system, streamed"},
    ),
    "calls without ids": (
        of_pieces(without_call_ids),
        ("plain", "two-calls"),
        "calls without an id of their own",
        {"two-calls", "two-calls, streamed"},
    ),
    "calls without a type": (
        of_pieces(without_types),
        ("plain", "two-calls"),
        "calls without type 'function'",
        {"two-calls", "two-calls, streamed"},
    ),
    "ids of an earlier round": (
        of_pieces(counting_calls),
        ("tools", "list", "after-calls"),
        "calls with ids that calls of the history have",
        {"after-calls", "after-calls, streamed"},
    ),
    "true for 1": (
        with_arguments(" 1,", " true,"),
        ("plain", "list"),
        "another tool_calls",
        {"list", "list, streamed"},
    ),
    "20.0 for 20": (
        with_arguments("20", "20.0"),
        ("plain", "tools"),
        "another tool_calls",
        {"tools", "tools, streamed"},
    ),
    "thinking kept in content": (
        of_pieces(with_thoughts),
        ("plain", "thinking"),
        "thinking kept in content",
        {"thinking"},
    ),
}


def test_our_own_server_is_right(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    report = checked(served, capsys, code=0)
    assert report["verdict"] == "EXACT" and not report["findings"]
    assert len(report["figures"]["judged"]) == 2 * len(chats.CASES["chats"])
    assert len(report["not_tested"]) == 1 and not report["figures"]["refused"]
    by = report["facts"]["compared"]
    assert "ids in the response" in by and "/tokenize" in by and "usage" in by and "reference" not in by


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(
    fault: str, served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, names, words, where = FAULTS[fault]
    patch(monkeypatch)
    report = checked(served, capsys, *names, code=1)
    (finding,) = [each for each in report["findings"] if each["words"].startswith(words)]
    assert report["findings"][0] == finding and set(finding["evidence"]["chats"]) == where
    assert json.dumps(finding["evidence"].get("expected")) != json.dumps(finding["evidence"]["got"])


# --- what is wrong, open or not tested


def without_ids(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    choice.pop("token_ids", None)


def shouting(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    without_ids(choice, answer, ids)
    choice["delta"]["content"] = choice["delta"]["content"].upper()


def stripping(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    if not answer.body.stream:
        choice["delta"]["content"] = choice["delta"]["content"].strip()


def one_more(patch: pytest.MonkeyPatch) -> None:
    """Token of the prompt, as is counted."""
    counted = answers.Chats.usage

    def usage(self: Any, *outputs: Any) -> Any:
        return {**counted(self, *outputs), "prompt_tokens": counted(self, *outputs)["prompt_tokens"] + 1}

    patch.setattr(answers.Chats, "usage", usage)


def streaming(events: list[Any]) -> Patch:
    return lambda patch: patch.setattr(HttpClient, "post_and_leave", lambda *_: events)


def raising(error_of: Callable[[Any], Exception | None]) -> Patch:
    """An error for some requests."""
    make = jobs.chat_ids

    def chat_ids(model: Any, messages: Any, body: Any) -> Any:
        if (error := error_of(body)) is not None:
            raise error
        return make(model, messages, body)

    return lambda patch: patch.setattr(jobs, "chat_ids", chat_ids)


def refused(is_refused: Any) -> Exception | None:
    return lfm2np.RequestError("not here") if is_refused else None


Found = Callable[[dict[str, Any]], bool]
BOTH = {"plain", "plain, streamed"}
OTHERS: dict[str, tuple[Patch, tuple[str, ...], int, list[str], Found]] = {
    # cases, exit code, kinds of the findings, and what else is so
    "no ids in replies": (
        of_pieces(without_ids),
        ("plain",),
        0,
        [],
        lambda report: "replies by the reference's" in report["facts"]["compared"],
    ),
    "ids of calls that other conversations have, too": (
        of_pieces(counting_all_calls),
        ("tools", "list", "after-calls"),
        0,
        [],
        lambda report: len(report["figures"]["judged"]) == 6,
    ),
    "another reply, without ids": (
        of_pieces(shouting),
        ("plain",),
        1,
        ["content"],
        lambda report: set(report["findings"][0]["evidence"]["chats"]) == BOTH,
    ),
    "another reply, where the reference is not sure": (
        lambda patch: (of_pieces(shouting)(patch), patch.setattr(chats, "LIMIT", 1e12))[1],
        ("plain",),
        2,
        ["content"],
        lambda report: report["verdict"] == "INCONCLUSIVE",
    ),
    "blanks at the ends are disputed": (
        of_pieces(stripping),
        ("prose-and-call",),
        0,
        [],
        lambda report: any("disputed" in words for words in report["not_tested"]),
    ),
    "an error is wrong, a refusal not tested": (
        raising(lambda body: ZeroDivisionError() if len(body.tools or ()) > 1 else refused(body.tools)),
        ("plain", "tools", "two-calls"),
        1,
        ["error"],
        lambda report: (
            set(report["figures"]["refused"]) == {"tools", "tools, streamed"}
            and set(report["figures"]["judged"]) == BOTH | {"two-calls", "two-calls, streamed"}
        ),
    ),
    "a count that is off is no wrong prompt": (one_more, ("plain",), 1, ["usage"], lambda report: True),
    **{
        f"a stream without a reply, {events}": (
            streaming(events),
            ("plain",),
            1,
            ["error"],
            lambda report: report["findings"][0]["where"] == "plain, streamed",
        )
        for events in (list[Any](), [{"choices": []}])
    },
    **{
        f"all {kind} refused": (
            raising(lambda body, name=name: refused(getattr(body, name))),  # type: ignore[misc]
            ("plain", "tools"),
            2,
            ["refused"],
            lambda report, kind=kind: (  # type: ignore[misc]
                report["findings"][0]["words"].startswith(f"{kind}: every request of this kind was refused")
                and "not here" in str(report["findings"])
                and report["verdict"] == "INCONCLUSIVE"
            ),
        )
        for kind, name in (("streams", "stream"), ("tools", "tools"))
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_servers_have_their_verdicts(
    name: str, served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, cases, code, kinds, found = OTHERS[name]
    patch(monkeypatch)
    report = checked(served, capsys, *cases, code=code)
    assert [finding["kind"] for finding in report["findings"]] == kinds and found(report)


def test_a_server_that_hangs_is_asked_once(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def post(self: HttpClient, path: str, body: dict[str, Any], *_: Any) -> dict[str, Any]:
        if body.get("max_tokens") != chats.MAX_TOKENS:  # to find out what it is
            return whole(self, path, body)
        asked.append(path)
        raise TimedOut("no complete answer within 120 s")

    whole = HttpClient.post
    monkeypatch.setattr(HttpClient, "post", post)
    assert main(["check", f"http://127.0.0.1:{served.port}", *CHATS, "--model", str(FIXTURE)]) == 3
    assert "plain: no complete answer within 120 s" in capsys.readouterr().err
    assert len(asked) == 1


def test_it_needs_a_server_and_says_which_options_it_does_not_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "http://127.0.0.1:9", *CHATS, "--model", str(FIXTURE)]) == 3
    assert main(["check", "exec:cat", *CHATS, "--model", str(FIXTURE)]) == 3
    assert main(["check", "http://127.0.0.1:9", *CHATS]) == 3
    assert "--model" in capsys.readouterr().err.splitlines()[-1]
    assert main(["check", "http://127.0.0.1:9", *CHATS, "--model", str(FIXTURE), "--first"]) == 3
    assert "--first" in capsys.readouterr().err.splitlines()[-1]
