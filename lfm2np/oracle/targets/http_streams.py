"""Server-sent events put together to the reply that the server would have given in one piece.

OpenAI's events (vLLM, mlx-lm) hold what is new of one choice; llama.cpp's hold what is new and, in the last, the
counts; SGLang's repeat what came before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.oracle.targets.checked import shortened
from lfm2np.oracle.targets.http_dialects import LLAMA, SGLANG, Dialect
from lfm2np.oracle.targets.http_replies import needed

GROWS = ("content", "tokens", "completion_probabilities")  # of llama.cpp's events


def whole_reply(dialect: Dialect, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """RequestError for no events, or such as can't be put together."""
    if not events:
        raise RequestError("a stream without an event")
    if dialect.name == SGLANG.name:
        return dict(events[-1])
    if dialect.name == LLAMA.name:
        return whole_llama(events)
    return whole_choices(events)


def whole_llama(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    whole = dict(events[-1])
    for name in GROWS:
        pieces = [event[name] for event in events if event.get(name)]
        if pieces:
            whole[name] = joined(pieces, name)
    return whole


def whole_choices(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All choices, by their index; counts from the event that has them."""
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
            grow(choices.setdefault(index, {}), choice)
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


def grow(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Texts and lists get longer, objects of lists too; anything else is the last that was told."""
    for name, value in piece.items():
        before = whole.get(name)
        if value is None or name in ("prompt_token_ids", "prompt_logprobs", "index"):
            whole[name] = value if before is None else before
        elif isinstance(value, dict) and isinstance(before, dict):
            grow(before, value)
        elif isinstance(value, str | list) and before is not None and name != "finish_reason":
            whole[name] = joined([before, value], name)
        else:
            whole[name] = dict(value) if isinstance(value, dict) else value


def joined(pieces: Sequence[Any], name: str) -> Any:
    kind = type(pieces[0])
    if kind not in (str, list) or any(type(piece) is not kind for piece in pieces):
        raise RequestError(f"{name}: expected texts, or lists, in all events")
    if kind is str:
        return "".join(pieces)
    return [one for piece in pieces for one in piece]


def choices_apart(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A reply of several choices as one reply each; the counts, which are of all, are left out where there are more."""
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) < 2:
        return [dict(reply)]
    rest = {name: value for name, value in reply.items() if name not in ("choices", "usage")}
    return [{**rest, "choices": [choice]} for choice in choices]
