"""Turns whatever an engine answered into an Answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.oracle.targets.records import Answer, Ask, answer_from_json

MOST_OF_A_MESSAGE = 1000  # characters of an engine's own words
NO_ABORT = "the engine can't abort a request"


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
    expected = len(ask.prompt_token_ids) - 1
    if answer.prompt_logprobs is not None and len(answer.prompt_logprobs) != expected:
        return failed(ask, f"prompt_logprobs: {len(answer.prompt_logprobs)} entries, expected {expected}", refuted=True)
    return answer


def failed(ask: Ask, why: str, refuted: bool = False) -> Answer:
    """An answer that can't be judged, and why, as one short line. `refuted`: no right engine gives such an answer."""
    return Answer(ask.id, error=shortened(why) or "an error without a message", refuted=refuted or None)


def shortened(text: str, most: int = MOST_OF_A_MESSAGE) -> str:
    """A text from outside as one line that is safe for a terminal."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * most]).split())
    return line if len(line) <= most else line[: most - 3] + "..."
