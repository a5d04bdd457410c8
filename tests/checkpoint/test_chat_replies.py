"""Replies: from token ids a marker is a token, from text its spelling; whole as in pieces, wherever they are cut."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders import tiny_config
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.checkpoint.text.replies import CONTROL, Message, ReplyStream, join, parse_reply, render_reply
from lfm2np.checkpoint.text.tokenizer import Tokenizer, load_tokenizer
from lfm2np.checkpoint.text.tool_calls import ToolCall
from lfm2np.errors import RequestError

pytestmark = pytest.mark.slow

FIXTURE = Path(__file__).parent.parent.parent / "fixtures" / "trained"


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(FIXTURE, tiny_config(vocab_size=512, max_position_embeddings=2**18))


def spelled(text: str) -> list[int]:
    """Ids of a text in which no marker is a token: of each letter by itself."""
    return [token_id for letter in text for token_id in tokenizer().encode_more(letter)]


def streamed(reply: str | Sequence[int], cuts: Sequence[int], with_tokenizer: bool = False) -> Message:
    stream = ReplyStream(tokenizer() if with_tokenizer else None)
    edges = [0, *sorted(cut % (len(reply) + 1) for cut in cuts), len(reply)]
    return join([*(stream.feed(reply[a:b]) for a, b in itertools.pairwise(edges)), stream.finish()])


THINK = ("<think>", "</think>")
PIECES = (
    *CONTROL,
    *(*THINK, "<|tool_call_end|>", "<|tool_call_start|>", "[f(a='<", "')]", "[f(x=1), g.h(from=None)]"),
    *("[f(s='é😀\\n')]", "f()", "<", "<|", "|>", "text [1] ", "`[a](b)`", "\n", "日本", '[{"name": "f"}]', "[f(a="),
)
replies = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
cuts = st.lists(st.integers(0, 400), max_size=12)


@given(replies, cuts)
def test_text_is_read_alike_wherever_it_is_cut(reply: str, cuts: list[int]):
    whole = parse_reply(reply)
    assert streamed(reply, cuts) == streamed(reply, range(len(reply))) == whole
    assert not any(marker in whole.content for marker in CONTROL)


@given(replies, cuts)
def test_ids_are_read_alike_wherever_they_are_cut(reply: str, cuts: list[int]):
    ids = tokenizer().encode_more(reply)
    whole = parse_reply(ids, tokenizer())
    assert streamed(ids, cuts, True) == streamed(ids, range(len(ids)), True) == whole
    assert not whole.guessed


@given(replies)
def test_ids_say_what_their_text_says_where_every_marker_is_a_token(reply: str):
    """The tokenizer makes a token of every marker that is spelled, so text and ids agree."""
    of_text, of_ids = parse_reply(reply), parse_reply(tokenizer().encode_more(reply), tokenizer())
    assert of_ids == Message(**{**vars(of_text), "guessed": False})


def test_a_spelled_marker_is_text_where_the_ids_say_so():
    start, end = tokenizer().encode_more("<|tool_call_start|>"), tokenizer().encode_more("<|tool_call_end|>")
    assert (start, end) == ([10], [11])
    ids = [*spelled("It ends with <|tool_call_end|>. "), *start, *spelled("[f(s='<|tool_call_end|>')]"), *end]
    message = parse_reply(ids, tokenizer())
    assert message.content == "It ends with <|tool_call_end|>. "
    assert message.tool_calls == (ToolCall("f", {"s": "<|tool_call_end|>"}),)
    of_text = parse_reply(render_reply(message))
    assert of_text.guessed and not of_text.tool_calls


def test_a_character_that_is_cut_is_whole_again():
    ids = spelled("é😀")
    assert len(ids) == 6 and ReplyStream(tokenizer()).feed(ids[:1]).content == ""
    assert parse_reply(ids[:-1], tokenizer()).content == "é\ufffd"
    message = parse_reply([*ids[:-1], 10, *spelled("[f()]"), 11], tokenizer())
    assert message == Message("é\ufffd", None, (ToolCall("f", {}),))


def test_think_is_a_marker_as_a_token_or_where_there_is_no_such_token(tmp_path: Path):
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(FIXTURE / name, tmp_path)
    content = json.loads((FIXTURE / "tokenizer.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [{"id": 512 + at, "content": text, **flags} for at, text in enumerate(THINK)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with_tokens = load_tokenizer(tmp_path, tiny_config(vocab_size=520, max_position_embeddings=10**4))
    assert parse_reply([512, *spelled("a"), 513, *spelled("b")], with_tokens) == Message("b", "a")
    assert parse_reply(spelled("<think>a</think>b"), with_tokens) == Message("<think>a</think>b")
    assert parse_reply(spelled("<think>a</think>b"), tokenizer()) == Message("b", "a")


texts = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]))
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
nested = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text("ab'\"\\\n"), inner), max_leaves=6)
arguments = st.dictionaries(st.sampled_from(["a", "from", "class", "max-n"]), nested)
calls = st.builds(ToolCall, st.sampled_from(["f", "a.b", "get-x", "from"]), arguments)


@given(st.builds(Message, texts, st.none() | texts, st.lists(calls, max_size=3).map(tuple)))
def test_what_is_rendered_is_read_again(message: Message):
    assert parse_reply(render_reply(message)) == message


@pytest.mark.parametrize(
    ("reply", "tokens", "error"),
    [
        (b"\xff\xfe", True, "expected text, or token ids"),
        (None, True, "expected text, or token ids"),
        ([1, 2], False, "expected text, or token ids and their tokenizer"),
        ([1, 512], True, r"ids\[1\]: 512, expected 0 to vocab_size-1=511"),
        ([-1], True, r"ids\[0\]: -1"),
        ([True], True, "not a truth value"),
        (["f"], True, "expected an integer"),
    ],
)
def test_what_is_no_reply_is_one_line(reply: object, tokens: bool, error: str):
    with pytest.raises(RequestError, match=error):
        parse_reply(reply, tokenizer() if tokens else None)  # type: ignore[arg-type]


def test_a_stream_ends_once():
    stream = ReplyStream()
    stream.finish()
    with pytest.raises(RequestError, match="the reply has ended"):
        stream.feed("")


@pytest.mark.parametrize(
    "reply", ["[" * 10**6, "<" * 10**6, "<|tool_call_start|>" * 10**4, "<|tool_call_start|>[" + "<" * 10**6]
)
def test_a_long_reply_without_an_end_is_read(reply: str):
    message = parse_reply(reply)
    assert message.content == ("" if "tool" in reply else reply) and not message.tool_calls
    assert len(message.unparsed) == reply.count("<|tool_call_start|>")
