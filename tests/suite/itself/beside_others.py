"""An engine of a few lines that gives other tokens to requests beside others.

Tokens are by arithmetic on the two before. Of log-probabilities it reports only those of the tokens that it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lfm2np.oracle.engines.records import Answer, Request

CERTAIN, LIKELY, OPEN = 0.0, -0.001, -1.5  # a token chosen with -1.5 may lead another by nothing


def tokens(prompt: Sequence[int], count: int, is_wrong: bool) -> list[int]:
    ids = [0, *prompt]
    for _ in range(count):
        ids.append(8 + (7 * ids[-1] + 11 * ids[-2] + is_wrong) % 200)
    return ids[-count:]


class Engine:
    lacks: ClassVar = {"samples", "stops", "sampling"}

    def __init__(self, logprob: float | None, is_right: bool = False) -> None:
        self.logprob, self.is_right = logprob, is_right

    def generate(self, requests: Sequence[Request]) -> list[list[Answer]]:
        is_wrong = len(requests) > 1 and not self.is_right
        return [[self.completion(each.prompt_token_ids, each.params.max_tokens or 1, is_wrong)] for each in requests]

    def completion(self, prompt: Sequence[int], count: int, is_wrong: bool) -> Answer:
        logprobs = None if self.logprob is None else (self.logprob,) * count
        return Answer(tuple(tokens(prompt, count, is_wrong)), finish_reason="length", logprobs=logprobs)


def factory(logprob: float | None, is_right: bool = False) -> Callable[[str, dict[str, Any]], Engine]:
    return lambda model, sizes: Engine(logprob, is_right)


right, likely, certain, undecided, silent = map(factory, (LIKELY, LIKELY, CERTAIN, OPEN, None), (True, *[False] * 4))
