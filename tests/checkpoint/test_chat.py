"""Chat templates: rendered as written, sandboxed, bounded; the built-in layout where there is none."""

from __future__ import annotations

import functools
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from builders import PLAIN_TEMPLATE, tiny_config, write_tokenizer

from lfm2np.checkpoint.text.chat import Chat, load_chat, render_chat, render_plain
from lfm2np.checkpoint.text.tokenizer import load_tokenizer
from lfm2np.errors import RequestError, TokenizerError

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "{{ 1 }} 🙂"},
]
LAID_OUT = (
    "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\n{{ 1 }} 🙂<|im_end|>\n<|im_start|>assistant\n"
)


def rendered(template: str, messages: Any = TALK, **options: Any) -> str:
    chat = Chat(template, {"bos_token": "<s>", "eos_token": "</s>"}, "chat_template.jinja")
    return render_chat(chat, messages, **options)


def test_the_plain_template_and_the_built_in_layout_agree() -> None:
    assert rendered(PLAIN_TEMPLATE) == LAID_OUT
    assert render_plain(TALK, "<s>") == LAID_OUT


def test_the_built_in_layout_wraps_tool_results_and_skips_an_empty_system_message() -> None:
    talk = [{"role": "system", "content": ""}, {"role": "tool", "content": "3"}]
    assert render_plain(talk, "") == (
        "<|im_start|>tool\n<|tool_response_start|>3<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(RequestError, match=r"messages\[0\]\.role: 'wizard', expected one of system, user"):
        render_plain([{"role": "wizard", "content": ""}], "")


WORKING = [
    ("{{ eos_token }}{{ unknown }}{{ tools is none }}", "</s>True"),
    ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
    ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}", "user"),
    ("{{ messages[3] | tojson }}", '{"role": "user", "content": "{{ 1 }} 🙂"}'),
    ("{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true, indent=1) }}", '{\n "a": 1,\n "b": "<é>"\n}'),
    ("{% generation %}{{ 'x' }}{% endgeneration %}", "x"),
    ("{{ 'a' ~ 200000 ~ none ~ [1] }}{{ [0] + [1] * 2 }}{{ 7 % 4 * 2 ** 3 }}", "a200000None[1][0, 1, 1]24"),
    ("{{ '%s-%03d' % ('a', 7) }}{{ '{:>3}|{}'.format('x', 1) }}{{ 'ab' | indent(2, true) }}", "a-007  x|1  ab"),
    ("{% if strftime_now is defined %}clock{% endif %}", "clock"),
    ("{{ dict(a=1).items() | list }}{% for i in range(3) %}{{ i }}{% endfor %}", "[('a', 1)]012"),
    # nothing is seen of the machinery
    *(
        ("{{ " + hidden + " }}", "")
        for hidden in ("range.args", "raise_exception.__globals__", "'x' | attr('__class__')")
    ),
    ("{% set messages = messages[1:] %}{{ messages | length }}{{ messages[::-1][0].content }}", "3{{ 1 }} 🙂"),
]


@pytest.mark.parametrize(("template", "expected"), WORKING)
def test_what_templates_use_works(template: str, expected: str) -> None:
    assert rendered(template) == expected


REFUSED = [
    ("{% for %}", "line 1"),
    ("{{ raise_exception('two\nlines') }}", "two lines"),
    ("{{ unknown.attribute }}", "'unknown' is undefined"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ strftime_now('%Y') }}", "has to be reproducible"),
    ("{{ [1, 2] | random }}", "has to be reproducible"),
    ("{{ lipsum() }}", "has to be reproducible"),
    ("{% include '/etc/passwd' %}", "no loader"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ("{{ '{0.__class__.__mro__}'.format(messages) }}", "unsafe"),
    ("{{ ('{0.__class__}' | string).format_map({'0': 1}) }}", ""),
    ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ""),
    ("{{ range }}", "output of an object's address"),
    ("{{ joiner() }}", "output of an object's address"),
    ("{{ raise_exception ~ '' }}", "output of an object's address"),
    ("{{ '{}'.format(raise_exception) | upper }}", "output of an object's address"),
    ("{{ messages | map('upper') | string }}", "output of an object's address"),
    ("{{ 'a' * 2**40 }}", "*: a result of"),
    ("{{ [0] * 2**40 }}", "*: a result of"),
    ("{{ ([('a' * 1000)] * 3000000) | upper }}", "*: a result of"),
    ("{{ '%999999999999d' % 1 }}", ""),
    ("{{ 'x' | center(2**40) }}", "MemoryError"),
    ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters of output"),
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "no end after 1000000 steps"),
    ("{{ 10 ** (10 ** 10) }}", "**: a result of"),
]


@pytest.mark.parametrize(("template", "fragment"), REFUSED)
def test_a_template_that_fails_reaches_out_or_runs_wild_is_stopped(template: str, fragment: str) -> None:
    one_line = rf"^chat_template\.jinja: the chat template failed.*{re.escape(fragment)}.*\Z"
    with pytest.raises(TokenizerError, match=one_line):
        rendered(template)


def test_an_address_that_was_given_is_text_like_any_other() -> None:
    assert rendered("at 0x12 {{ messages[0].content }}", [{"role": "user", "content": "at 0xFf"}]) == "at 0x12 at 0xFf"


def test_jinja2_with_known_escapes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.1.5")
    with pytest.raises(TokenizerError, match=r"jinja2 3\.1\.5: .* expected at least 3\.1\.6"):
        rendered("x")


TEXT = {"type": "text", "text": "hi"}


def called(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(10_000), [])
BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages: [], expected at least one"),
    ("hi", "messages: 'hi', expected a list"),
    ({"role": "user"}, "messages: {'role': 'user'}, expected a list"),
    (["hi"], "messages[0]: 'hi', expected an object"),
    ([{"role": "user"}], "messages[0].content: None, expected a string"),
    ([{"content": "x"}], "messages[0].role: None, expected a string"),
    ([{"role": "user", "content": [TEXT, {"type": "text"}]}], "messages[0].content[1]: {'type': 'text'}"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]: {'type': 'image_url'}"),
    ([TALK[0], {"role": "user", "content": 3}], "messages[1].content: 3, expected a string"),
    ([{"role": "user", "content": "x", "name": {1, 2}}], "messages[0].name: {1, 2}, expected values of JSON"),
    ([{"role": "user", "content": "x", "score": float("nan")}], "messages[0].score: nan, expected values of JSON"),
    ([{"role": "user", "content": "x", 3: {4}}], "messages[0].3: {4}, expected values of JSON"),
    ([{"role": "user", "content": "", "x": DEEP}], "messages[0].x: ... expected values of JSON"),
    ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls: 'f', expected a list"),
    ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]: {}, expected a function"),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content: '\\ud800', expected values of JSON, in valid Un"),
    ([called("[1]")], "messages[0].tool_calls[0].function.arguments: a JSON array, expected an object"),
    ([called('{"a": 1, "a": 2}')], "messages[0].tool_calls[0].function.arguments: the key 'a' stands twice"),
    ([called("{")], "messages[0].tool_calls[0].function.arguments: not JSON"),
    ([called("\ud800")], "messages[0].tool_calls: [{'function':"),
    ([called(3)], "messages[0].tool_calls[0].function.arguments: 3, expected an object"),
    ([{"role": "assistant", "content": "x", "reasoning": 1}], "messages[0].reasoning_content: 1, expected a string"),
]


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools: {}, expected a list"),
    ({"tools": "f"}, "tools: 'f', expected a list"),
    ({"tools": [{}, 3]}, "tools[1]: 3, expected an object"),
    ({"tools": [{"name": print}]}, "tools[0].name: <built-in function print>, expected values of JSON"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs: [1], expected an object"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "expected one of them"),
]
BAD_PROMPTS: list[tuple[Any, dict[str, Any], str]] = [(messages, {}, text) for messages, text in BAD_MESSAGES]
BAD_PROMPTS += [(TALK, options, text) for options, text in BAD_OPTIONS]


@pytest.mark.parametrize(("messages", "options", "fragment"), BAD_PROMPTS)
def test_a_bad_message_tool_or_option_is_named(messages: Any, options: dict[str, Any], fragment: str) -> None:
    """In less than 300 characters."""
    pattern = ".*".join(map(re.escape, fragment.split("... ")))
    with pytest.raises(RequestError, match=rf"^(?=.{{,299}}\Z).*{pattern}"):
        rendered(PLAIN_TEMPLATE, messages, **options)


def test_the_callers_messages_and_tools_stay_as_they_are() -> None:
    messages, tools = [{"role": "user", "content": [dict(TEXT)]}, called("{}")], [{"name": "f"}]
    before = json.dumps([messages, tools])
    rendered("{{ messages | tojson }}", messages[::-1], tools=tools, continue_final_message=True)
    assert json.dumps([messages, tools]) == before


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    for template in ("{{ bos_token }}", "{{ messages[0].content | lower }}"):
        with pytest.raises(TokenizerError, match="leaves out the message that is to be continued"):
            rendered(template, TALK[-1:], continue_final_message=True)
    with pytest.raises(RequestError, match=r"messages\[0\]\.content: None, expected a text to continue"):
        rendered(PLAIN_TEMPLATE, [called("{}")], continue_final_message=True)


def test_the_built_in_layout_has_neither_tools_nor_calls() -> None:
    plain = Chat(None, {"bos_token": "<s>"}, "built-in")
    with pytest.raises(RequestError, match="built-in: tools and options of a prompt: expected a chat template"):
        render_chat(plain, TALK, [{"name": "f"}])
    with pytest.raises(RequestError, match=r"messages\[0\]: .*expected a text without calls"):
        render_chat(plain, [called("{}")])


def test_the_jinja_file_wins_over_the_tokenizer_config(tmp_path: Path) -> None:
    assert render_chat(load_chat(tmp_path, "<s>"), TALK) == LAID_OUT  # without a template: built in
    settings = {"chat_template": "old", "bos_token": {"content": "<b>"}, "add_bos_token": True, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_chat(tmp_path, "<s>") == Chat("old", {"bos_token": "<b>"}, str(tmp_path / "tokenizer_config.json"))
    (tmp_path / "chat_template.jinja").write_text("new {{ bos_token }}")
    assert render_chat(load_chat(tmp_path, "<s>"), TALK) == "new <b>"


SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
BAD_FILES = [
    (SETTINGS, b'{"chat_template": 3}', "chat_template: 3"),
    (SETTINGS, b'{"chat_template": [{"name": "default", "template": "d"}]}', "chat_template: [{'name': 'default'"),
    (SETTINGS, b'{"chat_template": "%s"}' % (b"x" * (2**20 + 1)), "expected a string of at most 1048576 characters"),
    (SETTINGS, b'{"bos_token": 3}', "'bos_token': 3, expected a string"),
    (SETTINGS, b'{"bos_token": {"text": "x"}}', "expected a string or an object with content"),
    (TEMPLATE, b"\xff", ""),
    (TEMPLATE, b" " * (2**20 + 1), ""),
]


@pytest.mark.parametrize(("name", "content", "fragment"), BAD_FILES)
def test_bad_chat_settings_are_refused_by_the_name_of_their_file(
    tmp_path: Path, name: str, content: bytes, fragment: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"^{path}: .*{re.escape(fragment)}"):
        load_chat(tmp_path, "")


def test_without_jinja2_the_built_in_layout_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.warns(UserWarning, match="install the extra `chat`"):
        assert rendered("something else") == LAID_OUT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert render_chat(Chat(None, {"bos_token": "<s>"}, "built-in"), TALK) == LAID_OUT


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, PLAIN_TEMPLATE.removeprefix("{{- bos_token -}}"), None])
def test_a_chat_begins_with_exactly_one_bos(tmp_path: Path, template: str | None) -> None:
    write_tokenizer(tmp_path, template)
    tokenizer = load_tokenizer(tmp_path, tiny_config())
    ids = tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert ids[:2] == [1, 3]
    assert ids.count(1) == 1
    assert tokenizer.decode(ids) == "user\na\nassistant\n"


def test_a_template_that_writes_the_bos_twice_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "{{ bos_token }}" + PLAIN_TEMPLATE)
    with pytest.raises(TokenizerError, match="begins with two BOS tokens, expected one"):
        load_tokenizer(tmp_path, tiny_config()).encode_chat(TALK)
