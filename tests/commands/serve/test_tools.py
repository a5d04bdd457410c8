"""Chats with tools: what a client gets, whole or in pieces, is what the reference parser reads in the tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_app import model, serving

from lfm2np.checkpoint.text.replies import Message, parse_reply
from lfm2np.commands.serve.answers import Chats
from lfm2np.commands.serve.bodies import ChatBody
from lfm2np.commands.serve.jobs import chat_ids
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.engine.sampling.stop_strings import StopChecker
from lfm2np.suite.test_tool_parsers import CHATS

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "call"}]
REPLIES = {case["id"]: case["ids"] for case in CHATS["cases"] if case["ids"] and not case["in_reasoning"]}


def body(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": ASKED, "tools": [TOOL], **fields})


def outputs(ids: list[int], prompt: str = "", stop: tuple[str, ...] = ()) -> list[RequestOutput]:
    """What the engine says after each token of a reply, until a stop string ends it."""
    tokenizer = model().tokenizer
    stream, stops, text, said = tokenizer.stream(), StopChecker(stop, False), "", []
    prompt_ids = (*tokenizer.encode_chat([{"role": "user", "content": "x"}]), *tokenizer.encode_more(prompt))
    for count in range(1, len(ids) + 1):
        piece, stopped = stops.push(stream.push(ids[count - 1]))
        text += piece
        is_last = stopped is not None or count == len(ids)
        if is_last and stopped is None:
            text += stops.finish(stream.finish())[0]
        sample = CompletionOutput(0, text, tuple(ids[:count]), None, "stop" if is_last else None, stopped)
        said.append(RequestOutput("chatcmpl-1", None, prompt_ids, None, (sample,), is_last, None))
        if is_last:
            break
    return said


def whole(said: list[RequestOutput], asked: ChatBody) -> dict[str, Any]:
    answers = Chats(model(), asked)
    return answers.whole(answers.pieces([(0, said[-1])])[0])


def streamed(said: list[RequestOutput], asked: ChatBody) -> dict[str, Any]:
    """What a client joins of the deltas."""
    answers, choice = Chats(model(), asked), {}
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for output in said:
        for choice in answers.pieces([(0, output)]):
            delta = choice["delta"]
            message["content"] += delta["content"]
            if "reasoning_content" in delta:
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for call in delta.get("tool_calls", ()):
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append(call)
    return {"message": message, "finish_reason": choice["finish_reason"]}


def told(choice: dict[str, Any]) -> Message:
    """The message, without ids of calls; these differ."""
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    read = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    return Message(message["content"] or "", message.get("reasoning_content"), tuple(read))  # type: ignore[arg-type]


def expected(message: Message) -> Message:
    calls = tuple((call.name, dict(call.arguments)) for call in message.tool_calls)
    return Message(message.content, message.reasoning, calls)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REPLIES)
def test_a_client_gets_what_the_parser_reads(name: str) -> None:
    message = expected(parse_reply(REPLIES[name], model().tokenizer))
    said = outputs(REPLIES[name])
    assert told(whole(said, body())) == told(streamed(said, body())) == message


def test_a_call_alone_has_no_content_and_a_cut_one_is_none() -> None:
    ids = REPLIES["reply-only-a-call"]
    choice = whole(outputs(ids), body())
    assert choice["message"]["content"] is None and choice["message"]["role"] == "assistant"
    assert choice["message"]["tool_calls"][0]["type"] == "function"
    cut = whole(outputs(ids[:-3]), body())
    assert "tool_calls" not in cut["message"] and cut["message"]["content"] == "" and cut["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}])
def test_without_tools_a_list_of_calls_is_text(fields: dict[str, Any]) -> None:
    said = outputs(REPLIES["reply-text-before"])
    for choice in (whole(said, body(**fields)), streamed(said, body(**fields))):
        assert choice["message"]["content"] == "Let me see. [f(a=1)]"
        assert not choice["message"].get("tool_calls") and choice["finish_reason"] == "stop"


def test_a_prompt_that_ends_with_think_opens_reasoning() -> None:
    said = outputs(model().tokenizer.encode_more("Hm.</think>Yes."), "<think>")
    for choice in (whole(said, body()), streamed(said, body())):
        assert told(choice) == Message("Yes.", "Hm.")
    ended = outputs(model().tokenizer.encode_more("Hm.</think>Yes."), "<think></think>")
    assert told(whole(ended, body())) == Message("Hm.</think>Yes.")


@settings(deadline=None)
@given(
    letters=st.lists(st.sampled_from(["a", "b ", "é", "😀", "。", "<", "<thi", "xyz"]), max_size=8),
    stop=st.lists(st.sampled_from(["😀", "é", "b a", "z", "<", "ab"]), min_size=1, max_size=2),
)
def test_a_stop_string_cuts_content_where_it_cuts_text(letters: list[str], stop: list[str]) -> None:
    ids = model().tokenizer.encode_more("".join(letters))
    if ids:
        said = outputs(ids, stop=tuple(stop))
        text = said[-1].outputs[0].text
        assert whole(said, body())["message"]["content"] == text
        assert streamed(said, body())["message"]["content"] == text


def test_two_samples_are_two_replies() -> None:
    first, second = (outputs(REPLIES[name])[-1].outputs[0] for name in ("reply-text-before", "reply-two-lists"))
    other = CompletionOutput(1, second.text, second.token_ids, None, "stop", None)
    output = RequestOutput("chatcmpl-1", None, (1, 6), None, (first, other), True, None)
    pieces = Chats(model(), body(n=2)).pieces([(0, output)])
    assert [len(piece["delta"]["tool_calls"]) for piece in pieces] == [1, 2]
    assert [call["index"] for call in pieces[1]["delta"]["tool_calls"]] == [0, 1]


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "20 + "}, {"type": "text", "text": "97?"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"a": 20}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "117"},
]
SHOWN = [
    {"role": "user", "content": "20 + 97?"},
    {**HISTORY[1], "content": "", "tool_calls": [{**HISTORY[1]["tool_calls"][0]}]},
    HISTORY[2],
]


def test_history_and_tools_reach_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, seen = model().tokenizer.chat, "{{ bos_token }}{{ messages | tojson }}{{ tools | tojson }}{{ deep }}"
    monkeypatch.setattr(model().tokenizer, "chat", type(chat)(seen, chat.special_tokens, "seen"))
    asked = body(
        messages=HISTORY, chat_template_kwargs={"deep": 3}, tools=[{"function": {"name": "f"}, "type": "function"}]
    )
    function = {"name": "f", "arguments": {"a": 20}}
    message = {**SHOWN[1], "tool_calls": [{**HISTORY[1]["tool_calls"][0], "function": function}], "thinking": "Hm."}
    text = model().tokenizer.decode(chat_ids(model(), asked.messages, asked))
    listed = json.loads(text[: text.index("]][") + 1] if "]][" in text else text[: text.rindex('[{"function')])
    assert listed == [SHOWN[0], message, SHOWN[2]]
    assert text.endswith('[{"function": {"name": "f"}, "type": "function"}]3'), "in the order that the client wrote"


def test_a_template_without_calls_gets_text_where_content_was_none() -> None:
    asked = body(messages=HISTORY)
    text = model().tokenizer.decode(chat_ids(model(), asked.messages, asked))
    assert text == "user\n20 + 97?\nassistant\n\ntool\n117\nassistant\n"


def test_a_chat_with_tools_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, template = model().tokenizer.chat, CHATS["templates"]["lfm2.5-2.6b"]
    monkeypatch.setattr(model().tokenizer, "chat", type(chat)(template, chat.special_tokens, "lfm2.5-2.6b"))
    ids = model().tokenizer.encode_chat([SHOWN[0], {**HISTORY[1], "content": ""}, HISTORY[2]], [TOOL])
    asked = {"messages": HISTORY, "tools": [TOOL], "tool_choice": "auto", "temperature": 0, "max_tokens": 3}
    fields = {**asked, "return_token_ids": True}
    with serving(model(), num_blocks=100) as served:
        assert served.ask("/tokenize", {"messages": HISTORY, "tools": [TOOL]})[1]["tokens"] == ids
        status, reply = served.ask("/v1/chat/completions", fields)
        assert (status, reply["prompt_token_ids"], reply["usage"]["prompt_tokens"]) == (200, ids, len(ids))
        (choice,) = reply["choices"]
        text = model().tokenizer.decode(choice["token_ids"])
        assert choice["message"]["reasoning_content"] == text, "the prompt ends with <think>"
        _, events = served.ask("/v1/chat/completions", {**fields, "stream": True})
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == text
