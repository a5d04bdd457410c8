"""A provider on a port of this machine: what it answers is a function of the request and of how many came before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from http_player import Handler, playing

Play = Callable[[dict[str, Any], int], tuple[int, Any]]


def chat(text: str, ids: list[int] | None = None, finish_reason: str = "stop") -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    token_ids = {} if ids is None else {"token_ids": ids}
    usage = {"prompt_tokens": 20, "completion_tokens": len(ids or text.split())}
    return {"choices": [choice | token_ids], "usage": usage}


@contextlib.contextmanager
def serving(play: Play, **headers: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the requests that came: body, headers and path."""
    requests: list[dict[str, Any]] = []

    def answer(handler: Handler) -> bool:
        path, fields, body = handler.server.seen[-1]
        if handler.command != "POST":
            return False
        requests.append({"body": body, "headers": fields, "path": path})
        status, content = play(body, len(requests) - 1)
        handler.say(content, status, **headers)
        return True

    with playing(lambda path, body: None) as player:
        player.trouble = answer
        yield player.url, requests
