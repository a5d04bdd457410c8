"""What a prompt is made of, checked: messages, tools and a template's variables, as plain values of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.checkpoint.strict_json import parse_object
from lfm2np.errors import RequestError
from lfm2np.values import show

Objects = Sequence[Mapping[str, Any]]
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; templates read one of the first two


def plain_object(value: Any, name: str) -> dict[str, Any]:
    """A copy that shares nothing with the caller's; RequestError for what is no object of JSON."""
    _require(isinstance(value, Mapping), name, value, "an object")
    fields = {}
    for key, field in value.items():
        try:
            fields[str(key)] = json.loads(json.dumps(field, ensure_ascii=False, allow_nan=False).encode())
        except (TypeError, ValueError, RecursionError):
            raise RequestError(f"{name}.{key}: {show(field)}, expected values of JSON, in valid Unicode") from None
    return fields


def plain_objects(values: Any, name: str) -> list[dict[str, Any]]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    _require(is_list, name, values, "a list of objects")
    return [plain_object(value, f"{name}[{place}]") for place, value in enumerate(values)]


def require_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies as templates take them: nothing is None, arguments of calls are objects, reasoning has both its names.

    Source: transformers 5.24, _normalize_chat_messages and _alias_reasoning_fields; vLLM parses arguments as here.
    """
    checked = plain_objects(messages, "messages")
    _require(bool(checked), "messages", messages, "at least one")
    return [_message(fields, f"messages[{place}]") for place, fields in enumerate(checked)]


def _message(fields: dict[str, Any], name: str) -> dict[str, Any]:
    fields = {key: value for key, value in fields.items() if value is not None}
    _require(isinstance(fields.get("role"), str), f"{name}.role", fields.get("role"), "a string")
    content, calls = fields.get("content", "" if "tool_calls" in fields else None), fields.get("tool_calls", [])
    _require(isinstance(content, str | list), f"{name}.content", content, "a string, or a list of texts")
    for place, part in enumerate(content if isinstance(content, list) else ()):
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        _require(is_text, f"{name}.content[{place}]", part, "type 'text', and a text")
    _require(isinstance(calls, list), f"{name}.tool_calls", calls, "a list of calls")
    for place, call in enumerate(calls):
        where = f"{name}.tool_calls[{place}]"
        function: Any = call.get("function") if isinstance(call, dict) else None
        is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
        _require(is_named, where, call, "a function with name and arguments")
        given, where = function.get("arguments") or {}, f"{where}.function.arguments"
        if isinstance(given, str):  # templates make no call of it, or raise
            content = b"{}" if given.strip() in ("", "null") else given.encode()
            given = parse_object(content, where, RequestError)
        _require(isinstance(given, dict), where, given, "an object, or one as JSON")
        function["arguments"] = given
    reasoning = next((fields[key] for key in REASONING if key in fields), None)
    _require(isinstance(reasoning, str | None), f"{name}.reasoning_content", reasoning, "a string")
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _require(is_right: bool, name: str, value: Any, expected: str) -> None:
    if not is_right:
        raise RequestError(f"{name}: {show(value)}, expected {expected}")
