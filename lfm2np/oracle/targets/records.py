"""Requests and answers of a check: plain data, one JSON object a line.

Log-probabilities are natural logarithms from the raw logits, before temperature, penalties and filters. What an engine
does not report stays None: it is never guessed, and never counts as right.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lfm2np.errors import RequestError

SAMPLED = "sampled"  # the factor of an ask whose tokens were drawn: they need not be the likeliest
# Factors that say where an ask stands in the plan. They change nothing of the request.
NOTED = ("place", "seen", "abort", "order", "together", "tenant")
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
    seed: int | None = None  # tokens are drawn at temperature 1 with this seed, not greedily


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
    """`stop` and `seed` are left out where they are None."""
    fields = dataclasses.asdict(ask)
    return {name: value for name, value in fields.items() if value is not None or name not in ("stop", "seed")}


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
        prompt_text=None if fields.get("prompt_text") is None else _text(fields, "prompt_text"),
        prompt_logprobs=bool(fields.get("prompt_logprobs", False)),
        factors=factors,
        stop=None if fields.get("stop") is None else _text(fields, "stop"),
        seed=None if fields.get("seed") is None else _whole(fields["seed"], "seed"),
    )


def answer_from_json(raw: Any) -> Answer:
    """RequestError that names the field: wrong type, not finite, or wrong length."""
    fields = _object(raw, "an answer")
    known = {field.name for field in dataclasses.fields(Answer)}
    for name in fields:
        if name not in known:
            raise RequestError(f"answer field {name!r}: expected one of {', '.join(sorted(known))}")
    ids = None if fields.get("token_ids") is None else _ids(fields, "token_ids")
    logprobs = None if fields.get("logprobs") is None else _numbers(fields, "logprobs")
    top = None if fields.get("top_logprobs") is None else _tops(fields["top_logprobs"])
    for name, values in (("logprobs", logprobs), ("top_logprobs", top)):
        if values is not None and len(values) != len(ids or ()):
            raise RequestError(f"{name}: {len(values)} entries for {len(ids or ())} token_ids, expected one each")
    prompt = None if fields.get("prompt_logprobs") is None else _numbers(fields, "prompt_logprobs")
    texts = {
        name: None if fields.get(name) is None else _text(fields, name) for name in ("text", "finish_reason", "error")
    }
    routes = None if fields.get("routes") is None else _routes(fields["routes"])
    refuted = True if fields.get("refuted") else None
    return Answer(_text(fields, "id"), ids, logprobs, top, prompt, refuted=refuted, routes=routes, **texts)


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


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{name} {value!r}: expected text")
    return value


def _whole(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise RequestError(f"{name} {value!r}: expected a whole number, at least {least}")
    return value


def _ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = fields.get(name)
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name}: {type(value).__name__}, expected a list of token ids")
    return tuple(_whole(item, f"{name}[{index}]") for index, item in enumerate(value))


def _number(value: Any, name: str) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # a whole number beyond float64
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"{name} {repr(value)[:40]}: expected a finite number")
    return number


def _numbers(fields: Mapping[str, Any], name: str) -> tuple[float, ...]:
    value = fields.get(name)
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name}: {type(value).__name__}, expected a list of numbers")
    return tuple(_number(item, f"{name}[{index}]") for index, item in enumerate(value))


def _routes(value: Any) -> Routes:
    """oracle/judging/routes.py, which knows the model, checks the sizes."""

    def lists(item: Any, where: str) -> list[Any] | tuple[Any, ...]:
        if not isinstance(item, list | tuple):
            raise RequestError(f"{where}: {type(item).__name__}, expected a list")
        return item

    return tuple(
        tuple(
            tuple(_whole(expert, f"routes[{row}][{layer}]", -1) for expert in lists(experts, f"routes[{row}][{layer}]"))
            for layer, experts in enumerate(lists(layers, f"routes[{row}]"))
        )
        for row, layers in enumerate(lists(value, "routes"))
    )


def _tops(value: Any) -> tuple[dict[int, float], ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"top_logprobs: {type(value).__name__}, expected a list of objects")
    tops = []
    for index, entry in enumerate(value):
        where = f"top_logprobs[{index}]"
        top = {}
        for key, number in _object(entry, where).items():
            if not (isinstance(key, int) or (isinstance(key, str) and key.isascii() and key.isdigit())):
                raise RequestError(f"{where}: key {key!r}, expected a token id")
            top[int(key)] = _number(number, f"{where}[{key}]")
        tops.append(top)
    return tuple(tops)
