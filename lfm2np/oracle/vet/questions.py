"""What is asked: open questions, of which no two are alike, so that no cached answer counts twice.

A question on which a model is sure says nothing about its weights: of answers to "add: 34 + 58" a quantised checkpoint
gives the same tokens with nearly the same probability. So questions are of several kinds, and the plan finds out on
which of them the candidates differ most (token_plan.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lfm2np.errors import RequestError

ROLES = ("system", "user", "assistant")
KINDS = {
    "story": "Tell me a story about a {0} {1} and a {2} near the {3}.",
    "poem": "Write a poem about the {0} {3} where the {1} sleeps.",
    "guess": "Guess what the {0} {1} has hidden in the {3}, and say why.",
    "list": "List things that a {1} and a {2} may find in a {0} {3}.",
    "talk": "Write a talk between a {0} {1} and a {2}.",
    "name": "Invent names for a {0} {1} and for the {3} where it lives.",
    "letter": "Write a letter from the {1} to the {0} {2} in the {3}.",
    "go on": "Go on: It was a {0} day when the {1} left the {3}, and the {2}",
}
WORDS = (
    ("old", "young", "red", "quiet", "clever", "tired", "golden", "hungry", "tall", "lost", "brave", "grey"),
    ("fox", "captain", "baker", "robot", "owl", "gardener", "princess", "miner", "cat", "teacher", "thief", "whale"),
    ("bear", "king", "sailor", "ghost", "child", "painter", "dragon", "doctor", "mouse", "pilot", "singer", "judge"),
    ("lake", "mountain", "harbour", "forest", "castle", "library", "market", "island", "station", "desert", "mill"),
)


@dataclass(frozen=True)
class Question:
    """Messages of a chat, or the text that a completion goes on from."""

    kind: str
    messages: tuple[Mapping[str, str], ...] | None = None
    prompt: str | None = None

    def as_json(self) -> dict[str, Any]:
        if self.messages is None:
            return {"kind": self.kind, "prompt": self.prompt}
        return {"kind": self.kind, "messages": [dict(message) for message in self.messages]}


def open_questions(seed: int, system: str | None, chat: bool) -> Iterator[Question]:
    """One of each kind in turn, without an end; all different as long as there are others."""
    random = np.random.Generator(np.random.Philox(key=[seed, 20]))
    seen: set[str] = set()
    while True:
        for kind, form in KINDS.items():
            for _ in range(100):
                text = form.format(*(words[int(random.integers(len(words)))] for words in WORDS))
                if text not in seen:
                    break
            seen.add(text)
            yield asked(kind, text, system, chat)


def asked(kind: str, text: str, system: str | None, chat: bool) -> Question:
    if not chat:
        return Question(kind, prompt=text)
    before = () if system is None else ({"role": "system", "content": system},)
    return Question(kind, (*before, {"role": "user", "content": text}))


def question_from_json(raw: Any, where: str, system: str | None = None) -> Question:
    """{"messages": [...]} or {"prompt": text}, and "kind", which is the line's place if it is missing."""
    if not isinstance(raw, dict) or ("messages" in raw) == ("prompt" in raw):
        raise RequestError(f"{where}: expected an object with messages or prompt")
    kind = raw.get("kind", where)
    if not isinstance(kind, str):
        raise RequestError(f"{where}: kind: expected text")
    if "prompt" in raw:
        if not isinstance(raw["prompt"], str):
            raise RequestError(f"{where}: prompt: expected text")
        return Question(kind, prompt=raw["prompt"])
    messages = raw["messages"]
    if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
        raise RequestError(f"{where}: messages: expected objects with role ({', '.join(ROLES)}) and content, both text")
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return Question(kind, tuple({"role": entry["role"], "content": entry["content"]} for entry in messages))


def is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("role") in ROLES and isinstance(entry.get("content"), str)
