"""The grammar of docs/engine/19-chats.md again, by descent and regular expressions: nothing shared with the parser."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

MAX_DEPTH = 64
TOKEN = re.compile(
    r"""[ \t\r\n\f]*(?:(?P<string>'{3}(?:\\.|[^\\])*?'{3}|"{3}(?:\\.|[^\\])*?"{3}
        |'(?!'')(?:\\.|[^\\'])*'|"(?!"")(?:\\.|[^\\"])*")
    |(?P<sign>[+-])[ \t\r\n\f]*(?=[.\d])|(?P<word>(?:[.0-9](?:[\w.$@-]|(?<=[eE])\+)*|[\w$@][\w.$@-]*))
    |(?P<mark>[()\[\]{},:=])|(?P<end>\Z))""",
    re.VERBOSE | re.DOTALL,
)
DIGITS = r"[0-9](?:_?[0-9])*"
NUMBER = re.compile(rf"(?:{DIGITS}\.?(?:{DIGITS})?|\.{DIGITS})(?:[eE][+-]?{DIGITS})?")
BASED = re.compile(r"0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+")
ESCAPE = re.compile(
    r"\\(\n|[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|[0-7]{1,3}|[xuUN])", re.DOTALL
)
LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}


def read(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments; ValueError for what is no list of calls in Python's spelling."""
    calls = Descent(text).calls()
    for _, arguments in calls:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    if not calls:
        raise ValueError("no calls")
    return calls


class Descent:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth, self.kind, self.token = text, 0, 0, "", ""
        self.advance()

    def advance(self) -> None:
        match = TOKEN.match(self.text, self.at)
        if match is None or match.lastgroup is None:
            raise ValueError("no token")
        self.at, self.kind, self.token = match.end(), match.lastgroup, match[match.lastgroup]

    def take(self, mark: str) -> bool:
        if self.kind == "mark" and self.token == mark:
            self.advance()
            return True
        return False

    def expect(self, holds: bool) -> None:
        if not holds:
            raise ValueError(f"at {self.at}: {self.token!r}")

    def inside(self, closing: str, element: Any) -> tuple[list[Any], bool]:
        """Elements with commas between them up to the closing bracket; and whether the last had a comma."""
        self.depth += 1
        self.expect(self.depth <= MAX_DEPTH)
        elements, comma = [], False
        while not self.take(closing):
            self.expect(not elements or comma)
            elements.append(element())
            comma = self.take(",")
        self.depth -= 1
        return elements, comma

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        if self.take("["):
            calls = self.inside("]", self.call)[0]
        elif self.take("("):  # Python's parentheses change nothing
            calls = self.calls_in_parentheses()
        else:
            calls = [self.call()]
        self.expect(self.kind == "end" or self.depth > 0)
        return calls

    def calls_in_parentheses(self) -> list[tuple[str, dict[str, Any]]]:
        self.depth += 1
        self.expect(self.depth <= MAX_DEPTH)
        calls = self.calls()
        self.expect(self.take(")"))
        self.depth -= 1
        return calls

    def call(self) -> tuple[str, dict[str, Any]]:
        if self.take("("):
            self.depth += 1
            call = self.call()
            self.depth -= 1
            self.expect(self.take(")"))
            return call
        name = self.name()
        self.expect(self.take("("))
        arguments: dict[str, Any] = {}

        def argument() -> None:
            key = self.name()
            self.expect(self.take("=") and key not in arguments)
            arguments[key] = self.value()

        self.inside(")", argument)
        return name, arguments

    def name(self) -> str:
        word = self.token
        self.expect(self.kind == "word" and all(word.split(".")) and not re.match("[0-9.]", word))
        self.advance()
        return word

    def value(self) -> Any:
        if self.kind == "string":
            text = ""
            while self.kind == "string":
                text += plain(self.token[3:-3] if self.token[:3] in ("'''", '"""') else self.token[1:-1])
                self.advance()
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        if self.kind in ("sign", "word"):
            sign = self.token if self.kind == "sign" else ""
            if sign:
                self.advance()
            word = self.token
            self.expect(self.kind == "word")
            self.advance()
            constants = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
            if word in constants and not sign:
                return constants[word]
            return -number(word) if sign == "-" else number(word)
        if self.take("["):
            return self.inside("]", self.value)[0]
        if self.take("("):
            elements, comma = self.inside(")", self.value)
            return elements[0] if len(elements) == 1 and not comma else elements
        self.expect(self.take("{"))
        pairs = self.inside("}", self.pair)[0]
        self.expect(len({len(pair) for pair in pairs}) < 2)
        if pairs and len(pairs[0]) == 1:
            return [value for (value,) in pairs]
        return dict(pairs)

    def pair(self) -> tuple[Any, ...]:
        first = self.value()
        if not self.take(":"):
            return (first,)
        self.expect(not isinstance(first, list | dict))
        return (first if isinstance(first, str) else json.dumps(first, allow_nan=False), self.value())


def number(word: str) -> int | float:
    if re.fullmatch(DIGITS, word):
        return int(word.replace("_", ""))
    if BASED.fullmatch(word):
        return int(word.replace("_", ""), {"x": 16, "o": 8, "b": 2}[word[1].lower()])
    if not NUMBER.fullmatch(word):
        raise ValueError(f"{word!r} is no number")
    return float(word.replace("_", ""))


def plain(body: str) -> str:
    def letter(match: re.Match[str]) -> str:
        escape = match[1]
        if escape in ("x", "u", "U", "N"):
            raise ValueError(f"{escape!r} without its digits")
        if escape[0] in "xuU":
            return chr(int(escape[1:], 16))
        if escape[0] == "N":
            try:
                return unicodedata.lookup(escape[2:-1])
            except KeyError:
                raise ValueError(escape) from None
        if escape[0] in "01234567":
            if int(escape, 8) > 0o377:
                raise ValueError(escape)
            return chr(int(escape, 8))
        return LETTERS.get(escape, escape)

    return ESCAPE.sub(letter, body)
