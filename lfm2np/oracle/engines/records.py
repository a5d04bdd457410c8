"""Requests and answers of a check: plain data, one JSON object a line.

Log-probabilities are natural logarithms from the raw logits, before temperature, penalties and filters. What an engine
does not report stays None: it is never guessed, and never counts as right.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lfm2np.errors import RequestError

T = TypeVar("T")
# Factors that say where an ask stands in the plan. They change nothing of the request.
NOTED = ("place", "seen", "abort", "order", "together", "tenant")
MOST_OF_A_MESSAGE = 1000  # characters of an engine's own words
NO_ABORT = "the engine can't abort a request"
RARE = {"stop": None, "seed": None, "temperature": None, "samples": 1, "sample": 0, "streamed": False}  # and defaults
Routes = tuple[tuple[tuple[int, ...], ...], ...]  # [positions][layers][experts] ids, in any order; -1: not reported


@dataclass(frozen=True)
class Ask:
    """One request: continue a prompt greedily by exactly `max_tokens` tokens (an end-of-sequence token is no end)."""

    id: str
    case: str  # the workload that it belongs to: see workloads.py
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    prompt_text: str | None = None  # a text that the tokenizer turns into exactly these ids, if there is one
    prompt_logprobs: bool = False  # requested, besides those of the new tokens
    factors: Mapping[str, Any] = field(default_factory=dict)  # its special traits, among which patterns are sought
    stop: str | None = None  # the text ends before this string, and the answer with the token that completes it
    seed: int | None = None  # tokens are drawn with this seed, not greedily
    temperature: float | None = None  # at which they are drawn; None: 1
    samples: int = 1  # of its request (n): asks with the same request follow each other, each for one of them
    sample: int = 0  # which of them is its answer
    streamed: bool = False  # the answer comes in server-sent events

    @property
    def is_sampled(self) -> bool:
        """Whether its tokens are drawn: they need not be the likeliest."""
        return self.seed is not None


@dataclass(frozen=True)
class Answer:
    """What the engine answered to one Ask."""

    id: str
    token_ids: tuple[int, ...] | None = None  # new tokens only
    logprobs: tuple[float, ...] | None = None  # of token_ids
    top_logprobs: tuple[Mapping[int, float], ...] | None = None  # by token id, at each new position
    prompt_logprobs: tuple[float, ...] | None = None  # of each prompt token but the first
    text: str | None = None
    finish_reason: str | None = None
    error: str | None = None  # why it can't be judged; only `refuted` is then set
    refuted: bool | None = None  # no right engine answers so: too many tokens, ids outside the vocabulary
    routes: Routes | None = None  # of the prompt's and the new tokens in turn; those of the last are not used


def ask_as_json(ask: Ask) -> dict[str, Any]:
    """Fields of RARE are left out where they have their defaults."""
    fields = dataclasses.asdict(ask)
    return {name: value for name, value in fields.items() if name not in RARE or value != RARE[name]}


def answer_as_json(answer: Answer) -> dict[str, Any]:
    """What the engine did not report is left out."""
    return {name: value for name, value in dataclasses.asdict(answer).items() if value is not None}


def ask_from_json(raw: Any) -> Ask:
    """RequestError that names the field for anything that `ask_as_json` would not write."""
    fields = _object(raw, "an ask")
    factors, length = _object(fields.get("factors", {}), "factors"), len(_ids(fields, "prompt_token_ids"))
    if factors.get("length", length) != length:
        raise RequestError(
            f"factors.length {repr(factors['length'])[:40]}: expected {length}, as many as prompt_token_ids"
        )
    return Ask(
        id=_text(fields, "id"),
        case=_text(fields, "case"),
        prompt_token_ids=_ids(fields, "prompt_token_ids"),
        max_tokens=_whole(fields.get("max_tokens"), "max_tokens", 1),
        prompt_text=_optional(fields, "prompt_text", _text),
        prompt_logprobs=bool(fields.get("prompt_logprobs", False)),
        factors=factors,
        stop=_optional(fields, "stop", _text),
        seed=_optional(fields, "seed", lambda fields, name: _whole(fields[name], name)),
        temperature=_optional(fields, "temperature", lambda fields, name: _number(fields[name], name)),
        samples=_whole(fields.get("samples", 1), "samples", 1),
        sample=_whole(fields.get("sample", 0), "sample"),
        streamed=bool(fields.get("streamed", False)),
    )


def answer_from_json(raw: Any) -> Answer:
    """RequestError that names the field: wrong type, not finite, or wrong length."""
    fields = _object(raw, "an answer")
    known = {field.name for field in dataclasses.fields(Answer)}
    for name in fields:
        if name not in known:
            raise RequestError(f"answer field {name!r}: expected one of {', '.join(sorted(known))}")
    ids, logprobs = _optional(fields, "token_ids", _ids), _optional(fields, "logprobs", _numbers)
    top = _optional(fields, "top_logprobs", _tops)
    for name, values in (("logprobs", logprobs), ("top_logprobs", top)):
        if values is not None and len(values) != len(ids or ()):
            raise RequestError(f"{name}: {len(values)} entries for {len(ids or ())} token_ids, expected one each")
    prompt = _optional(fields, "prompt_logprobs", _numbers)
    texts = {name: _optional(fields, name, _text) for name in ("text", "finish_reason", "error")}
    routes = _optional(fields, "routes", read_routes)
    refuted = True if fields.get("refuted") else None
    return Answer(_text(fields, "id"), ids, logprobs, top, prompt, refuted=refuted, routes=routes, **texts)


def checked_answer(ask: Ask, fields: Mapping[str, Any]) -> Answer:
    """The fields as an Answer to the ask, with `error` where they are invalid or don't fit it."""
    try:
        answer = answer_from_json({**fields, "id": ask.id})
    except RequestError as problem:
        return failed(ask, str(problem))
    if answer.error is not None:
        return failed(ask, answer.error, bool(answer.refuted))
    if answer.token_ids is None:
        return failed(ask, "token_ids: missing, expected the new tokens")
    why = prompt_fault(ask, answer)
    return answer if why is None else failed(ask, why, refuted=True)


def prompt_fault(ask: Ask, answer: Answer) -> str | None:
    """Another number of log-probabilities than the prompt has tokens behind its first."""
    expected = len(ask.prompt_token_ids) - 1
    if answer.prompt_logprobs is None or len(answer.prompt_logprobs) == expected:
        return None
    return f"prompt_logprobs: {len(answer.prompt_logprobs)} entries, expected {expected}"


def failed(ask: Ask, why: str, refuted: bool = False) -> Answer:
    """An answer that can't be judged, and why, as one short line. `refuted`: no right engine gives such an answer."""
    return Answer(ask.id, error=shortened(why) or "an error without a message", refuted=refuted or None)


def shortened(text: str, most: int = MOST_OF_A_MESSAGE) -> str:
    """A text from outside as one line that is safe for a terminal."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * most]).split())
    return line if len(line) <= most else line[: most - 3] + "..."


def fault(problem: BaseException) -> str:
    """An exception as one short line."""
    return shortened(f"{type(problem).__name__}: {problem}")


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


def _ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    ids = _list(fields.get(name), name, " of token ids")
    return tuple(_whole(item, f"{name}[{index}]") for index, item in enumerate(ids))


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
