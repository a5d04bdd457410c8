"""A list of tool calls as LFM2 writes it, read and written: Python's spelling, or JSON's.

    [get_weather(city="Paris", days=3), maps.route(via=("Lyon", None))]
    [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]

docs/engine/19-chats.md is the grammar, with its sources and with what engines dispute. Nothing is evaluated. Python's
`ast` parses, and sees every name and value spelled anew, never the text itself: `from=1`, `07` and raw newlines it
would refuse, and a long chain of operators, calls or brackets would end the process.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.errors import RequestError

MAX_DEPTH = 64  # brackets within brackets; schemas of tools in use have fewer than ten
CONSTANTS = {"True": "True", "true": "True", "False": "False", "false": "False", "None": "None", "null": "None"}
SPACE = " \t\r\n\f"
ESCAPES = frozenset("\\'\"abfnrtvxuUN01234567\n")  # what may follow a backslash in a Python string
SPELLED = {"\n": "\\n", "\r": "\\r", "\0": "\\0", '"': '\\"', "\\": "\\\\"}  # any other letter stands for itself


@dataclass(frozen=True)
class ToolCall:
    """One call: the function's name, and its arguments, values of JSON by name."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_json(self) -> str:
        """What clients get: a JSON object, as text."""
        return json.dumps(self.arguments, ensure_ascii=False, allow_nan=False)


def read_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls of a list, in its order; a single one may stand without brackets. ValueError for any other text."""
    try:
        is_json = text.lstrip().lstrip("[").lstrip().startswith("{")
        calls = tuple(_from_json(text) if is_json else _from_python(text))
        for call in calls:
            call.arguments_json.encode()  # no infinity, no lone surrogate, no integer of thousands of digits
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        raise ValueError(" ".join(str(problem).split())[:150] or type(problem).__name__) from None
    if not calls:
        raise ValueError("expected at least one call")
    return calls


def write_calls(calls: Sequence[ToolCall]) -> str:
    """The list as LFM2.5's templates write it into the history: strings in single quotes, containers as JSON.

    RequestError for calls that could not be read again: of another name, or with values that JSON has not.
    """
    try:
        listed = [", ".join(f"{name}={_literal(value)}" for name, value in call.arguments.items()) for call in calls]
        text = f"[{', '.join(f'{call.name}({arguments})' for call, arguments in zip(calls, listed, strict=True))}]"
        if not calls or read_calls(text) == tuple(calls):
            return text
    except (AttributeError, TypeError, ValueError, RecursionError):
        pass
    raise RequestError("tool_calls: expected names of functions, and arguments by name with values of JSON")


def _literal(value: Any) -> str:
    if isinstance(value, str):
        for letter, escape in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
            value = value.replace(letter, escape)
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | Mapping) else str(value)


def _from_json(text: str) -> Iterator[ToolCall]:
    """Objects with name and arguments (or parameters), or OpenAI's with these under `function`."""
    # A raw newline in a string is one, as in Python's spelling.
    value = json.loads(text, strict=False, object_pairs_hook=_once)
    for entry in value if isinstance(value, list) else [value]:
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        name, arguments = None, None
        if isinstance(function, dict):
            name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
            raise ValueError("expected objects with name and arguments")
        yield ToolCall(name, arguments or {})


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(values := dict(pairs)) < len(pairs):
        raise ValueError("expected one value for each name")
    return values


def _from_python(text: str) -> Iterator[ToolCall]:
    names: list[str] = []
    whole = ast.parse(" ".join(("(", *_spelled_anew(text, names), "\n)")), mode="eval").body
    for node in whole.elts if isinstance(whole, ast.List) else [whole]:
        if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name):
            raise ValueError("expected a list of calls whose arguments have names")
        arguments = {names[int(str(each.arg)[1:])]: _value(each.value) for each in node.keywords}
        if len(arguments) < len(node.keywords):
            raise ValueError("expected one value for each argument")
        yield ToolCall(names[int(node.func.id[1:])], arguments)


def _value(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # two halves of a letter, as JSON escapes it
        return node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) for key in node.keys]
        if not any(isinstance(key, list | dict) for key in keys):
            texts = [key if isinstance(key, str) else json.dumps(key) for key in keys]
            return dict(zip(texts, map(_value, node.values), strict=True))
    raise ValueError("expected values of JSON")


def _spelled_anew(text: str, names: list[str]) -> Iterator[str]:
    """The tokens for `ast`: names become c0(, a1= and so on, values safe literals. Two values never follow each other,
    but strings, nor does a bracket follow a value: so nothing nests but brackets, which are counted."""
    index, depth, last = 0, 0, "("
    while (index := _skip(text, index)) < len(text):
        letter = text[index]
        if letter in "([{)]},:":
            token, index = letter, index + 1
        elif letter in "'\"":
            token, index = _string(text, index)
        else:
            token, index = _word(text, index, names)
        if token not in ")]},:" and last not in "([{,:=" and not token[0] == last == '"':
            raise ValueError(f"{letter!r}: expected a comma or a closing bracket")
        last = token[-1]
        depth += (last in "([{") - (token in ")]}")
        if depth > MAX_DEPTH:
            raise ValueError(f"expected at most {MAX_DEPTH} brackets within brackets")
        yield token


def _skip(text: str, index: int) -> int:
    while index < len(text) and text[index] in SPACE:
        index += 1
    return index


def _word(text: str, start: int, names: list[str]) -> tuple[str, int]:
    """A function's or argument's name, a constant or a number, spelled for `ast`; and the place behind it."""
    signed = text[start] in "+-"
    begin = end = _skip(text, start + 1) if signed else start
    is_number = text[begin : begin + 2].lstrip(".")[:1].isdigit()
    while end < len(text) and (text[end].isalnum() or text[end] in "_.-$@"):
        end += 1 + (is_number and text[end] in "eE" and text[end + 1 : end + 2] == "+")
    word, following = text[begin:end], _skip(text, end)
    if is_number:
        return ("-" if text[start] == "-" else "") + repr(_number(word)), end
    if not signed and all(word.split(".")) and word[0] != "-":
        for opening, kind in (("(", "c"), ("=", "a")):
            if text.startswith(opening, following):
                names.append(word)
                return f"{kind}{len(names) - 1}{opening}", following + 1
        if word in CONSTANTS:
            return CONSTANTS[word], end
    raise ValueError(f"{text[start : end + 1][:20]!r}: expected a name or a value")


def _number(word: str) -> int | float:
    word.encode("ascii")
    if word.replace("_", "").isdigit():
        return int(word)  # also 07, which Python refuses
    return int(word, 0) if word[:2].lower() in ("0x", "0o", "0b") else float(word)


def _string(text: str, start: int) -> tuple[str, int]:
    """The literal that begins here, by Python's escapes but for raw newlines; and the place behind it."""
    quote = text[start] * (3 if text.startswith(text[start] * 3, start) else 1)
    index, tokens = start + len(quote), ['"']
    while index < len(text) and not text.startswith(quote, index):
        pair, octal = text[index : index + 2], text[index + 1 : index + 4]
        escape = pair[0] == "\\" and pair[-1] in ESCAPES and len(pair) == 2
        if escape and pair[1] in "4567" and len(octal) == 3 and not octal.strip("01234567"):
            raise ValueError(f"\\{octal}: expected an octal escape of at most \\377")
        tokens.append(pair if escape else SPELLED.get(pair[0], pair[0]))
        index += 2 if escape else 1
    if index >= len(text):
        raise ValueError("a string that does not end")
    return "".join([*tokens, '"']), index + len(quote)
