"""Whatever is wrong with a call is told in one sentence, with the status that fits, and harms no other call."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_app import HEAD, JSON, Served, model, serving

import lfm2np
from lfm2np.checkpoint.loaded import hand_fixture
from lfm2np.commands.serve.limits import Limits
from lfm2np.commands.serve.service import Settings
from lfm2np.errors import RequestError

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(model(), Limits(max_body_bytes=20000, max_requests=20)) as one:
        yield one


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "field required"),
    ({"prompt": None}, "prompt", "expected a text, its tokens"),
    ({"prompt": {"a": 1}}, "prompt", "expected a text, its tokens"),
    ({"prompt": []}, "prompt", "a list of either that is not empty"),
    ({"prompt": [[]]}, "prompt", "[0]: expected token ids, at least one"),
    ({"prompt": [1, "a"]}, "prompt", "[1]: expected a token id, as the first is one"),
    ({"prompt": [1, True]}, "prompt", "[1]: expected a token id, as the first is one"),
    ({"prompt": ["a", 1]}, "prompt", "[1]: expected a text, as the first is one"),
    ({"prompt": [[1], [None]]}, "prompt", "[1]: expected token ids, at least one"),
    ({"prompt": [None]}, "prompt", "[0]: expected a text, a token id"),
    ({"prompt": [512]}, "None", "ids[0]: 512, expected 0 to vocab_size-1=511"),
    ({"prompt": [-1]}, "None", "ids[0]: -1"),
    ({"prompt": [1] * 1024, "max_tokens": 1}, "None", "expected fewer than max_position_embeddings=1024"),
    (
        {"prompt": [1] * 1000, "max_tokens": 30},
        "None",
        "max_tokens 30: expected at most 24, what",
    ),
    ({"prompt": [1] * 200, "max_tokens": 300}, "None", "need 125 blocks of 4; the pool has 60"),
    ({"prompt": "a", "max_tokns": 3}, "max_tokns", "unknown field"),
    ({"prompt": "a", "max_tokens": "3"}, "max_tokens", "valid integer"),
    ({"prompt": "a", "max_tokens": 3.5}, "max_tokens", "valid integer"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"prompt": "a", "temperature": True}, "temperature", "valid number"),
    ({"prompt": "a", "temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
    ({"prompt": "a", "n": 2, "temperature": 0}, "None", "n 2: expected 1 with temperature 0"),
    ({"prompt": "a", "n": 21}, "None", "21 prompts times samples: expected at most 20"),
    ({"prompt": "a", "best_of": 2}, "None", "best_of 2: expected n=1"),
    ({"prompt": "a", "seed": -1}, "seed", "greater than or equal to 0"),
    ({"prompt": "a", "seed": 2**64}, "seed", "less than or equal to"),
    ({"prompt": "a", "stop": [""]}, "stop", "at least 1 character"),
    ({"prompt": "a", "stop": ["a"] * 17}, "stop", "at most 16 items"),
    ({"prompt": "a", "stop": "a" * 257}, "stop", "at most 256 characters"),
    ({"prompt": "a", "logit_bias": {str(token_id): 0.0 for token_id in range(1025)}}, "logit_bias", "1025 biases"),
    ({"prompt": "a", "max_tokens": 0, "min_tokens": 1}, "None", "min_tokens 1: expected at most max_tokens=0"),
    ({"prompt": "a", "prompt_logprobs": 21}, "None", "prompt_logprobs 21: expected at most 20"),
    ({"prompt": ["a"] * 21}, "None", "21 prompts times samples: expected at most 20"),
    ({"prompt": "a", "stop": 1}, "stop", "valid string, or"),
    ({"prompt": "a", "logit_bias": {"x": 1.0}}, "None", "logit_bias token id 'x'"),
    ({"prompt": "a", "logit_bias": {"512": 1.0}}, "None", "logit_bias 512"),
    ({"prompt": "a", "allowed_token_ids": []}, "None", "expected at least one token id"),
    ({"prompt": "a", "min_tokens": 20}, "None", "min_tokens 20: expected at most max_tokens=16"),
    ({"prompt": "a", "logprobs": 1000}, "None", "logprobs 1000"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "none"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "expected stream true"),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", "'text'"),
    ({"prompt": "\ud800"}, "None", "lone surrogate"),
    ({"prompt": "a", "cache_salt": 1}, "cache_salt", "valid string"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=[json.dumps(case[0])[:60] for case in BAD])
def test_a_bad_field_is_named(served: Served, fields: dict[str, Any], param: str, message: str):
    status, reply = served.ask("/v1/completions", fields)
    assert (status, reply["error"]["type"], reply["error"]["code"]) == (400, "invalid_request_error", 400)
    assert str(reply["error"]["param"]) == param
    assert message.lower() in reply["error"]["message"].lower(), reply
    assert "\n" not in reply["error"]["message"] and len(reply["error"]["message"]) < 400


HELLO = {"role": "user", "content": "a"}
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, "tools"),
    ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs 2: expected logprobs true"),
    ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    (
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 2},
        "max_completion_tokens 2",
    ),
    ({"messages": [{"role": "user", "content": "a " * 900}]}, "916 prompt tokens"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CHATS, ids=[json.dumps(chat[0])[:60] for chat in BAD_CHATS])
def test_a_bad_conversation_is_refused(served: Served, fields: dict[str, Any], message: str):
    status, reply = served.ask("/v1/chat/completions", fields)
    assert status == 400 and message in reply["error"]["message"], reply


GARBAGE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"prompt": NaN}',
    b'{"prompt": 1e999}',
    b'{"a": 1, "a": 2}',
    b"\xff",
    b"[" * 1500,
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", GARBAGE, ids=repr)
def test_what_is_no_object_is_refused(served: Served, path: str, content: bytes):
    status, reply = served.ask(path, content)
    assert status == 400 and reply["error"]["message"], reply


@given(
    path=st.sampled_from(PATHS),
    content=st.binary(max_size=200),
    kind=st.sampled_from(["application/json", "text/plain", ""]),
)
@settings(deadline=None)
def test_any_bytes_get_an_answer(served: Served, path: str, content: bytes, kind: str):
    status, reply = served.ask(path, content, {"Content-Type": kind})
    assert status == (400 if kind == "application/json" else 415) and reply["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_too_large_is_not_read(served: Served, path: str):
    status, reply = served.ask(path, {"prompt": "a" * 30000})
    assert status == 413 and "more than 20000 bytes" in reply["error"]["message"]


def test_only_json_is_read(served: Served):
    status, reply = served.ask("/v1/completions", {"prompt": "a"}, {"Content-Type": "text/plain"})
    assert status == 415 and "expected application/json" in reply["error"]["message"]


def test_another_model_is_not_here(served: Served):
    status, reply = served.ask("/v1/completions", {"prompt": "a", "model": "gpt"})
    assert status == 404 and reply["error"]["param"] == "model"
    assert "expected 'trained'" in reply["error"]["message"]
    assert served.get("/v1/models/gpt")[0] == 404


def test_another_path_or_method_is_told(served: Served):
    assert served.get("/v1/embeddings")[0] == 404
    assert served.get("/v1/completions")[0] == 405
    assert served.ask("/health", {})[0] == 405


def test_one_bad_prompt_of_several_ends_the_whole_call(served: Served):
    status, reply = served.ask("/v1/completions", {"prompt": [[1, 2], [1] * 200], "max_tokens": 100})
    assert status == 400 and "the pool has 60" in reply["error"]["message"]
    served.wait_until_empty()


def test_a_stream_that_can_not_begin_is_no_stream(served: Served):
    status, reply = served.ask("/v1/completions", {"prompt": [1] * 200, "max_tokens": 300, "stream": True})
    assert status == 400 and "the pool has 60" in reply["error"]["message"]


def test_a_key_is_asked_for_where_there_is_one():
    with serving(model(), key="s3cret") as served:
        right, wrong = {**JSON, "Authorization": "Bearer s3cret"}, {**JSON, "Authorization": "Bearer s3cre"}
        fields = {"prompt": "a", "max_tokens": 1}
        for headers in (JSON, wrong, {**JSON, "Authorization": "s3cret"}, {**JSON, "Authorization": "Basic s3cret"}):
            status, reply = served.ask("/v1/completions", fields, headers)
            assert status == 401 and "s3cret" not in json.dumps(reply)
            assert served.get("/metrics", headers)[0] == served.get("/v1/models", headers)[0] == 401
        assert served.ask("/v1/completions", fields, right)[0] == 200
        assert served.get("/health")[0] == 200


def test_a_server_without_a_key_is_known_by_its_own_names_only(served: Served):
    """Else a page could make its own name mean this machine, and ask (DNS rebinding)."""
    fields = {"prompt": "a", "max_tokens": 1}
    for host in ("evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[::"):
        status, reply = served.ask("/v1/completions", fields, {**JSON, "Host": host})
        assert status == 421 and "expected the name of this server" in reply["error"]["message"], host
        assert served.get("/metrics", {"Host": host})[0] == 421
    for host in ("localhost", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
        assert served.ask("/v1/completions", fields, {**JSON, "Host": host})[0] == 200, host


def test_a_slash_too_many_leads_nowhere(served: Served):
    assert served.ask("/v1/completions/", {"prompt": "a"})[0] == 404


def test_what_is_no_http_gets_an_error_object(served: Served):
    with served.raw() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
        reply = b""
        while piece := connection.recv(4096):
            reply += piece
    head, _, content = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(content)["error"]["code"] == 400


def test_texts_are_refused_where_there_is_no_tokenizer():
    with serving(lfm2np.load(hand_fixture())) as served:
        for path, fields in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [HELLO]}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            status, reply = served.ask(path, fields)
            assert (status, reply["error"]["message"]) == (400, "this model has no tokenizer: expected token ids"), path
        status, reply = served.ask(
            "/v1/completions", {"prompt": [1, 2], "max_tokens": 2, "logprobs": 1, "temperature": 0}
        )
        assert status == 200 and reply["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


@pytest.mark.parametrize("key", ["a b", "schl\u00fcssel", "a\n"])
def test_a_key_that_no_client_can_show_is_refused(key: str):
    with pytest.raises(RequestError, match="the key: expected printable ASCII"):
        Settings("a", key)


def test_more_than_it_takes_on_is_told_to_come_again():
    with serving(model(), Limits(max_requests=3)) as served, ThreadPoolExecutor(8) as pool:
        fields = {"prompt": [1], "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        replies = list(pool.map(lambda _: served.ask("/v1/completions", fields), range(8)))
        taken = [reply for status, reply in replies if status == 200]
        refused = [reply for status, reply in replies if status == 429]
        assert len(taken) >= 3 and len(taken) + len(refused) == 8 and refused
        assert all("expected at most 3 together" in reply["error"]["message"] for reply in refused)
        assert len({json.dumps([one["choices"][0]["text"]]) for one in taken}) == 1
        served.wait_until_empty()
        assert served.ask("/v1/completions", fields)[0] == 200


def test_an_answer_that_takes_too_long_is_ended():
    with serving(model(), Limits(request_seconds=0.3)) as served:
        fields = {"prompt": [1], "max_tokens": 230, "ignore_eos": True, "temperature": 0, "min_tokens": 230}
        status, reply = served.ask("/v1/completions", fields)
        assert status == 504 and "within 0.3 s" in reply["error"]["message"]
        status, events = served.ask("/v1/completions", {**fields, "stream": True})
        assert status == 200 and len(events) > 1
        assert events[-1]["error"]["code"] == 504 and "choices" not in events[-1]
        served.wait_until_empty()


def test_a_body_that_does_not_come_is_not_waited_for():
    with serving(model(), Limits(body_seconds=0.2)) as served, served.raw() as connection:
        connection.sendall(HEAD + b"100\r\n\r\n{")
        began = time.monotonic()
        reply = b""
        while piece := connection.recv(4096):
            reply += piece
        assert reply.startswith(b"HTTP/1.1 408") and b"within 0.2 s" in reply
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("version", [b"1.1\r\nContent-Length: 2", b"1.0"])
def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(served: Served, version: bytes):
    with served.raw() as connection:
        head = b"GET /health HTTP/" + version + b"\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reply = b""
        while piece := connection.recv(4096):
            reply += piece
    assert reply.startswith(b"HTTP/1.1 400") and reply.count(b"HTTP/1.1") == 1


def test_a_prompt_is_measured_before_its_tokens_are_checked(served: Served):
    """Else four million of them keep the event loop for seconds."""
    for prompt in ([-1] * 1024, [[1], [-1] * 1024]):
        status, reply = served.ask("/v1/completions", {"prompt": prompt})
        assert status == 400 and "prompt of 1024 tokens: expected fewer" in reply["error"]["message"]


def test_a_body_of_endless_parts_is_refused_before_it_is_parsed():
    with serving(model()) as served:
        for content in (b"[" + b"[]," * 2**17 + b"[]]", b'{"prompt": [' + b'["["],' * 2**17 + b'["a"]]}'):
            status, reply = served.ask("/v1/completions", content)
            assert status == 413 and "lists, objects and keys, expected at most 131072" in reply["error"]["message"]
        assert served.ask("/v1/completions", {"prompt": "[" * 2**18})[0] == 400
        status, reply = served.ask("/v1/completions", {"prompt": [1] * (2**18 + 1)})
        assert status == 400 and "262145 elements: expected at most 262144" in reply["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_all_clients_together_are_bounded_before_they_are_read(path: str):
    """One client has told of 300,000 bytes, and sent a single one."""
    limits = Limits(max_body_bytes=400_000, max_bodies_bytes=400_000)
    with serving(model(), limits) as served, served.raw() as first:
        first.sendall(HEAD + b"300000\r\n\r\n{")
        while not served.bodies.num_bytes:
            time.sleep(0.005)
        message = "a body of 200000 bytes, and 300000 of others are not parsed yet: expected at most 400000 together"
        with served.connection() as second:
            second.request("POST", path, b" " * 200_000, JSON)
            response = second.getresponse()
            assert (response.status, response.getheader("Retry-After")) == (503, "1")
            error = json.loads(response.read())["error"]
            assert error == {"message": message, "type": "service_unavailable_error", "param": None, "code": 503}
        with served.raw() as asking:  # whether to send it: nothing is there to be read
            asking.sendall(HEAD.replace(b"/v1/completions", path.encode()) + b"200000\r\nExpect: 100-continue\r\n\r\n")
            assert asking.recv(4096).startswith(b"HTTP/1.1 503 ")
        pieces = (b" " * 1000 for _ in range(120))  # sent without its length
        with served.connection() as second:
            second.request("POST", path, pieces, JSON, encode_chunked=True)
            assert second.getresponse().status == 503
        assert served.ask(path, b" " * 100_000)[0] == served.ask(path, b" " * 1000)[0] == 400
        assert served.get("/health")[0] == 200
        first.sendall(b" " * 299_999)
        assert first.recv(4096).startswith(b"HTTP/1.1 400")
        assert served.bodies.num_bytes == 0 and served.ask(path, b" " * 400_000)[0] == 400


def test_a_body_of_endless_numbers_is_refused_before_it_is_parsed():
    with serving(model()) as served:
        status, reply = served.ask("/v1/completions", b'{"prompt":[' + b"1," * (2**20 + 1) + b"1]}")
        assert status == 413 and "1048577 commas between elements, expected" in reply["error"]["message"]
        status, reply = served.ask("/v1/completions", {"prompt": "," * (2**20 + 1)})
        assert status == 400 and "text: 1048577 characters, expected at most" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_requests", 0),
        ("max_bodies_bytes", 2**23 - 1),
        ("write_seconds", 0.0),
        ("max_body_bytes", 0),
        ("body_seconds", 0.0),
        ("request_seconds", float("nan")),
    ],
)
def test_limits_that_allow_nothing_are_refused(field: str, value: Any):
    with pytest.raises(RequestError, match=field):
        Limits(**{field: value})
