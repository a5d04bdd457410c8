"""Answers of a provider, as they came: plain data, one JSON object a line.

{"messages": [...] or "prompt": text, "kind": text, "text": text, "finish_reason": "stop" or "length",
 "token_ids": [ids], "tokens": [texts], "logprobs": [numbers], "prompt_tokens": n, "completion_tokens": n,
 "error": text, "sha256": of all others}

What a provider did not report is left out, and only the question is needed. Neither address nor headers are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lfm2np.checkpoint.strict_json import parse_object
from lfm2np.engine.work.results_file import LineFile
from lfm2np.errors import RequestError
from lfm2np.oracle.vet.questions import Question, question_from_json
from scheduler.checksum import FIELD, damage, sealed

MAX_LINE = 16 * 2**20


@dataclass(frozen=True)
class Reply:
    """What came to one question; error: why nothing can be read of it."""

    question: Question
    text: str | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    tokens: tuple[str, ...] | None = None
    logprobs: tuple[float | None, ...] | None = None  # of token_ids or tokens
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Of the answer, as the server counts them; else as many as are seen, or a guess from the text."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        seen = self.token_ids if self.token_ids is not None else self.tokens
        return len(seen) if seen is not None else len((self.text or "").split())


def as_json(reply: Reply) -> dict[str, Any]:
    names = ("text", "finish_reason", "token_ids", "tokens", "logprobs", "prompt_tokens", "completion_tokens", "error")
    fields = {name: getattr(reply, name) for name in names}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    return {**reply.question.as_json(), **{name: value for name, value in plain.items() if value is not None}}


def from_json(raw: Mapping[str, Any], where: str) -> Reply:
    """RequestError for a field of another type. Log-probabilities that are no finite numbers are not reported."""
    try:
        return Reply(
            question_from_json({name: raw[name] for name in ("messages", "prompt", "kind") if name in raw}, where),
            optional(raw, "text", str),
            optional(raw, "finish_reason", str),
            optional_list(raw, "token_ids", is_id),
            optional_list(raw, "tokens", lambda value: isinstance(value, str)),
            None if raw.get("logprobs") is None else numbers(raw["logprobs"]),
            optional(raw, "prompt_tokens", int),
            optional(raw, "completion_tokens", int),
            optional(raw, "error", str),
        )
    except RequestError as problem:
        raise RequestError(f"{where}: {problem}") from None


def optional(raw: Mapping[str, Any], name: str, kind: type) -> Any:
    value = raw.get(name)
    if value is not None and type(value) is not kind:
        raise RequestError(f"{name}: {type(value).__name__}, expected {kind.__name__}")
    return value


def optional_list(raw: Mapping[str, Any], name: str, fits: Any) -> tuple[Any, ...] | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(map(fits, value)):
        raise RequestError(f"{name}: expected a list of {'ids' if fits is is_id else 'texts'}")
    return tuple(value)


def is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def numbers(values: Any) -> tuple[float | None, ...]:
    """None for what is no finite number at most 0: a log-probability above it is none."""
    if not isinstance(values, list):
        raise RequestError("logprobs: expected a list of numbers")
    kept = []
    for value in values:
        number = float(value) if type(value) in (int, float) and abs(value) < 1e6 else math.nan
        kept.append(number if number <= 1e-3 else None)
    return tuple(kept)


class ReplyFile:
    """The replies of a file, and what is appended, each on the disk at once. A missing file has none.

    RequestError that names the line for what can't be read, and for a line that does not match its checksum.
    """

    def __init__(self, path: str | Path) -> None:
        self.replies: list[Reply] = []
        self._lines = LineFile(path, MAX_LINE)
        for where, line in self._lines.read():
            if not line.strip():
                continue
            raw = parse_object(line, where, RequestError)
            problem = damage(raw) if FIELD in raw else None
            if problem:
                raise RequestError(f"{where}: {problem}")
            self.replies.append(from_json(raw, where))

    def append(self, replies: Sequence[Reply]) -> None:
        self._lines.append("".join(json.dumps(sealed(as_json(reply))) + "\n" for reply in replies).encode())
        self.replies += replies

    def close(self) -> None:
        self._lines.close()
