"""Requests, answers and traces as JSON, one object a line.

    {"request_id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 8, "tags": {"case": "borders"}}
    {"token_ids": [1, 2], "logprobs": [-0.5, -1.25], "finish_reason": "length"}
    {"requests": [{"prompt_token_ids": [5, 6, 7], "max_tokens": 8},
                  {"prompt_token_ids": [5, 6, 9], "max_tokens": 4, "after": 0, "after_tokens": 3, "abort_after": 2}]}

The second request of that trace is sent after three tokens of the first, and aborted after two of its own. Sampling
parameters stand beside the other fields. A field with its default is left out: decoding is greedy, goes on behind an
end-of-sequence token, and log-probabilities are reported. docs/engine/2-targets.md has all fields.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sampling.params import as_json as params_as_json
from lfm2np.engine.sampling.params import from_json as params_from_json
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import (
    FAILED,
    IMPOSSIBLE,
    NO_ANSWER,
    UNTOLD,
    Answer,
    Ids,
    Request,
    Routes,
    Trace,
    failed,
    greedy,
    require_request,
)

T = TypeVar("T")
DEFAULTS = greedy("", (0,), 1)
SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
FIELDS = {field.name for field in dataclasses.fields(Request)} - {"params"}
ANSWER_FIELDS = {field.name for field in dataclasses.fields(Answer)} - {"logits"}
# Tags that say where a request stands in the plan. They change nothing of the request.
NOTED = ("place", "seen", "abort", "order", "together")


def request_as_json(request: Request) -> dict[str, Any]:
    """Fields with the default of a greedy request are left out; prompt_token_ids and max_tokens never are."""
    written = params_as_json(request.params)
    params = {
        name: written.get(name, getattr(request.params, name))
        for name in sorted(SAMPLING)
        if getattr(request.params, name) != getattr(DEFAULTS.params, name)
    }
    fields = {name: getattr(request, name) for name in sorted(FIELDS)}
    fields = {name: value for name, value in fields.items() if value != getattr(DEFAULTS, name)}
    ids = {"prompt_token_ids": list(request.prompt_token_ids), "max_tokens": request.max_tokens}
    return {**fields, **ids, **params}


def request_from_json(raw: Any, where: str = "a request") -> Request:
    """RequestError that names the field for anything that `request_as_json` would not write."""
    fields = _object(raw, where)
    for name in fields:
        if name not in FIELDS and name not in SAMPLING:
            raise RequestError(f"{where}.{name}: expected one of {', '.join(sorted(FIELDS | SAMPLING))}")
    ids, tags = _ids(fields, "prompt_token_ids"), dict(_object(fields.get("tags", {}), "tags"))
    if tags.get("length", len(ids)) != len(ids):
        raise RequestError(f"tags.length {repr(tags['length'])[:40]}: expected {len(ids)}, as many as prompt_token_ids")
    params = {name: value for name, value in fields.items() if name in SAMPLING}
    own = {name: value for name, value in fields.items() if name not in SAMPLING}
    for name in ("request_id", "cache_salt", "prompt_text", "message"):
        _optional(own, name, _text)
    given = params_from_json({**params_as_json(DEFAULTS.params), **params})
    request = Request(**{"request_id": "", **own, "prompt_token_ids": ids, "params": given, "tags": tags})
    require_request(request, where, None)
    return request


def answer_as_json(answer: Answer) -> dict[str, Any]:
    """What the engine did not report is left out, and so are bits of logits."""
    fields = {name: getattr(answer, name) for name in sorted(ANSWER_FIELDS)}
    return {name: value for name, value in fields.items() if value != getattr(Answer(), name)}


def answer_from_json(raw: Any) -> Answer:
    """RequestError that names the field: unknown, wrong type, not finite, or wrong length."""
    fields = _object(raw, "an answer")
    for name in fields:
        if name not in ANSWER_FIELDS:
            raise RequestError(f"answer field {name!r}: expected one of {', '.join(sorted(ANSWER_FIELDS))}")
    ids, logprobs = _optional(fields, "token_ids", _ids), _optional(fields, "logprobs", _numbers)
    top = _optional(fields, "top_logprobs", _tops)
    for name, values in (("logprobs", logprobs), ("top_logprobs", top)):
        if values is not None and len(values) != len(ids or ()):
            raise RequestError(f"{name}: {len(values)} entries for {len(ids or ())} token_ids, expected one each")
    texts: dict[str, Any] = {name: _optional(fields, name, _text) for name in ("text", "finish_reason", "error")}
    times: dict[str, Any] = {name: _optional(fields, name, _a_number) for name in ("sent", "first", "ended")}
    cached = _optional(fields, "cached_tokens", lambda fields, name: _whole(fields[name], name))
    stop_reason, is_aborted = fields.get("stop_reason", UNTOLD), fields.get("is_aborted", False)
    if stop_reason is not None and type(stop_reason) not in (int, str):
        raise RequestError(f"stop_reason {repr(stop_reason)[:40]}: expected a token id, a text or null")
    if type(is_aborted) is not bool:
        raise RequestError(f"is_aborted {repr(is_aborted)[:40]}: expected true or false")
    return Answer(
        ids,
        logprobs,
        top,
        _optional(fields, "prompt_logprobs", _numbers),
        stop_reason=stop_reason,
        routes=_optional(fields, "routes", read_routes),
        cached_tokens=cached,
        kind=_optional(fields, "kind", _text) or "",
        is_aborted=is_aborted,
        **texts,
        **times,
    )


def checked_answer(request: Request, fields: Mapping[str, Any]) -> Answer:
    """The fields as an Answer to the request, with `error` where they are invalid or don't fit it."""
    try:
        answer = answer_from_json(fields)
    except RequestError as problem:
        return failed(str(problem), NO_ANSWER)
    if answer.error is not None:
        return failed(answer.error, answer.kind or FAILED)
    if answer.token_ids is None:
        return failed("token_ids: missing, expected the new tokens", NO_ANSWER)
    why = prompt_fault(request, answer)
    return answer if why is None else failed(why, IMPOSSIBLE)


def prompt_fault(request: Request, answer: Answer) -> str | None:
    """Another number of log-probabilities than the prompt has tokens behind its first."""
    expected = len(request.prompt_token_ids) - 1
    if answer.prompt_logprobs is None or len(answer.prompt_logprobs) == expected:
        return None
    return f"prompt_logprobs: {len(answer.prompt_logprobs)} entries, expected {expected}"


def trace_as_json(trace: Trace) -> dict[str, Any]:
    return {"requests": [request_as_json(request) for request in trace.requests]}


def trace_from_json(raw: Any) -> Trace:
    """RequestError that names the field for anything that `trace_as_json` would not write."""
    if not isinstance(raw, dict) or set(raw) != {"requests"} or not isinstance(raw["requests"], list):
        raise RequestError("a trace: expected an object with a list `requests`")
    return Trace(tuple(_numbered(row, f"requests[{index}]") for index, row in enumerate(raw["requests"])))


def _numbered(raw: Any, where: str) -> Request:
    try:
        return request_from_json(raw, where)
    except RequestError as problem:
        is_named = str(problem).startswith(where)
        raise RequestError(str(problem) if is_named else f"{where}.{problem}") from None


def parse_line(line: str, what: str) -> Any:
    """One JSON value; RequestError that names `what` otherwise. NaN and Infinity are not JSON."""

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no JSON number")

    try:
        return json.loads(line, parse_constant=refuse)
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"{what}: not JSON: {problem}") from None


def _object(raw: Any, what: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise RequestError(f"{what}: {type(raw).__name__}, expected a JSON object")
    return raw


def _optional(fields: Mapping[str, Any], name: str, read: Callable[[Mapping[str, Any], str], T]) -> T | None:
    return None if fields.get(name) is None else read(fields, name)


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{name} {value!r}: expected text")
    return value


def _whole(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise RequestError(f"{name} {value!r}: expected a whole number, at least {least}")
    return value


def _list(value: Any, name: str, of: str = "") -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name}: {type(value).__name__}, expected a list{of}")
    return value


def _ids(fields: Mapping[str, Any], name: str) -> Ids:
    ids = _list(fields.get(name), name, " of token ids")
    return tuple(_whole(item, f"{name}[{index}]") for index, item in enumerate(ids))


def _a_number(fields: Mapping[str, Any], name: str) -> float:
    return _number(fields[name], name)


def _number(value: Any, name: str) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # a whole number beyond float64
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"{name} {repr(value)[:40]}: expected a finite number")
    return number


def _numbers(fields: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = _list(fields.get(name), name, " of numbers")
    return tuple(_number(item, f"{name}[{index}]") for index, item in enumerate(values))


def read_routes(fields: Mapping[str, Any], name: str) -> Routes:
    """The field as nested tuples; RequestError. oracle/judging/routes.py, which knows the model, checks the sizes."""
    return tuple(
        tuple(
            tuple(_whole(expert, f"{name}[{row}][{layer}]", -1) for expert in _list(experts, f"{name}[{row}][{layer}]"))
            for layer, experts in enumerate(_list(layers, f"{name}[{row}]"))
        )
        for row, layers in enumerate(_list(fields[name], name))
    )


def _tops(fields: Mapping[str, Any], name: str) -> tuple[dict[int, float], ...]:
    tops = []
    for index, entry in enumerate(_list(fields[name], name, " of objects")):
        where = f"{name}[{index}]"
        top = {}
        for key, number in _object(entry, where).items():
            if not (isinstance(key, int) or (isinstance(key, str) and key.isascii() and key.isdigit())):
                raise RequestError(f"{where}: key {key!r}, expected a token id")
            top[int(key)] = _number(number, f"{where}[{key}]")
        tops.append(top)
    return tuple(tops)
