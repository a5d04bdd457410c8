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
from numbers import Integral, Real
from typing import Any

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sampling.params import as_json as params_as_json
from lfm2np.engine.sampling.params import from_json as params_from_json
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import (
    FAILED,
    IMPOSSIBLE,
    NO_ANSWER,
    Answer,
    Request,
    Routes,
    Trace,
    failed,
    greedy,
    require_request,
)


class ImpossibleValueError(RequestError):
    """A value that can be read, that no right engine gives: an id below 0, NaN or Infinity for a log-probability."""


DEFAULTS = greedy("", (0,), 1)
SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
FIELDS = {field.name for field in dataclasses.fields(Request)} - {"params"}
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
    fields = read_object(raw, where)
    if unknown := [name for name in fields if name not in FIELDS and name not in SAMPLING]:
        raise RequestError(f"{where}.{unknown[0]}: expected one of {', '.join(sorted(FIELDS | SAMPLING))}")
    texts = ("request_id", "cache_salt", "prompt_text", "message")
    own = {"request_id": "", **{name: value for name, value in fields.items() if name not in SAMPLING}}
    own |= {name: read_text(own[name], name) for name in texts if own.get(name) is not None}
    own["prompt_token_ids"] = ids = read_ids(fields.get("prompt_token_ids"), "prompt_token_ids")
    own["tags"] = tags = dict(read_object(fields.get("tags", {}), "tags"))
    if tags.get("length", len(ids)) != len(ids):
        raise RequestError(f"tags.length {repr(tags['length'])[:40]}: expected {len(ids)}, as many as prompt_token_ids")
    sampling = {name: value for name, value in fields.items() if name in SAMPLING}
    request = Request(params=params_from_json({**params_as_json(DEFAULTS.params), **sampling}), **own)
    require_request(request, where, None)
    return request


def answer_as_json(answer: Answer) -> dict[str, Any]:
    """What the engine did not report is left out, and so are bits of logits."""
    fields = {name: getattr(answer, name) for name in sorted(ANSWER_FIELDS)}
    return {name: value for name, value in fields.items() if value != getattr(Answer(), name)}


def answer_from_json(raw: Any) -> Answer:
    """RequestError that names the field: unknown, wrong type, not finite, or wrong length; ImpossibleValueError."""
    fields = read_object(raw, "an answer")
    if unknown := [name for name in fields if name not in ANSWER_FIELDS]:
        raise RequestError(f"answer field {unknown[0]!r}: expected one of {', '.join(sorted(ANSWER_FIELDS))}")
    stopped = {"stop_reason": None} if "stop_reason" in fields else {}  # null is a reason there, and nothing elsewhere
    values = {name: ANSWER_FIELDS[name](value, name) for name, value in fields.items() if value is not None}
    answer = Answer(**{**stopped, **values})
    for name, some in (("logprobs", answer.logprobs), ("top_logprobs", answer.top_logprobs)):
        if some is not None and len(some) != answer.num_tokens:
            raise RequestError(f"{name}: {len(some)} entries for {answer.num_tokens} token_ids, expected one each")
    return answer


def checked_answer(request: Request, fields: Mapping[str, Any]) -> Answer:
    """The fields as an Answer to the request, with `error` where they are invalid or don't fit it."""
    try:
        answer = answer_from_json(fields)
    except ImpossibleValueError as problem:
        return failed(str(problem), IMPOSSIBLE)
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


def parse_line(line: str, what: str, with_nan: bool = False) -> Any:
    """One JSON value; RequestError that names `what` otherwise. NaN and Infinity are not JSON, unless they may be."""

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no JSON number")

    try:
        return json.loads(line, parse_constant=None if with_nan else refuse)
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"{what}: not JSON: {problem}") from None


def words_of_sampling(text: str) -> dict[str, Any]:
    """'temperature=0.7 top_k=40' -> its values by name. RequestError for a value that is not JSON."""
    words = [word.partition("=") for word in text.replace(",", " ").split()]
    return {name: parse_line(value, f"sampling {name}") for name, _, value in words}


# --- values: each as a record has it, or RequestError that names the field


def of_kind(*kinds: type, expected: str) -> Callable[[Any, str], Any]:
    def read(value: Any, name: str) -> Any:
        if type(value) not in kinds:
            raise RequestError(f"{name} {repr(value)[:40]}: expected {expected}")
        return value

    return read


def whole_number(value: Any, name: str, least: int = 0) -> int:
    is_whole = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))  # NumPy's, too
    if not is_whole or value < least:
        raise RequestError(f"{name} {value!r}: expected a whole number, at least {least}")
    return int(value)


def finite_number(value: Any, name: str) -> float:
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number beyond float64
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"{name} {repr(value)[:40]}: expected a finite number")
    return number


def token_id(value: Any, name: str) -> int:
    if isinstance(value, Integral) and value < 0:
        raise ImpossibleValueError(f"{name} {value}: expected a token id, at least 0")
    return whole_number(value, name)


def log_probability(value: Any, name: str) -> float:
    """-Infinity is what is left of a probability that a format can't hold: not finite, but no engine's fault."""
    if isinstance(value, Real) and (value != value or value == math.inf):
        raise ImpossibleValueError(f"{name} {float(value)}: expected a finite number")
    return finite_number(value, name)


def list_of(read: Callable[[Any, str], Any], what: str) -> Callable[[Any, str], tuple[Any, ...]]:
    def read_all(values: Any, name: str) -> tuple[Any, ...]:
        values = values.tolist() if hasattr(values, "tolist") else values  # NumPy's and PyTorch's
        if not isinstance(values, list | tuple):
            raise RequestError(f"{name}: {type(values).__name__}, expected a list of {what}")
        return tuple(read(value, f"{name}[{index}]") for index, value in enumerate(values))

    return read_all


def read_object(raw: Any, what: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise RequestError(f"{what}: {type(raw).__name__}, expected a JSON object")
    return raw


def top_logprobs(raw: Any, name: str) -> dict[int, float]:
    entries = read_object(raw, name)
    for key in entries:
        if not (isinstance(key, Integral) or (isinstance(key, str) and key.isascii() and key.isdigit())):
            raise RequestError(f"{name}: key {key!r}, expected a token id")
    return {int(key): log_probability(value, f"{name}[{key}]") for key, value in entries.items()}


read_text = of_kind(str, expected="text")
read_switch = of_kind(bool, expected="true or false")
read_ids = list_of(whole_number, "token ids")
expert_ids = list_of(lambda value, name: whole_number(value, name, -1), "expert ids")
routes = list_of(list_of(expert_ids, "layers"), "positions")
ANSWER_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "token_ids": list_of(token_id, "token ids"),
    "logprobs": list_of(log_probability, "numbers"),
    "top_logprobs": list_of(top_logprobs, "objects"),
    "prompt_logprobs": list_of(log_probability, "numbers"),
    "text": read_text,
    "finish_reason": read_text,
    "stop_reason": of_kind(int, str, expected="a token id, a text or null"),
    "routes": routes,
    "cached_tokens": whole_number,
    "round_cached_tokens": whole_number,
    "error": read_text,
    "kind": read_text,
    "sent": finite_number,
    "first": finite_number,
    "ended": finite_number,
    "is_aborted": read_switch,
}


def read_routes(fields: Mapping[str, Any], name: str) -> Routes:
    """The field as nested tuples; RequestError. oracle/judging/routes.py, which knows the model, checks the sizes."""
    return routes(fields[name], name)
