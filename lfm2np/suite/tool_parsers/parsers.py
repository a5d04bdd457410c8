"""What a parser of replies must have to be tested, and what a client has of what it said."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.loaded import trained_fixture
from lfm2np.checkpoint.text.replies import CONTROL
from lfm2np.checkpoint.text.tokenizer import Tokenizer, load_tokenizer
from lfm2np.suite.properties.property import Violation

Delta = Mapping[str, Any]


class ToolParser(Protocol):
    """Reads one reply, whole or in pieces. The factory is called for each, with the request's tools, OpenAI's objects.

    A piece is the text that some tokens add, control tokens as they are spelled, and their ids in the trained fixture's
    tokenizer (0 to 13 are LFM2's); without ids where the text was cut within a token. `lacks` on the factory
    names what the engine does elsewhere: "reasoning" leaves out what begins with <think>; "ends": nothing is given
    from <|im_end|> on; "markers": it takes them away before, and no text in front of calls has a bracket.
    """

    def whole(self, text: str, token_ids: Sequence[int]) -> Delta:
        """content and reasoning (text or None), tool_calls: dicts of name and arguments (JSON, as text)."""

    def feed(self, text: str, token_ids: Sequence[int]) -> Iterable[Delta]:
        """What a piece adds: content, reasoning, tool_calls with index, name (once) and more text of arguments."""

    def finish(self) -> Iterable[Delta]:
        """What the end of the reply adds."""


Factory = Callable[[list[dict[str, Any]]], ToolParser]


@dataclass
class Seen:
    """What a client has: of a whole reply, or of the deltas so far. Violation for deltas that join to nothing."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        if not isinstance(delta, Mapping):
            raise Violation(f"a delta {delta!r}, expected a dict with content, reasoning or tool_calls")
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            index, name = call.get("index", len(self.calls)), call.get("name")
            if index == len(self.calls) and name:
                self.calls.append((name, ""))
                self.require_json(self.calls[:-1])
            elif not 0 <= index < len(self.calls) or name not in (None, "", self.calls[index][0]):
                raise Violation(f"a delta of call {index}, {name!r}, after {self.calls}")
            arguments = call.get("arguments") or ""
            if not isinstance(arguments, str):
                raise Violation(f"arguments of {self.calls[index][0]!r}: {arguments!r}, expected JSON as text")
            self.calls[index] = (self.calls[index][0], self.calls[index][1] + arguments)

    def require_json(self, calls: list[tuple[str, str]]) -> None:
        for name, arguments in calls:
            try:
                json.dumps({**json.loads(arguments)}, allow_nan=False)
            except (ValueError, TypeError):
                raise Violation(f"arguments of {name!r}: {arguments!r}, expected an object of JSON") from None

    def meaning(self) -> tuple[str, str, list[tuple[str, str]]]:
        """To compare: without blanks, which engines strip next to markers, and with JSON in one spelling.

        Violation for what a client must never see: markup in the content, arguments that are no JSON.
        """
        if any(marker in self.content for marker in CONTROL):
            raise Violation(f"markup in the content: {self.content!r}")
        self.require_json(self.calls)
        calls = [(name, json.dumps(json.loads(arguments), sort_keys=True)) for name, arguments in self.calls]
        return "".join(self.content.split()), "".join(self.reasoning.split()), calls


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(trained_fixture(), load_config(trained_fixture()))


def pieces_of(ids: Sequence[int]) -> list[str]:
    """The text that each id adds, control tokens as they are spelled; nothing before a character is whole."""
    stream = tokenizer().stream()
    entries = [(token_id, tokenizer().token(token_id)) for token_id in ids]
    return [entry if entry in CONTROL else stream.push(token_id) for token_id, entry in entries]
