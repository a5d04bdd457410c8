"""The suite for parsers: the reference passes, no copy of it with a fault does, and the cases are what is committed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

from lfm2np.checkpoint.text import replies, tool_calls
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.runner import profile
from lfm2np.suite.test_tool_parsers import CHATS, TOLD
from lfm2np.suite.tool_parsers.parsers import tokenizer
from lfm2np.suite.tool_parsers.properties import PROPERTIES, Reply, check_blanks, check_case, check_whole, cuts
from lfm2np.suite.tool_parsers.properties import replies as drawn_replies

pytestmark = pytest.mark.slow

TOP = Path(__file__).parent.parent.parent
sys.path.insert(0, str(TOP / "fixtures" / "tool_parsers"))
from adapt_lfm2np import FromIds, FromText  # noqa: E402

# name, where it was seen, what is replaced by what in tool_calls.py or replies.py; whether cases, properties catch it
FAULTS = (
    (
        "keywords are no names",
        "vLLM 48171",
        'and word[0] != "-":',
        'and word not in ("from", "class", "import"):',
        "cp",
    ),
    ("no points in names", "mlx-lm 1246", 'text[end] in "_.-$@"', 'text[end] in "_-$@"', "cp"),
    ("a raw newline ends the call", "vLLM 48171", 'SPELLED = {"\\n": "\\\\n", ', "SPELLED = {", "c"),
    ("a carriage return becomes a newline", "vLLM 48171", '"\\r": "\\\\r"', '"\\r": "\\\\n"', "c"),
    ("escapes stay as they are spelled", "llama.cpp 24667", "abfnrtvxuUN", "abfrtvxuUN", "cp"),
    (
        "a quote after a backslash ends the string",
        "llama.cpp 26658",
        'ESCAPES = frozenset("\\\\\'\\"',
        'ESCAPES = frozenset("\\\\',
        "cp",
    ),
    ("a backslash at the end escapes the quote", "vLLM 48171", "index += 2 if escape else 1", "index += 1", "cp"),
    ("negative numbers are refused", "vLLM 48171", 'text[start] in "+-"\n', 'text[start] == "+"\n', "cp"),
    ("negative numbers lose their sign", "mlx-lm 864", '"-" if text[start] == "-" else ""', '""', "cp"),
    ("a plus is refused", "SGLang 34237", 'text[start] in "+-"\n', 'text[start] == "-"\n', "c"),
    ("tuples are refused", "vLLM 48171", "ast.List | ast.Tuple | ast.Set", "ast.List | ast.Set", "c"),
    ("true is a string", "llama.cpp 24178", '"true": "True"', '"true": "\'true\'"', "cp"),
    ("null is refused", "mlx-lm 1246", ', "null": "None"}', "}", "cp"),
    (
        "a leading zero makes a float",
        "tabbyAPI 464",
        'if word.replace("_", "").isdigit():',
        'if word.isdigit() and word[0] != "0":',
        "c",
    ),
    ("numbers are whole", "vLLM 48171", "else float(word)", "else int(float(word))", "cp"),
    ("only the first call counts", "browser-ai 212", "in whole.elts if", "in whole.elts[:1] if", "cp"),
    (
        "arguments as Python shows them",
        "Rapid-MLX 552",
        "return json.dumps(self.arguments, ensure_ascii=False, allow_nan=False)",
        "return str(self.arguments)",
        "cp",
    ),
    ("only single quotes", "vLLM 39243", 'elif letter in "\'\\"":', 'elif letter == "\'":', "cp"),
    ("no triple quotes", "", "(3 if text.startswith(text[start] * 3, start) else 1)", "1", "c"),
    (
        "halves of a character",
        "llama.cpp 26658",
        'encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")',
        'encode("utf-8", "replace").decode()',
        "c",
    ),
    (
        "no blank after the marker",
        "vLLM 48171",
        "        is_json =",
        '        assert text[:1] != " "\n        is_json =',
        "c",
    ),
    (
        "nested values as text",
        "mlx-lm 1246",
        "return [_value(each) for each in node.elts]",
        "return [str(_value(each)) for each in node.elts]",
        "cp",
    ),
    ("markup leaks where a marker is cut", "Rapid-MLX 1592", "break  # the text ends within it", "at += 1", "p"),
    (
        "what comes with the marker is lost",
        "vLLM 39243",
        "self._plain(text[start:at])\n                self._marker",
        "self._marker",
        "cp",
    ),
    (
        "a bracket in prose is an error",
        "llama.cpp 24071",
        '        if self._state == "start" and text:\n',
        '        assert self._state == "calls" or "[" not in text\n        if self._state == "start" and text:\n',
        "cp",
    ),
    (
        "the end of turn shows",
        "little-coder 42",
        "CONTROL = (CALLS, END_CALLS, *ENDS,",
        "CONTROL = (CALLS, END_CALLS,",
        "c",
    ),
    (
        "an unfinished call is content",
        "Rapid-MLX 197",
        "Message(unfinished=ended, unparsed=(text,)",
        "Message(text, unfinished=ended",
        "p",
    ),
    ("an unfinished call is an error", "llama.cpp 23838", "except ValueError:\n", "except KeyError:\n", "p"),
    ("reasoning is content", "llama.cpp 23852", "else Message(reasoning=text)", "else Message(text)", "c"),
    (
        "reasoning never ends",
        "llama.cpp 24234",
        'elif marker == END_THINK and state == "reasoning":\n            self._state = "content"',
        'elif marker == END_THINK and state == "reasoning":\n            pass',
        "c",
    ),
    (
        "think opens reasoning anywhere",
        "LM Studio 1592",
        'if marker == THINK and state == "start":',
        "if marker == THINK:",
        "c",
    ),
    ("requests share a buffer", "Rapid-MLX 1571", "self._calls: list[str] = []", "self._calls = CONTROL_BUFFER", "p"),
    (
        "what was held back is lost at the end",
        "Rapid-MLX 197",
        '        self._plain(self._held)\n        self._held = ""',
        '        self._held = ""',
        "cp",
    ),
    (
        "characters are decoded token by token",
        "llama.cpp 26658",
        "self._take(self._decoder.decode(letters), self._thinking)",
        'self._take(letters.decode("utf-8", "replace"), self._thinking)',
        "cp",
    ),
    ("deltas come again", "llama.cpp 26658", "added, self._added = self._added, []", "added = list(self._added)", "cp"),
    (
        "blanks are stripped, streaming",
        "mlx-node 157",
        "        self._plain(text[start:at])\n        self._held",
        "        self._plain(text[start:at].strip())\n        self._held",
        "p",
    ),
)


def faulty(old: str, new: str) -> Iterator[type]:
    """The adapters of a copy of the parser with the fault: from text, and from ids."""
    sources = {module: Path(str(module.__file__)).read_text(encoding="utf-8") for module in (tool_calls, replies)}
    assert sum(source.count(old) for source in sources.values()) == 1, old
    spaces: list[dict[str, Any]] = []
    for module, source in sources.items():
        space = {"__name__": module.__name__, "CONTROL_BUFFER": []}
        exec(compile(source.replace(old, new), str(module.__file__), "exec"), space)
        spaces.append(space)
    spaces[1]["read_calls"] = spaces[0]["read_calls"]

    for adapter in (FromText, FromIds):

        class Faulty(adapter):  # type: ignore[misc, valid-type]
            def __init__(self, tools: list[dict[str, Any]]) -> None:
                super().__init__(tools)
                self.stream = spaces[1]["ReplyStream"](tokenizer())

        yield Faulty


def caught(check: Callable[[], None]) -> bool:
    try:
        check()
    except Exception:
        return True
    return False


def caught_by_properties(factory: Any) -> bool:
    def fails(check: Any) -> bool:
        @profile("quick", 30.0, shrink=False)
        @given(drawn_replies, cuts)
        def test(reply: Any, cuts: list[int]) -> None:
            check(factory, reply, cuts)

        return caught(test)

    return any(fails(check) for _, check in PROPERTIES.values())


BY_NAME = {fault[0]: fault for fault in FAULTS}


@pytest.mark.parametrize("name", [name for name, fault in BY_NAME.items() if "c" in fault[4]])
def test_the_cases_catch_a_fault(name: str) -> None:
    _, _, old, new, _ = BY_NAME[name]
    told = [(factory, case) for factory in faulty(old, new) for _, case in TOLD.values()]
    assert any(caught(lambda factory=factory, case=case: check_case(factory, case)) for factory, case in told)  # type: ignore[misc]


@pytest.mark.night
@pytest.mark.parametrize("name", [name for name, fault in BY_NAME.items() if "p" in fault[4]])
def test_the_properties_catch_a_fault(name: str) -> None:
    _, _, old, new, _ = BY_NAME[name]
    assert any(caught_by_properties(factory) for factory in faulty(old, new))


def test_the_reference_passes_the_cases() -> None:
    for factory in faulty("Nothing is evaluated.", "Nothing is evaluated."):
        for _, case in TOLD.values():
            check_case(factory, case)


def returning(whole: Any, deltas: Any) -> Any:
    parser = SimpleNamespace(whole=lambda text, ids: whole, feed=lambda text, ids: deltas, finish=lambda: ())
    return lambda tools: parser


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        (returning(None, ()), "a delta None, expected a dict"),
        (returning({"tool_calls": [{"name": "f", "arguments": {"a": 1}}]}, ()), "arguments of 'f': {'a': 1}, expected"),
        (returning({"content": "Hi."}, None), "feed returned None, expected an iterable of dicts"),
        (returning({"content": "Hi."}, {"content": "Hi."}), "feed returned {'content': 'Hi.'}, expected an iterable"),
    ],
)
def test_a_parser_of_another_form_is_told_what_is_expected(factory: Any, told: str) -> None:
    reply = Reply("Hi.", (), in_python=True)
    with pytest.raises(Violation, match=re.escape(told)):
        check_whole(factory, reply, [])
        check_blanks(factory, reply, [])


@pytest.mark.night
def test_the_reference_passes_the_properties() -> None:
    assert not any(
        caught_by_properties(factory) for factory in faulty("Nothing is evaluated.", "Nothing is evaluated.")
    )


def test_the_cases_are_what_the_script_writes() -> None:
    subprocess.run([sys.executable, TOP / "fixtures" / "make_chats.py", "--check"], check=True, capture_output=True)


def test_the_cases_fit_their_schema_and_their_disputes_the_page() -> None:
    schema = json.loads((TOP / "lfm2np/oracle/schemas/chats.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    assert [error.message for error in Draft202012Validator(schema).iter_errors(CHATS)] == []
    assert [error.message for error in Draft202012Validator(schema).iter_errors({**CHATS, "cases": []})]
    page = (TOP / "docs" / "engine" / "19-chats.md").read_text(encoding="utf-8")
    disputes = {case["disputed"] for case in CHATS["cases"]} - {None}
    assert {dispute for dispute in disputes if f"`{dispute}`" not in page} == set()
    assert len({case["id"] for case in CHATS["cases"]}) == len(CHATS["cases"])
