"""`check --cases chats`: a right server is right, and each planted fault is named, on the fixture that calls tools."""

from __future__ import annotations

import copy
import json
import re
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


def of_prompts(change: Callable[[Tokenizer, list[dict[str, Any]], Any], list[int]]) -> Patch:
    """The server makes its prompts so, of tokenizer, messages and tools."""

    def chat_ids(model: Any, messages: Any, body: Any) -> list[int]:
        plain = [each.model_dump(exclude_none=True) for each in messages]
        return change(model.tokenizer, [{**each, "content": each.get("content") or ""} for each in plain], body.tools)

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


def of_calls(change: Callable[[dict[str, Any], Any], object]) -> Patch:
    """It changes each call of what is being answered."""
    return of_pieces(
        lambda choice, answer, ids: [change(call, answer) for call in choice["delta"].get("tool_calls", ())]
    )


def of_arguments(change: Callable[[str], Any]) -> Patch:
    return of_calls(lambda call, answer: call["function"].update(arguments=change(call["function"]["arguments"])))


def keeping_thoughts(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    other = copy.copy(tokenizer)
    assert tokenizer.chat.template is not None
    template = tokenizer.chat.template.replace('.split("</think>")[-1]', "")
    other.chat = replace(tokenizer.chat, template=template)
    return other.encode_chat(messages, tools)


def leaking(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    if answer.body.stream:
        tokenizer = answer.model.tokenizer
        spelled = [tokenizer.token_bytes(token_id) or tokenizer.token(token_id).encode() for token_id in ids]
        choice["delta"] = {"content": b"".join(spelled).decode().removesuffix("<|im_end|>")}


def with_thoughts(choice: dict[str, Any], answer: Any, ids: Any) -> None:
    thought = choice["delta"].pop("reasoning_content", None)
    if thought is not None and not answer.body.stream:
        choice["delta"]["content"] = f"<think>{thought}</think>{choice['delta']['content']}"


def counting_all_calls(call: dict[str, Any], answer: Any) -> None:
    """Those of the history, too."""
    past = sum(len(message.tool_calls or ()) for message in answer.body.messages)
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


def with_nulls(tools: Any) -> Any:
    return [{**tool, "function": {"name": "", "description": None, **tool["function"]}} for tool in tools or ()] or None


DROPPED = of_prompts(lambda it, messages, tools: it.encode_chat(messages))
SORTED = of_prompts(lambda it, messages, tools: it.encode_chat(messages, json.loads(json.dumps(tools, sort_keys=True))))
BOTH_FORMS = ("", ", streamed")
FAULTS: dict[str, tuple[Patch, str, str]] = {
    # cases, those behind | with the finding, and how its words begin
    "double BOS": (
        of_prompts(lambda it, messages, tools: [1, *it.encode_chat(messages, tools)]),
        "| plain tools",
        "prompt: the BOS is there twice, by ids in the response; expected '15 tokens'; got '16 tokens'; at 'token 1'; "
        "missing ''; extra '<|startoftext|>'",
    ),
    "tools dropped": (DROPPED, "plain | tools", "prompt: the tools are missing"),
    "tools dropped, by counts": (by_usage(DROPPED), "plain | tools list", "prompt: the tools are missing, by usage"),
    "tools dropped, by one count": (
        by_usage(DROPPED),
        "plain | tools",
        "prompt: perhaps the tools are missing, by usage",
    ),
    "keys of tools sorted, by counts of which one has another explanation": (
        by_usage(SORTED),
        "| tools system-and-tools",
        "prompt: not what the template gives, by usage",
    ),
    "keys of tools sorted": (
        SORTED,
        "plain | tools",
        "prompt: not what the template gives, by ids in the response; expected '39 tokens'; got '60 tokens'; at ",
    ),
    "null descriptions": (
        of_prompts(lambda it, messages, tools: it.encode_chat(messages, with_nulls(tools))),
        "plain | tools",
        "prompt: descriptions that tools lack are null",
    ),
    "history dropped": (
        of_prompts(lambda it, messages, tools: it.encode_chat(without_calls(messages), tools)),
        "tools | history",
        "prompt: the history's calls are missing",
    ),
    "markup leaked in streams": (of_pieces(leaking), "plain | prose-and-call", "markup leaked in content"),
    "arguments as an object": (of_arguments(json.loads), "plain | nested", "arguments not as text of JSON"),
    "past thinking kept": (of_prompts(keeping_thoughts), "plain | past-thinking", "prompt: past thinking is kept"),
    "system dropped": (
        of_prompts(lambda it, messages, tools: it.encode_chat(messages[-1:], tools)),
        "plain | system",
        "prompt: the system message is missing",
    ),
    "calls without ids": (
        of_calls(lambda call, answer: call.pop("id")),
        "plain | two-calls",
        "calls without an id of their own",
    ),
    "calls without a type": (
        of_calls(lambda call, answer: call.pop("type")),
        "plain | two-calls",
        "calls without type 'function'",
    ),
    "ids of an earlier round": (
        of_calls(lambda call, answer: call.update(id=f"call_{call['index']}")),
        "tools list | after-calls",
        "calls with ids that calls of the history have",
    ),
    "true for 1": (of_arguments(lambda text: text.replace(" 1,", " true,")), "plain | list", "another tool_calls"),
    "20.0 for 20": (of_arguments(lambda text: text.replace("20", "20.0")), "plain | tools", "another tool_calls"),
    "thinking kept in content": (of_pieces(with_thoughts), "plain | thinking", "thinking kept in content"),
}
FORMS = {"markup leaked in streams": BOTH_FORMS[1:], "thinking kept in content": BOTH_FORMS[:1]}


def test_our_own_server_is_right(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    report = checked(served, capsys, code=0)
    assert report["verdict"] == "EXACT" and not report["findings"]
    assert len(report["figures"]["judged"]) == 2 * len(chats.CASES["chats"])
    assert len(report["not_tested"]) == 2 and not report["figures"]["refused"]
    by = report["facts"]["compared"]
    assert "ids in the response" in by and "/tokenize" in by and "usage" in by and "reference" not in by


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(
    fault: str, served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, names, words = FAULTS[fault]
    patch(monkeypatch)
    report = checked(served, capsys, *names.split(), code=1)
    (finding,) = [each for each in report["findings"] if each["words"].startswith(words)]
    wrong = {name + form for name in names.partition("|")[2].split() for form in FORMS.get(fault, BOTH_FORMS)}
    assert report["findings"][0] == finding and set(finding["evidence"]["chats"]) == wrong
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


def miscounting(name: str, by: int) -> Patch:
    """Of the usage."""
    counted = answers.Chats.usage

    def usage(self: Any, *outputs: Any) -> Any:
        return {**counted(self, *outputs), name: counted(self, *outputs)[name] + by}

    return lambda patch: patch.setattr(answers.Chats, "usage", usage)


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


def unsure(patch: pytest.MonkeyPatch) -> None:
    """Another reply, where the reference is sure of nothing."""
    of_pieces(shouting)(patch)
    patch.setattr(chats, "LIMIT", 1e12)


def streaming(events: list[Any]) -> Patch:
    return lambda patch: patch.setattr(HttpClient, "post_and_leave", lambda *_: events)


NO_TWO_TOOLS = raising(lambda body: ZeroDivisionError() if len(body.tools or ()) > 1 else refused(body.tools))
BOTH = {"plain", "plain, streamed"}
JUDGED, REFUSED, CHATS_OF_FIRST = "figures judged", "figures refused", "findings 0 evidence chats"
OTHERS: dict[str, tuple[Patch, str, int, list[str], dict[str, Any]]] = {
    # cases, exit code, kinds of the findings, and what else stands in the report: text, names or how many
    "no ids in replies": (of_pieces(without_ids), "plain", 0, [], {"facts compared": "replies by the reference's"}),
    "ids of calls of other conversations": (of_calls(counting_all_calls), "tools list after-calls", 0, [], {JUDGED: 6}),
    "another reply, without ids": (of_pieces(shouting), "plain", 1, ["content"], {CHATS_OF_FIRST: BOTH}),
    "another reply, none is sure": (unsure, "plain", 2, ["content"], {"verdict": "^INCONCLUSIVE$"}),
    "blanks at the ends are disputed": (of_pieces(stripping), "prose-and-call", 0, [], {"not_tested": "disputed"}),
    "an error is wrong, a refusal not tested": (
        NO_TWO_TOOLS,
        "plain tools two-calls",
        1,
        ["error"],
        {REFUSED: {"tools", "tools, streamed"}, JUDGED: BOTH | {"two-calls", "two-calls, streamed"}},
    ),
    "a count that is off is no wrong prompt": (miscounting("prompt_tokens", 1), "plain", 1, ["usage"], {}),
    "fewer tokens are counted than came": (miscounting("completion_tokens", -1), "plain", 1, ["usage"], {}),
    "more tokens are counted than it was cut to": (miscounting("completion_tokens", 1), "cut", 1, ["usage"], {}),
    "an end may be counted that is not shown": (miscounting("completion_tokens", 1), "plain", 0, [], {}),
    **{
        f"a stream without a reply, {events}": (
            streaming(events),
            "plain",
            1,
            ["error"],
            {"findings 0 where": "^plain, streamed$"},
        )
        for events in (list[Any](), [{"choices": []}])
    },
    **{
        f"all {kind} refused": (
            raising(lambda body, name=name: refused(getattr(body, name))),  # type: ignore[misc]
            "plain tools",
            2,
            ["refused"],
            {
                "findings 0 words": f"^{kind}: every request of this kind was refused",
                "findings": "not here",
                "verdict": "^INCONCLUSIVE$",
            },
        )
        for kind, name in (("streams", "stream"), ("tools", "tools"))
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_servers_have_their_verdicts(
    name: str, served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, cases, code, kinds, more = OTHERS[name]
    patch(monkeypatch)
    report = checked(served, capsys, *cases.split(), code=code)
    assert [finding["kind"] for finding in report["findings"]] == kinds
    for path, expected in more.items():
        found: Any = report
        for key in path.split():
            found = found[int(key) if key.isdigit() else key]
        if isinstance(expected, str):
            assert re.search(expected, str(found)), found
        else:
            assert (len(found) if isinstance(expected, int) else set(found)) == expected


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
