"""Engines that end their answers wrongly, each in one function: behind Python, a process and a server.

python wrong_answers.py WAY    # speaks the protocol of exec:
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from http_player import model, playing, said

from lfm2np.oracle.engines.exec_server import serve
from lfm2np.oracle.engines.records import Answer, Request, changed, greedy


def asked_of(prompt: Sequence[int], max_tokens: int, stop: Sequence[str] | None) -> Request:
    return greedy("q", prompt, max_tokens, stop=tuple(stop or ()))


def right(asked: Request) -> Answer:
    return said(asked.prompt_token_ids, asked.max_tokens, tuple(asked.params.stop))


def whole(asked: Request) -> Answer:
    return right(changed(asked, stop=()))


def ended(asked: Request, reason: str | None) -> Answer:
    return replace(right(asked), finish_reason=reason)


def cut(asked: Request, reason: str | None) -> Answer:
    """The first half of it."""
    whole = right(asked)
    half = len(whole.token_ids) // 2 or 1
    ids, logprobs = whole.token_ids[:half], (whole.logprobs or ())[:half]
    return Answer(ids, finish_reason=reason, logprobs=logprobs, text=model().tokenizer.decode(ids))


def one_token_more(asked: Request) -> Answer:
    more, count = whole(asked), min(len(right(asked).token_ids) + 1, asked.max_tokens)
    return replace(right(asked), token_ids=more.token_ids[:count], logprobs=(more.logprobs or ())[:count])


def refuses(asked: Request) -> Answer:
    if asked.stop is not None:
        raise ValueError("no stop strings")
    return right(asked)


STOPPED = itertools.count()
WAYS: dict[str, Callable[[Request], Answer]] = {
    "right": right,
    "no-reason": partial(ended, reason=None),
    "early-stop": lambda asked: cut(asked, "stop") if asked.max_tokens > 1 else right(asked),
    "aborted": partial(ended, reason="abort"),
    "cut-abort": partial(cut, reason="abort"),
    "cut-length": partial(cut, reason="length"),
    "cut-filter": partial(cut, reason="content_filter"),
    "cut-none": partial(cut, reason=None),
    "error": lambda asked: cut(asked, "error") if len(asked.prompt_token_ids) > 3 else right(asked),
    "ignores-stops": whole,
    "ignores-stops-without-text": lambda asked: replace(whole(asked), text=None),
    "ignores-every-other-stop": lambda asked: right(asked) if asked.stop and next(STOPPED) % 2 else whole(asked),
    "left-in-the-text": lambda asked: replace(right(asked), text=model().tokenizer.decode(right(asked).token_ids)),
    "only-the-text-ends": lambda asked: replace(
        right(asked), token_ids=whole(asked).token_ids, logprobs=whole(asked).logprobs
    ),
    "one-token-more": one_token_more,
    "refuses-stops": refuses,
    "lacks-stops": whole,
}


class Wrong:
    """Level a of lfm2np/oracle/engines/protocol.py."""

    def __init__(self, way: str) -> None:
        self.way = WAYS[way]
        self.lacks = {"sampling", "samples", *(["stop-strings"] if way == "lacks-stops" else [])}

    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        return [[self.completion(request)] for request in requests]

    def completion(self, request: Request) -> Answer:
        if request.params.temperature:
            raise ValueError("greedy only")
        return self.way(asked_of(request.prompt_token_ids, request.max_tokens, request.params.stop))


@contextlib.contextmanager
def serving(way: str) -> Iterator[str]:
    """The URL of a server in vLLM's dialect."""

    def play(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        stop = body.get("stop")
        if path != "/v1/completions" or body["temperature"] or body.get("stream") or (stop and way == "lacks-stops"):
            return None
        try:
            answer = WAYS[way](asked_of(body["prompt"], body["max_tokens"], stop))
        except ValueError:
            return None
        tokens = [f"token_id:{token}" for token in answer.token_ids]
        logprobs = {"tokens": tokens, "token_logprobs": answer.logprobs}
        choice = {"token_ids": answer.token_ids, "logprobs": logprobs, "text": answer.text}
        return {"choices": [{**choice, "finish_reason": answer.finish_reason}]}

    with playing(play) as player:
        yield player.url


if __name__ == "__main__":
    serve(lambda path, sizes: Wrong(sys.argv[1]))
