"""What the dialects that speak OpenAI's completions share: choices, their events, and usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.dialects.dialect import Location, Reply, Response, concatenated, needed, optional
from lfm2np.oracle.engines.records import shortened

PATH = "/v1/completions"
LONGEST = Location("/v1/models", ("data", 0, "max_model_len"))
CACHED = ("usage", "prompt_tokens_details", "cached_tokens")
REPEATED = ("prompt_token_ids", "prompt_logprobs", "index")  # the same in each event that has them


def only_choice(reply: Reply) -> dict[str, Any]:
    choices = needed(reply, "choices", list)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise RequestError(f"choices: {len(choices)} entries, expected one object")
    choice: dict[str, Any] = choices[0]
    return choice


def response(reply: Reply, fields: dict[str, Any]) -> Response:
    """With the counts of usage."""
    usage = optional(reply, "usage", dict) or {}
    return Response(fields, usage.get("prompt_tokens"), usage.get("completion_tokens"))


def join_choices(events: Sequence[Reply]) -> dict[str, Any]:
    """Events hold what is new of one choice, which its index names; the last may hold usage only."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for event in events:
        whole |= {name: value for name, value in event.items() if value is not None and name != "choices"}
        for choice in needed(event, "choices", list):
            if not isinstance(choice, dict):
                raise RequestError("choices: expected objects")
            index = choice.get("index", 0)
            if type(index) is not int:
                raise RequestError(f"choices: index {shortened(repr(index), 40)}, expected a whole number")
            extend(choices.setdefault(index, {}), choice)
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


def extend(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Texts and lists grow, also within objects; anything else is replaced by the newest."""
    for name, value in piece.items():
        before = whole.get(name)
        if value is None or name in REPEATED:
            whole[name] = value if before is None else before
        elif isinstance(value, dict) and isinstance(before, dict):
            extend(before, value)
        elif isinstance(value, str | list) and before is not None and name != "finish_reason":
            whole[name] = concatenated([before, value], name)
        else:
            whole[name] = dict(value) if isinstance(value, dict) else value


def split_choices(reply: Reply) -> list[dict[str, Any]]:
    """One reply for each choice; usage, which counts all of them, is left out where there are more."""
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) < 2:
        return [dict(reply)]
    rest = {name: value for name, value in reply.items() if name not in ("choices", "usage")}
    return [{**rest, "choices": [choice]} for choice in choices]
