"""What a parser does with any reply: text, then a list of calls or none, drawn and cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lfm2np.checkpoint.text.replies import CALLS, END_CALLS, ENDS
from lfm2np.checkpoint.text.tool_calls import ToolCall, write_calls
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.runner import profile
from lfm2np.suite.tool_parsers.parsers import Delta, Factory, Seen, pieces_of, tokenizer

NAMES, PARAMETERS = ("f", "get_weather", "Calendar.create_event"), ("a", "city", "from")


def tools_of(names: Iterable[str], parameters: Iterable[str]) -> list[dict[str, Any]]:
    """As a request has them; an argument may be anything."""
    schema = {"type": "object", "properties": {name: {} for name in parameters}}
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]


TOOLS = tools_of(NAMES, PARAMETERS)
WORDS = ("a ", "[1]", "[", "]", "(x)", '"', "'", "it's", "\n", "[f(a=1)]", "{", "x = [y[0]]", "é😀", "<", "<|", "\\")

VALUES: tuple[Any, ...] = (
    *("", "it's", 'say "hi"', "a\nb", "])", "\\", "x\\n", "é😀", None, True, False, 0, -7, 10**12, 0.5, -74.0046539),
    *([], {}, [True, None], [["]"], {"it's": False}], {"a": [0.5, 'x"y']}, {'"': None, "\n": "\\"}),
)


@dataclass(frozen=True)
class Reply:
    content: str
    calls: tuple[ToolCall, ...]
    in_python: bool  # the values in Python's spelling; else as the templates write them

    def text(self) -> str:
        written = write_calls(self.calls)
        if self.in_python:
            listed = [", ".join(f"{name}={value!r}" for name, value in call.arguments.items()) for call in self.calls]
            written = f"[{', '.join(f'{c.name}({each})' for c, each in zip(self.calls, listed, strict=True))}]"
        return self.content + (f"{CALLS}{written}{END_CALLS}" if self.calls else "")

    def seen(self) -> Seen:
        return Seen(self.content, "", [(call.name, call.arguments_json) for call in self.calls])


prose = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)
values = st.sampled_from(VALUES) | st.lists(st.sampled_from((*WORDS, "\\n", ", ", "=", ")]"))).map("".join)
arguments = st.fixed_dictionaries({}, optional=dict.fromkeys(PARAMETERS, values))
calls = st.builds(ToolCall, st.sampled_from(NAMES), arguments)
replies = st.builds(Reply, prose, st.lists(calls, max_size=3).map(tuple), st.booleans())
cuts = st.lists(st.integers(0, 100), max_size=6)

WEIGHT = 15.0  # examples are small

Pieces = Sequence[tuple[str, Sequence[int]]]
Check = Callable[[Factory, Reply, list[int]], None]


def pieces(text: str) -> Pieces:
    ids = tokenizer().encode_more(text)
    return [(piece, [token_id]) for piece, token_id in zip(pieces_of(ids), ids, strict=True)]


def grouped(pieces: Pieces, cuts: Sequence[int]) -> Pieces:
    edges = sorted({0, len(pieces), *(cut % (len(pieces) + 1) for cut in cuts)})
    groups = [pieces[a:b] for a, b in itertools.pairwise(edges)]
    return [("".join(text for text, _ in group), [i for _, ids in group for i in ids]) for group in groups]


def whole(factory: Factory, pieces: Pieces, tools: list[dict[str, Any]] = TOOLS) -> Seen:
    seen = Seen()
    for text, ids in grouped(pieces, ()) or [("", ())]:
        seen.add(factory(tools).whole(text, ids))
    return seen


def streamed(factory: Factory, *replies: Pieces, tools: list[dict[str, Any]] = TOOLS) -> list[Seen]:
    """Each by a parser of its own, a piece of each in turn."""
    parsers = [(factory(tools), Seen()) for _ in replies]
    for turn in itertools.zip_longest(*replies):
        for (parser, seen), piece in zip(parsers, turn, strict=True):
            for delta in deltas("feed", parser.feed(*piece)) if piece is not None else ():
                seen.add(delta)
    for parser, seen in parsers:
        for delta in deltas("finish", parser.finish()):
            seen.add(delta)
    return [seen for _, seen in parsers]


def deltas(method: str, returned: Any) -> Iterable[Delta]:
    if not isinstance(returned, Iterable) or isinstance(returned, Mapping | str):
        raise Violation(f"{method} returned {returned!r}, expected an iterable of dicts")
    return returned


def equal(got: Any, expected: Any, pieces: Pieces) -> None:
    if got != expected:
        raise Violation(f"of {[text for text, _ in pieces]}\n     got {got}\nexpected {expected}")


def check_whole(factory: Factory, reply: Reply, cuts: list[int]) -> None:
    parts = pieces(reply.text())
    equal(whole(factory, parts).meaning(), reply.seen().meaning(), parts)


def streams_right(cut: Callable[[str, list[int]], Pieces]) -> Check:
    def check(factory: Factory, reply: Reply, cuts: list[int]) -> None:
        parts = cut(reply.text(), cuts)
        equal(streamed(factory, parts)[0].meaning(), reply.seen().meaning(), parts)

    return check


def check_blanks(factory: Factory, reply: Reply, cuts: list[int]) -> None:
    parts = pieces(reply.text())
    equal(streamed(factory, parts)[0].content, whole(factory, parts).content, parts)


def check_two(factory: Factory, reply: Reply, cuts: list[int]) -> None:
    other = Reply("Another, [2]. ", (ToolCall("get_weather", {"city": "it's Oslo"}),), True)
    both = [pieces(each.text()) for each in (reply, other)]
    for seen, parts in zip(streamed(factory, *both), both, strict=True):
        equal(seen, streamed(factory, parts)[0], parts)


def check_cut_short(factory: Factory, reply: Reply, cuts: list[int]) -> None:
    parts = pieces(reply.text())[: (cuts or [5])[0]]
    before = "".join(text for text, _ in parts).partition(CALLS)[0]
    for seen in (whole(factory, parts), *streamed(factory, parts)):
        content = seen.content if seen.calls else seen.content.partition(CALLS)[0]  # the rest as it is: disputed
        equal("".join(content.split()).rstrip("\ufffd"), "".join(before.split()), parts)
        equal([name for name, _ in seen.calls], [call.name for call in reply.calls][: len(seen.calls)], parts)


PROPERTIES: dict[str, tuple[str, Check]] = {
    "whole": ("Content and calls of a whole reply are what was written.", check_whole),
    "tokens": ("So they are token by token.", streams_right(lambda text, cuts: pieces(text))),
    "groups": ("So they are, several tokens at once.", streams_right(lambda text, cuts: grouped(pieces(text), cuts))),
    "letters": (
        "So they are where the text is cut anywhere, within markers and escapes too.",
        streams_right(lambda text, cuts: grouped([(letter, ()) for letter in text], cuts)),
    ),
    "blanks": ("Whole and streamed, content has the same blanks.", check_blanks),
    "two-at-once": ("Of two replies that come at the same time, each is as if it came alone.", check_two),
    "cut-short": (
        "Of a reply that ends anywhere, what came before the list is content; no call is new.",
        check_cut_short,
    ),
}


def draw(check: Check, factory: Factory, name: str) -> None:
    """Holds the property against replies drawn under the profile; raises for the smallest that breaks it."""
    has_markers = "markers" not in getattr(factory, "lacks", ())

    @profile(name, WEIGHT)
    @given(replies if has_markers else replies.filter(lambda reply: "[" not in reply.content), cuts)
    def drawn(reply: Reply, cuts: list[int]) -> None:
        check(factory, reply, cuts)

    drawn()


def check_case(factory: Factory, case: dict[str, Any]) -> None:
    """A case of chats.json, whole and by its pieces: of a token each, or of a stream's tokens, or without ids; the
    request has the tools that it calls."""
    message, ids = case["message"], case["ids"] or [()] * len(case["pieces"])
    parts = [(text, [each] if isinstance(each, int) else each) for text, each in zip(case["pieces"], ids, strict=True)]
    if "ends" in getattr(factory, "lacks", ()):
        parts = list(itertools.takewhile(lambda part: part[0] not in ENDS, parts))
    calls = [(call["name"], json.dumps(call["arguments"])) for call in message["tool_calls"]]
    expected = Seen(message["content"], message["reasoning"] or "", calls).meaning()
    called = [(call["name"], call["arguments"]) for call in message["tool_calls"]]
    names, parameters = {name for name, _ in called}, {key for _, arguments in called for key in arguments}
    tools = tools_of(sorted(names), sorted(parameters)) if called else TOOLS
    for seen in (whole(factory, parts, tools), *streamed(factory, parts, tools=tools)):
        if message["unfinished"]:  # a stream may have begun a call
            seen.calls = seen.calls[: len(calls)]
        equal(seen.meaning(), expected, parts)
