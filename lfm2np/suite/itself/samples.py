"""Whether samples of a request are drawn with the same random numbers, by the log-probabilities of the engine itself.

The bet is that of a check with the truth (oracle/judging/drawn.py), which a right engine loses: its samples differ at
tokens of which it is uncertain. Nothing is bet where the first sample's token is the likeliest: an engine that draws
more narrowly than it reports, as servers do by their generation_config.json, repeats those as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lfm2np.oracle.engines.records import Answer, Pair, Request
from lfm2np.oracle.judging.drawn import ERROR, drawn_alike
from lfm2np.oracle.judging.scored import spoken
from lfm2np.oracle.judging.truth import Spoken, Truth
from lfm2np.suite.itself.pairs import reported


def samples_alike(
    pairs: Sequence[Pair], greedy: Sequence[Pair], nats: float, error: float = ERROR
) -> tuple[Request, str] | None:
    """The request by which it shows, and what shows; None if the engine may be right, with a probability of at least
    1 - error if it is.

    pairs   each request with each of its answers, one after another
    greedy  the same prompts, answered greedily
    nats    standard deviation of a log-probability's error
    """
    likeliest = {request.prompt_token_ids: answer.ids for request, answer in greedy}
    first: dict[tuple[int, ...], Pair] = {}  # by prompt: the same prompt may get the same samples again
    named: list[Pair] = []
    truths: dict[Spoken, Truth] = {}
    for request, answer in pairs:
        prompt = request.prompt_token_ids
        question, sample = first.setdefault(prompt, (request, answer))
        if question is request:
            named.append((replace(request, request_id=str(list(first).index(prompt))), answer))
            truths[spoken(request, answer)] = as_reported(request, answer, sample, likeliest.get(prompt, ()))
    scales = {(request.request_id, row): nats for request, _ in named for row in range(request.num_tokens)}
    found = drawn_alike(named, truths, scales, error)
    return None if found is None else (list(first.values())[int(found[0])][0], found[1])


def as_reported(request: Request, answer: Answer, first: Answer, likeliest: Sequence[int]) -> Truth:
    """Of each token its log-probability, and that of any other: two columns. A token is certain where nothing is bet,
    as it reports no log-probability, or the first sample's is the likeliest."""
    ids, chances = answer.ids, np.ones(answer.num_tokens)
    for index in range(min(len(ids), first.num_tokens)):
        here = reported(answer, index)
        if ids[index] in here and not is_likeliest(first, index, likeliest):
            chances[index] = math.exp(min(0.0, here[ids[index]]))
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.stack([chances, 1.0 - chances], axis=1))
    columns = np.array([(token, token + 1) for token in ids], np.int64)
    nothing = np.zeros(len(ids))
    return Truth(
        spoken(request, answer),
        columns,
        logprobs,
        best=columns[:, 0],
        squares=nothing,
        largest=nothing,
        vocab_size=columns.shape[1],
        first=len(request.prompt_token_ids) - 1,
    )


def is_likeliest(answer: Answer, index: int, likeliest: Sequence[int]) -> bool:
    """By the log-probabilities of others, if they are reported; else as long as it goes as the greedy answer does."""
    here, token = reported(answer, index), answer.ids[index]
    if len(here) > 1 and token in here:
        return max(here.values()) == here[token]
    return answer.ids[: index + 1] == tuple(likeliest[: index + 1])
