"""Whatever is wrong with a request, or with the engine, is reported in one sentence, with the status that fits, and
harms no other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_app import HEAD, JSON, Served, connection, model, serving

import lfm2np
from lfm2np.checkpoint.loaded import hand_fixture
from lfm2np.commands.serve.settings import Settings
from lfm2np.errors import RequestError

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
HELLO = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(model(), Settings("trained", max_body_bytes=20000, max_requests=20)) as one:
        yield one


# What is sent beside the prompt "a", the field that is named, and a part of the message.
BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "valid string"),
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": [[]]}, "prompt", "prompt[0]: "),
    ({"prompt": [1, True]}, "prompt", "prompt[1]: "),
    ({"prompt": [[1], [None]]}, "prompt", "prompt[1][0]: "),
    ({"prompt": [512]}, None, "ids[0]: 512, expected 0 to vocab_size-1=511"),
    ({"prompt": [-1] * 1024, "max_tokens": 1}, None, "expected fewer than max_position_embeddings=1024"),
    ({"prompt": [1] * 1000, "max_tokens": 30}, None, "max_tokens 30: expected at most 24, what"),
    ({"prompt": [1] * 200, "max_tokens": 300}, None, "need 125 blocks of 4; the pool has 60"),
    ({"prompt": ["a"] * 21}, None, "21 prompts times samples: expected at most 20"),
    ({"max_tokns": 3}, "max_tokns", "unknown field"),
    ({"max_tokens": "3"}, "max_tokens", "valid integer"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 0, "min_tokens": 1}, None, "min_tokens 1: expected at most max_tokens=0"),
    ({"min_tokens": 20}, None, "min_tokens 20: expected at most max_tokens=16"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"temperature": -0.1}, None, "temperature -0.1"),
    ({"n": 21}, None, "21 prompts times samples: expected at most 20"),
    ({"best_of": 2}, None, "best_of 2: expected n=1"),
    ({"stop": [""]}, "stop", "at least 1 character"),
    ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
    ({"stop": "a" * 257}, "stop", "at most 256 characters"),
    ({"logit_bias": {str(token_id): 0.0 for token_id in range(1025)}}, "logit_bias", "at most 1024 items"),
    ({"logit_bias": {"x": 1.0}}, None, "logit_bias token id 'x'"),
    ({"logit_bias": {"5": "1"}}, None, "logit_bias[5] '1'"),
    ({"prompt_logprobs": 21}, None, "prompt_logprobs 21: expected at most 20"),
    ({"suffix": "b"}, "suffix", "None"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "expected stream true"),
    ({"response_format": {"type": "json_object"}}, "response_format", "'text'"),
    ({"prompt": "\ud800"}, None, "not JSON"),
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [*HELLO, {"role": "user"}]}, None, "messages[1].content: None, expected a string"),
    ({"messages": [*HELLO, {"role": "user", "content": 3}]}, "messages", "messages[1].content: Input"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages", "'user'"),
    ({"messages": [{**HELLO[0], "colour": 1}]}, "colour", "unknown field"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages", "unknown"),
    ({"messages": [{**HELLO[0], "tool_calls": [3]}]}, "messages", "messages[0].tool_calls[0]: Input should be"),
    ({"tools": [{"type": "function"}]}, None, "tools[0]: {'type': 'function'}, expected type 'function', and"),
    ({"tools": {}}, "tools", "tools: Input should be a valid list"),
    ({"tools": [{}] * 1025}, "tools", "at most 1024 items"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "'none' or 'auto'"),
    ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", "True"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs", "valid dictionary"),
    ({"top_logprobs": 2}, None, "top_logprobs 2: expected logprobs true"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, None, "max_completion_tokens 2"),
    ({"messages": [{"role": "user", "content": "a " * 900}]}, None, "916 prompt tokens"),
]
CASES = [("/v1/completions", {"prompt": "a"} | fields, *rest) for fields, *rest in BAD]
CASES += [("/v1/chat/completions", {"messages": HELLO} | fields, *rest) for fields, *rest in BAD_CHATS]
CASES += [("/v1/completions", {}, "prompt", "Field required"), ("/tokenize", {}, "prompt", "expected one of them")]


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"), CASES, ids=[json.dumps(case[1])[:60] for case in CASES]
)
def test_a_bad_field_is_named(served: Served, path: str, fields: Any, param: str | None, message: str) -> None:
    status, reply = served.ask(path, fields)
    error = reply["error"]
    assert (status, error["type"], error["code"], error["param"]) == (400, "invalid_request_error", 400, param), reply
    assert message in error["message"] and "\n" not in error["message"] and len(error["message"]) < 400


NOT_JSON = (b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'{"prompt": 1e999}', b"\xff", b"[" * 1500, b"9" * 5000)


@pytest.mark.parametrize("path", PATHS)
@given(
    content=st.sampled_from(NOT_JSON) | st.binary(max_size=200),
    kind=st.sampled_from(["application/json", "text/plain", ""]),
)
@settings(deadline=None, max_examples=40)
def test_any_bytes_get_a_response(served: Served, path: str, content: bytes, kind: str) -> None:
    status, reply = served.ask(path, content, {"Content-Type": kind})
    assert status == (400 if kind == "application/json" else 415) and reply["error"]["message"]


# Of the module's server: path, what is sent (None: GET), headers, status, and a part of the message.
REFUSED: list[tuple[str, Any, dict[str, str], int, str]] = [
    *((path, {"prompt": "a" * 30000}, JSON, 413, "more than 20000 bytes") for path in PATHS),
    ("/v1/completions", {"prompt": "a"}, {"Content-Type": "text/plain"}, 415, "expected application/json"),
    ("/v1/completions", {"prompt": "a", "model": "gpt"}, JSON, 404, "model 'gpt': expected 'trained'"),
    ("/detokenize", {"tokens": [1], "model": "gpt"}, JSON, 404, "model 'gpt': expected 'trained'"),
    ("/v1/models/gpt", None, {}, 404, "model 'gpt': expected 'trained'"),
    ("/v1/embeddings", None, {}, 404, "GET /v1/embeddings: not found"),
    ("/v1/completions/", {"prompt": "a"}, JSON, 404, "not found"),  # no redirect to wherever the client says it is
    ("/v1/completions", None, {}, 405, "method not allowed"),
    ("/health", {}, JSON, 405, "method not allowed"),
    # A page could make its own name mean this machine (DNS rebinding).
    *(
        (path, fields, JSON | {"Host": host}, 421, "expected the name of this server")
        for host in ("evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[::")
        for path, fields in (("/v1/completions", {"prompt": "a"}), ("/metrics", None))
    ),
]


@pytest.mark.parametrize(("path", "fields", "headers", "status", "message"), REFUSED)
def test_what_is_not_served_has_its_status(
    served: Served, path: str, fields: Any, headers: dict[str, str], status: int, message: str
) -> None:
    given, reply = served.get(path, headers) if fields is None else served.ask(path, fields, headers)
    assert given == status and message in reply["error"]["message"], reply


def test_names_of_this_machine_are_its_own(served: Served) -> None:
    for host in ("localhost", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
        assert served.get("/metrics", {"Host": host})[0] == 200, host


def test_a_body_that_is_announced_as_too_large_is_not_read(served: Served) -> None:
    with served.raw() as raw:
        raw.sendall(HEAD + b"30000\r\nExpect: 100-continue\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")
    with connection(served.port) as unknown_size:
        pieces = (b" " * 1000 for _ in range(30))
        unknown_size.request("POST", "/v1/completions", pieces, JSON, encode_chunked=True)
        assert unknown_size.getresponse().status == 413


def test_a_key_is_required_where_there_is_one() -> None:
    with serving(model(), Settings("trained", key="s3cret")) as served:
        right, fields = {**JSON, "Authorization": "Bearer s3cret"}, {"prompt": "a", "max_tokens": 1}
        for given in ({}, *({"Authorization": text} for text in ("Bearer s3cre", "s3cret", "Basic s3cret"))):
            status, reply = served.ask("/v1/completions", fields, JSON | given)
            assert status == 401 and "s3cret" not in json.dumps(reply)
            assert served.get("/metrics", given)[0] == served.get("/nothing", given)[0] == 401
        assert served.ask("/v1/completions", fields, right | {"Host": "any.example"})[0] == 200
        assert served.get("/health")[0] == 200


def test_texts_are_refused_where_there_is_no_tokenizer() -> None:
    bodies = ({"prompt": "a"}, {"messages": HELLO}, {"prompt": "a"}, {"tokens": [1]})
    with serving(lfm2np.load(hand_fixture())) as served:
        for path, fields in zip(PATHS, bodies, strict=True):
            status, reply = served.ask(path, fields)
            assert (status, reply["error"]["message"]) == (400, "this model has no tokenizer: expected token ids"), path
        fields = {"prompt": [1, 2], "max_tokens": 2, "logprobs": 1, "temperature": 0, "echo": True}
        status, reply = served.ask("/v1/completions", fields)
        assert status == 200 and reply["choices"][0]["logprobs"]["tokens"][0] == "token_id:1"


@pytest.mark.slow
def test_more_than_it_takes_on_is_told_to_come_again() -> None:
    with serving(model(), Settings("trained", max_requests=3)) as served, ThreadPoolExecutor(8) as pool:
        fields = {"prompt": [1], "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        replies = list(pool.map(lambda _: served.ask("/v1/completions", fields), range(8)))
        taken = [reply["choices"][0]["text"] for status, reply in replies if status == 200]
        refused = [reply["error"]["message"] for status, reply in replies if status == 429]
        assert len(taken) >= 3 and len(taken) + len(refused) == 8 and refused and len(set(taken)) == 1
        assert all("expected at most 3 together" in message for message in refused)
        served.wait_until_empty()
        assert served.ask("/v1/completions", fields)[0] == 200


def test_a_response_that_takes_too_long_is_ended() -> None:
    with serving(model(), Settings("trained", request_seconds=0.3)) as served:
        fields = {"prompt": [1], "max_tokens": 230, "ignore_eos": True, "temperature": 0}
        status, reply = served.ask("/v1/completions", fields)
        assert status == 504 and "within 0.3 s" in reply["error"]["message"]
        status, events = served.ask("/v1/completions", {**fields, "stream": True})
        assert status == 200 and len(events) > 1
        assert events[-1]["error"]["code"] == 504 and "choices" not in events[-1]
        served.wait_until_empty()
        assert 'status="504"} 2.0' in served.get("/metrics")[1]


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with serving(model(), Settings("trained", body_seconds=0.2)) as served, served.raw() as connection:
        connection.sendall(HEAD + b"100\r\n\r\n{")
        began, reply = time.monotonic(), b""
        while piece := connection.recv(4096):
            reply += piece
        assert reply.startswith(b"HTTP/1.1 408") and b"within 0.2 s" in reply
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("key", key) for key in ("a b", "schl\u00fcssel", "a\n")),
        *(("max_requests", 0), ("max_logprobs", -1), ("max_body_bytes", 0)),
        *(("write_seconds", 0.0), ("body_seconds", 1e9), ("request_seconds", float("nan"))),
    ],
)
def test_settings_that_allow_nothing_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        Settings("trained", **{field: value})


# --- where the engine fails, or refuses

SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("method", ["step", "add_request"])
def test_an_exception_in_the_engine_ends_it_and_all_are_told(
    monkeypatch: pytest.MonkeyPatch, method: str, is_streamed: bool
) -> None:
    """Those in progress, the one that comes with it, and those that come later."""
    with serving(model()) as served, ThreadPoolExecutor(1) as pool:
        long = {"prompt": [1], "max_tokens": 200, "ignore_eos": True, "stream": is_streamed}
        first = pool.submit(served.ask, "/v1/completions", long)
        served.wait_until(lambda: served.service.engine.state.metrics.steps > 2)
        monkeypatch.setattr(served.engine, method, lambda *_: {}["no"])
        status, reply = served.ask("/v1/completions", {"prompt": [[2], [3]]})
        assert status in (500, 503) and "KeyError: 'no'" in reply["error"]["message"]
        status, reply = first.result()
        error = (reply[-1] if is_streamed else reply)["error"]
        assert (status, error["code"], error["message"]) == (200 if is_streamed else 500, 500, "KeyError: 'no'")
        status, reply = served.ask("/v1/completions", SHORT)
        assert status == 503 and "the engine ended: KeyError: 'no'" in reply["error"]["message"]
        assert served.get("/health")[0] == 503 and served.get("/v1/models")[0] == 200
        assert served.service.engine.num_places == 0


def test_a_request_that_the_engine_refuses_keeps_no_other_from_running() -> None:
    with serving(model()) as served, ThreadPoolExecutor(2) as pool:
        good = pool.submit(served.ask, "/v1/completions", {**SHORT, "max_tokens": 30})
        bad = [{"prompt": [[1, 2], [1] * 200], "max_tokens": 100, "stream": stream} for stream in (False, True)]
        for fields in bad:  # one bad prompt of two ends the call; a stream that can't begin is not a stream
            status, reply = served.ask("/v1/completions", fields)
            assert status == 400 and "the pool has 60" in reply["error"]["message"]
        assert good.result()[0] == 200
        served.wait_until_empty()
