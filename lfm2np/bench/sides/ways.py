"""Ways to answer a few prompts, from recomputing everything to continuous batching, with the same engine.

So that the gain of each is the way's, not that of other code. All choose greedily, and no token ends an answer: the
lengths are given. The experiment is that of a PyTorch LFM2 pipeline (github.com/marvinmboya/LFMs-continuous-batching):
five short prompts on a CPU, answers of different lengths.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from lfm2np.bench.sides.engines import greedy, make_engine, random_prompt
from lfm2np.loading import Model

WITHOUT_CACHE, ONE_BY_ONE, PADDED, CONTINUOUS = WAYS = ("without-cache", "one-by-one", "padded", "continuous")
PROMPT_LENGTHS = (8, 12, 17, 23, 31)
ANSWER_SHARES = (0.5, 0.75, 1.0, 0.625, 0.875)  # of the longest answer


def answer_lengths(longest: int) -> list[int]:
    return [max(1, round(longest * share)) for share in ANSWER_SHARES]


def recomputed_lengths(longest: int) -> list[int]:
    """Without a cache: the lengths of all sequences that are computed, one for each token of each answer."""
    pairs = zip(PROMPT_LENGTHS, answer_lengths(longest), strict=True)
    return [prompt + done for prompt, answer in pairs for done in range(answer)]


def answer_prompts(model: Model, way: str, longest: int) -> float:
    """Seconds to answer the five prompts in one of WAYS."""
    prompts = [random_prompt(model, length, seed) for seed, length in enumerate(PROMPT_LENGTHS)]
    answers = answer_lengths(longest)
    if way == PADDED:
        # A batch that is one rectangle: each row starts with the longest prompt and goes on to the longest answer.
        widest = max(PROMPT_LENGTHS)
        prompts = [[0] * (widest - len(prompt)) + prompt for prompt in prompts]
        answers = [max(answers)] * len(answers)
    began = time.perf_counter()
    if way in (PADDED, CONTINUOUS):
        answer_together(model, prompts, answers)
    else:
        for prompt, answer in zip(prompts, answers, strict=True):
            if way == ONE_BY_ONE:
                answer_together(model, [prompt], [answer])
            else:
                answer_without_cache(model, prompt, answer)
    return time.perf_counter() - began


def answer_together(model: Model, prompts: Sequence[list[int]], answers: Sequence[int]) -> list[tuple[int, ...]]:
    """All prompts at once through one engine; the answers."""
    longest = max(len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True))
    engine = make_engine(model, len(prompts), longest)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        engine.add_request(str(index), prompt, greedy(answer), cache_salt=str(index))
    ended = {output.request_id: output.outputs[0].token_ids for output in engine.stream() if output.finished}
    return [ended[str(index)] for index in range(len(prompts))]


def answer_without_cache(model: Model, prompt: Sequence[int], answer: int) -> tuple[int, ...]:
    """Each token from the whole sequence, computed anew; the answer."""
    ids = list(prompt)
    for _ in range(answer):
        ids += answer_together(model, [ids], [1])[0]
    return tuple(ids[len(prompt) :])
