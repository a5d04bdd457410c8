"""Reading JSON from outside: what may be missing is None; what has another form raises RequestError that names it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.oracle.targets.records import Ask

KINDS: dict[type, str] = {dict: "an object", list: "a list"}


def needed(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise RequestError(f"{name}: {type(value).__name__}, expected {KINDS[kind]}")
    return value


def optional(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    return None if fields.get(name) is None else needed(fields, name, kind)


def by_token_id(pairs: Sequence[tuple[Any, Any]], where: str) -> dict[Any, Any]:
    """RequestError for an id that is no whole number, or stands there twice."""
    for token_id, _ in pairs:
        if type(token_id) is not int:
            raise RequestError(f"{where}: id {token_id!r}, expected a whole number")
    logprobs = dict(pairs)
    if len(logprobs) != len(pairs):
        raise RequestError(f"{where}: a token stands twice among the most probable, expected once")
    return logprobs


def require_prompt(ids: Sequence[Any] | None, ask: Ask, where: str) -> None:
    """The server must have computed the prompt that was sent: not with a second BOS, not cut."""
    if ids is not None and list(ids) != list(ask.prompt_token_ids):
        raise RequestError(f"{where}: other tokens than the prompt that was sent")


def concatenated(pieces: Sequence[Any], name: str) -> Any:
    """Texts as one text, or lists as one list."""
    kind = type(pieces[0])
    if kind not in (str, list) or any(type(piece) is not kind for piece in pieces):
        raise RequestError(f"{name}: expected texts, or lists, in all events")
    return "".join(pieces) if kind is str else [item for piece in pieces for item in piece]


def from_base64(text: Any, where: str) -> bytes:
    if not isinstance(text, str):
        raise RequestError(f"{where}: {type(text).__name__}, expected base64")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as problem:
        raise RequestError(f"{where}: not base64: {problem}") from None
