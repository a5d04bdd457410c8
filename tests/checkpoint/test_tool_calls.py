"""Lists of calls: against a second reading of the grammar, on drawn lists; and what is no list, whatever its size."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import second_reading

from lfm2np.checkpoint.text.replies import Message, render_reply
from lfm2np.checkpoint.text.tool_calls import ToolCall, read_calls, write_calls
from lfm2np.errors import RequestError

NAMES = ("f", "get_weather", "a.b", "from", "class", "None_", "max-results", "$filter", "größe", "_1", "Straße.ß")
WORDS = ["", "a", "it's", 'say "hi"', "]", ")", "[x](y)", "a, b", "\\", "end\\"]
WORDS += ["\n", "é😀", "<|im_end|>", "x=1", "\t\0", "#"]
NUMBERS = ["0", "7", "07", "1_000", "0x1F", "-74.0046539", "+7", "1e5", "1E-5", "2.e+3"]
NUMBERS += [".5", "- 3", "00", "1__0", "1e999"]
ESCAPES = [r"\u00e9", r"\ud83d\ude00", r"\x41", r"\101", r"\N{BULLET}", r"\d", r"\/"]
ESCAPES += ["\\\n", r"\400", r"\x4", r"\ud800"]
CONSTANTS = ("True", "False", "None", "true", "false", "null", "nan", "Infinity", "yes", "...")
NOISE = "()[]{},:='\"\\ \n+-.e0x1azN_#*&|;\ud800"


def spelled_string(draw: random.Random) -> str:
    text = draw.choice(WORDS) + draw.choice(WORDS)
    quote = draw.choice(["'", '"', "'''", '"""'])
    written = text.replace("\\", "\\\\") if draw.random() < 0.9 else text
    for letter in (quote[0], *(("\n", "\0") if draw.random() < 0.5 else ())):
        written = written.replace(letter, {"\n": "\\n", "\0": "\\x00"}.get(letter, f"\\{letter}"))
    return quote + written + (draw.choice(ESCAPES) if draw.random() < 0.2 else "") + quote


def spelled_value(draw: random.Random, depth: int = 3) -> str:
    kind = draw.randrange(6 if depth else 3)
    if kind == 0:
        return " ".join(spelled_string(draw) for _ in range(1 if draw.random() < 0.9 else 2))
    if kind < 3:
        return draw.choice(NUMBERS if kind == 1 else CONSTANTS)
    inner = [spelled_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == 5 and draw.random() < 0.8:
        inner = [f"{spelled_string(draw) if draw.random() < 0.8 else draw.choice(NUMBERS)}: {value}" for value in inner]
    comma = "," if inner and draw.random() < 0.2 else ""
    return {3: "[%s]", 4: "(%s)", 5: "{%s}"}[kind] % (", ".join(inner) + comma)


def spelled_list(draw: random.Random) -> str:
    calls = []
    for _ in range(draw.choice((1, 1, 1, 2, 3, 0))):
        arguments = [f"{draw.choice(NAMES)}={spelled_value(draw)}" for _ in range(draw.randrange(4))]
        calls.append(f"{draw.choice(NAMES)}({', '.join(arguments)})")
    text = f"[{', '.join(calls)}]" if draw.random() < 0.9 else ", ".join(calls)
    for _ in range(draw.choice((0, 0, 0, 1, 2))):  # a letter that is lost, doubled or wrong
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice([*NOISE, ""]) + text[at + draw.randrange(2) :]
    return draw.choice(("", " ", "\n")) + text


def both(text: str) -> tuple[str, str]:
    """What each reading says; numbers, truth values and nulls as JSON spells them."""
    readings = []
    for reading in (lambda: [(c.name, c.arguments) for c in read_calls(text)], lambda: second_reading.read(text)):
        try:
            readings.append(json.dumps(reading()))
        except ValueError:
            readings.append("none")
    return readings[0], readings[1]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(1000, 11000), marks=pytest.mark.night)])
def test_a_second_reading_agrees(seeds: range):
    read = 0
    for seed in seeds:
        text = spelled_list(random.Random(seed))
        ours, theirs = both(text)
        assert ours == theirs, repr(text)
        read += ours != "none"
    assert 0.2 < read / len(seeds) < 0.8


OF_JSON = {
    '[{"name": "f", "arguments": {"a": "x\ny", "b": [1, null, {"c": true}]}}]': [
        ("f", {"a": "x\ny", "b": [1, None, {"c": True}]})
    ],
    '{"name": "f", "parameters": {}}': [("f", {})],
    ' [ {"type": "function", "function": {"name": "f"}} , {"name": "g", "arguments": null}]': [("f", {}), ("g", {})],
}
NOT_OF_JSON = (
    *('[{"name": "f", "arguments": "{}"}]', '[{"name": 1}]', '[{"function": 3}]', "[{}]", '[{"name": "f"}', '["f"]'),
    *("{1: 2}", '[{"name": "f", "arguments": {"a": NaN}}]', '[{"name": "f", "arguments": {"a": "\\ud800"}}]'),
    *('[[{"name": "f"}]]', '{"name": "", "arguments": {}}', '{"name": "f", "arguments": {"a": 1, "a": 2}}'),
)


@pytest.mark.parametrize("text", [*OF_JSON, *NOT_OF_JSON, "f(a=1, a=2)"])
def test_the_form_of_json_is_read_so_too(text: str):
    if text in OF_JSON:
        assert [(call.name, call.arguments) for call in read_calls(text)] == OF_JSON[text]
    else:
        with pytest.raises(ValueError, match=r"\S"):
            read_calls(text)


def test_what_is_written_is_read():
    for seed in range(100):
        try:
            calls = read_calls(spelled_list(random.Random(seed)))
        except ValueError:
            continue
        assert read_calls(write_calls(calls)) == calls
    call = ToolCall("f", {"s": "a'b\\\n", "n": None, "l": [True, "x"]})
    assert write_calls((call,)) == r"""[f(s='a\'b\\\n', n=None, l=[true, "x"])]"""


HUGE = {
    "brackets": "[" * 10**6,
    "nesting": f"[f(a={'[' * 10**4}{']' * 10**4})]",
    "nesting of JSON": f'[{{"name": "f", "arguments": {{"a": {"[" * 10**4}{"]" * 10**4}}}}}]',
    "an open string": "[f(a='" + "\\'" * 10**5,
    "signs": f"[f(a={'-' * 10**5}1)]",
    "operators": f"[f(a=1{' - 1' * 10**5})]",
    "a long number": f"[f(a=1{'-1' * 10**5})]",
    "calls of calls": f"[f{'()' * 10**5}]",
    "indices": f"[f(a=b{'[0]' * 10**5})]",
    "attributes of a value": f"[f(a=''{'.a' * 10**5})]",
    "digits": f"[f(a={'1' * 10**5})]",
    "not": f"[f(a={'not ' * 10**5}1)]",
    "lambdas": f"[f(a={'lambda: ' * 10**5}1)]",
    "a program": "__import__('os').system('true')",
    "no text": "",
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_what_is_no_list_is_refused_in_one_line(text: str):
    """In some 0.2 s each; what must not happen takes minutes, or ends the process."""
    with pytest.raises(ValueError, match=r"\S") as refused:
        read_calls(text)
    assert "\n" not in str(refused.value) and 5 < len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "message",
    [
        None,
        "x",
        {"role": "assistant", "content": "x"},
        Message(content=None),  # type: ignore[arg-type]
        Message(tool_calls=(ToolCall("f(", {}),)),
        Message(tool_calls=(ToolCall("f", '{"a": 1}'),)),  # type: ignore[arg-type]
        *(Message(tool_calls=(ToolCall("f", {"a": bad}),)) for bad in (math.nan, {1, 2}, 10**5000, "\ud800")),
    ],
)
def test_what_could_not_be_read_again_is_not_written(message: Any) -> None:
    with pytest.raises(RequestError, match=r"message: |tool_calls: "):
        render_reply(message)
