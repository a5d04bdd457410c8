"""Dialects: server-sent events put together, what is sent and read; a dialect is one value, known to no other file."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import dialects
import pytest
from http_player import PLAYS, TELLING, reply_of, request_of
from hypothesis import given
from hypothesis import strategies as st

import lfm2np
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects import CHATS, DIALECTS, LLAMA_CPP, SGLANG, VLLM
from lfm2np.oracle.engines.dialects.dialect import Dialect, split_choices

COUNT = 5
(CHAT,) = CHATS
Events = list[dict[str, Any]]


def vllm_choice(index: int, tokens: list[int], reason: str | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": "".join(chr(97 + token) for token in tokens),
        "token_ids": tokens,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [-token / 8 for token in tokens],
            "top_logprobs": [{f"token_id:{token}": -token / 8} for token in tokens],
        },
        "finish_reason": reason,
    }


def cut(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tokens[start : start + size])
        start += size
    return [*pieces, tokens[start:]]


rows = st.lists(st.integers(0, 20), min_size=1, max_size=COUNT)
sizes = st.lists(st.integers(0, 2), max_size=COUNT)


@given(st.lists(rows, min_size=1, max_size=3), sizes, st.randoms())
def test_vllms_choices_come_together_whatever_the_order_of_their_events(
    samples: list[list[int]], sizes: list[int], order: random.Random
) -> None:
    queues = []
    for index, tokens in enumerate(samples):
        pieces = cut(tokens, sizes)
        last = len(pieces) - 1
        queues.append([vllm_choice(index, piece, "length" if n == last else None) for n, piece in enumerate(pieces)])
    events: Events = []
    while any(queues):
        queue = order.choice([queue for queue in queues if queue])
        events.append({"id": "q", "choices": [queue.pop(0)], "usage": None})
    usage = {"prompt_tokens": 3, "completion_tokens": sum(map(len, samples))}
    events.append({"id": "q", "choices": [], "usage": usage})
    choices = [vllm_choice(index, tokens, "length") for index, tokens in enumerate(samples)]
    assert VLLM.joined(events) == {"id": "q", "choices": choices, "usage": usage}


@given(rows, sizes)
def test_llamas_events_hold_what_is_new_and_the_last_the_counts(tokens: list[int], sizes: list[int]) -> None:
    def event_of(of: list[int]) -> dict[str, Any]:
        entries = [{"id": token, "logprob": -token / 8, "top_logprobs": []} for token in of]
        return {"content": "x" * len(of), "tokens": of, "completion_probabilities": entries}

    last = {"stop": True, "stop_type": "limit", "tokens_predicted": len(tokens), "tokens_evaluated": 3}
    events: Events = [{**event_of(piece), "stop": False} for piece in cut(tokens, sizes)]
    events.append({**last, "content": "", "tokens": []})
    assert LLAMA_CPP.joined(events) == {**event_of(tokens), **last}


def test_sglangs_last_event_is_the_reply() -> None:
    whole = {"text": "ab", "output_ids": [1, 2], "meta_info": {"output_token_logprobs": [[-1.0, 1, None]] * 2}}
    events: Events = [{"text": "a", "output_ids": [1], "meta_info": {"output_token_logprobs": []}}, whole]
    assert SGLANG.joined(events) == events[-1]


def test_what_each_event_repeats_is_not_joined_and_of_two_finish_reasons_the_last_counts() -> None:
    fields = {"index": 0, "prompt_token_ids": [1, 2], "text": "a"}
    events: Events = [{"choices": [{**fields, "finish_reason": reason}]} for reason in ("stop", "length")]
    events[1]["choices"][0]["prompt_token_ids"] = None
    assert VLLM.joined(events)["choices"] == [{**fields, "text": "aa", "finish_reason": "length"}]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_no_events_make_no_reply(dialect: Dialect) -> None:
    with pytest.raises(RequestError, match="a stream without an event"):
        dialect.joined([])
    with pytest.raises(RequestError, match="events that can't be joined"):
        dialect.joined([{"choices": 5, "meta_info": 5}, 5])  # type: ignore[list-item]


def test_split_choices_are_a_reply_each_without_usage() -> None:
    reply = {"id": "q", "choices": [{"index": 0}, {"index": 1}], "usage": {"completion_tokens": 4}}
    assert split_choices(reply) == [{"id": "q", "choices": [{"index": 0}]}, {"id": "q", "choices": [{"index": 1}]}]
    reply = {"choices": [{"index": 0}], "usage": {"completion_tokens": 2}}
    assert split_choices(reply) == [reply]
    assert split_choices({"content": "a"}) == [{"content": "a"}]


def test_a_chats_calls_come_together_by_their_index_and_its_texts_grow() -> None:
    def event(**delta: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    def call(index: int, **function: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": function}]}

    events: Events = [
        event(role="assistant", content="I ", reasoning_content="so"),
        event(content=None, reasoning_content=" it"),
        event(content="call.", **call(1, name="g", arguments="")),
        event(**call(0, name="f", arguments='{"a"')),
        event(**call(1, arguments="{}")),
        event(**call(0, name=None, arguments=": 1}")),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "usage": None},
        {"choices": [], "usage": {"prompt_tokens": 3}},
    ]
    whole = CHAT.joined(events)
    assert whole["usage"] == {"prompt_tokens": 3} and whole["choices"][0]["finish_reason"] == "tool_calls"
    delta = whole["choices"][0]["delta"]
    assert (delta["content"], delta["reasoning_content"]) == ("I call.", "so it")
    assert [each["function"] for each in delta["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]


# --- what is sent and read in a dialect is what the page says; no other file knows its name


REQUEST = request_of("a", prompt_logprobs=0)
ROUTES = {"routes"}  # of mixtures; the servers that are played have none


@pytest.fixture(params=TELLING)
def spoken(request: pytest.FixtureRequest) -> tuple[Dialect, dict[str, Any]]:
    """A dialect, and a response with all that it may hold."""
    return PLAYS[request.param][0], reply_of(request.param, REQUEST)


@pytest.mark.rounding
def test_the_page_has_what_is_sent_and_read() -> None:
    assert dialects.made() in dialects.PAGE.read_text(encoding="utf-8")


def without(reply: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of the reply; the field is there to begin with."""
    less = copy.deepcopy(reply)
    *outer, last = re.findall(r"\w+", path)
    inside: Any = less
    for name in outer:
        inside = inside[int(name) if name.isdigit() else name]
    del inside[last]
    return less


def said(dialect: Dialect, reply: dict[str, Any]) -> dict[str, Any]:
    """What is read, what is missing left out."""
    return {name: value for name, value in dialect.read(reply, REQUEST).items() if value is not None}


@pytest.mark.rounding
def test_each_field_of_the_table_is_read_there_and_there_only(spoken: tuple[Dialect, dict[str, Any]]) -> None:
    dialect, reply = spoken
    whole = said(dialect, reply)
    assert set(whole) == {field.says for field in dialect.fields} - ROUTES - {"prompt"}
    for name in whole:
        less = reply
        for path in {field.path for field in dialect.fields if field.says == name}:
            less = without(less, path)
        assert name not in said(dialect, less), name


@pytest.mark.rounding
def test_the_script_of_a_fuzz_run_reads_a_response_in_the_same_way(spoken: tuple[Dialect, dict[str, Any]]) -> None:
    dialect, reply = spoken
    names: dict[str, Any] = {}
    exec(dialect.reproducer, names)
    fields = dialect.read(reply, REQUEST)
    assert names["answer"]([reply]) == (fields["token_ids"], fields["logprobs"])


NAMES = "|".join(re.escape(each.name) for each in DIALECTS if each.name != "text")  # also a field of answers
SINGLED_OUT = re.compile(
    r"import\b[^\n]*\b(VLLM|SGLANG|LLAMA_CPP|TEXT)\b"
    r"|\bdialects(\.| import [^\n]*)\b(openai|sglang|llama_cpp)\b"
    r"|dialect\.name\b[^\n]*(==|!=| in )"
    rf"|(==|!=| in )[^\n]*[\"']({NAMES})[\"']|[\"']({NAMES})[\"'] in "
)


@pytest.mark.rounding
def test_no_other_file_imports_a_dialect_or_compares_its_name() -> None:
    """In any other place a new dialect would have to be added, too."""
    package = Path(lfm2np.__file__).parent
    folders = (package / "oracle" / "engines", package / "suite" / "fuzz", package / "commands" / "cli")
    paths = [path for folder in folders for path in folder.rglob("*.py") if path.parent.name != "dialects"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    assert texts and {name: found[0] for name, text in texts.items() if (found := SINGLED_OUT.search(text))} == {}
    assert SINGLED_OUT.search("if engine.startswith('x') and kind == 'llama.cpp': pass")
