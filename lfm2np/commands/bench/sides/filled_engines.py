"""Engines of the sizes that a measurement needs, filled without computing what fills them; ways to answer with them.

The ways go from recomputing everything to continuous batching, with the same engine, so that the gain of each is the
way's. All choose greedily, and no token ends an answer: the lengths are given. The experiment is that of a PyTorch LFM2
pipeline (github.com/marvinmboya/LFMs-continuous-batching): five short prompts on a CPU, answers of different lengths.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import Model
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.step import Segment, StepResult, make_segments
from lfm2np.truth.layers import state_shape
from lfm2np.truth.weights import AttentionWeights
from scheduler import BatchPlan

Array = NDArray[Any]
Entries = list[tuple[Array, ...]]  # per attention layer [t, ...]
BLOCK_SIZE = 16


class FillableEngine(Engine):
    """An engine that takes random keys, values and states in the place of the network's while it is filled.

    They go into the cache as computed ones do, through `commit`, so blocks, slots and checkpoints are what a real
    prefill of the prompts would leave; that of 64 prompts of 1,024 tokens would take minutes, and no step's time
    depends on the numbers. All requests get the same ones, each into its own blocks.
    """

    fill: Entries | None = None

    def _compute(self, plan: BatchPlan) -> StepResult:
        return super()._compute(plan) if self.fill is None else random_step(self.model, plan, self.fill)


def random_step(model: LoadedModel, plan: BatchPlan, entries: Entries) -> StepResult:
    """What a step would return that computed these entries: states of ones, and logits that choose a token, for each
    request another, so that a mixture sends them to different experts."""
    config = model.config
    convolutions, columns, hidden = state_shape(config)
    logits: dict[str, Array] = {}
    segments: list[Segment] = make_segments(plan)
    for index, segment in enumerate(segments):
        count = len(segment.entry.token_ids)
        segment.entries = [tuple(array[:count] for array in layer) for layer in entries]
        segment.windows = [np.ones((columns + count, hidden), np.float32)] * convolutions
        rows = logits[segment.entry.request_id] = np.zeros(
            (segment.entry.stop - segment.entry.first_logits, config.vocab_size)
        )
        rows[:, 997 * index % config.vocab_size] = 1.0
    return StepResult({name: rows for name, rows in logits.items() if len(rows)}, {}, segments)


def random_entries(model: LoadedModel, count: int) -> Entries:
    """Keys and values of `count` tokens, per attention layer, in the form in which the cache holds them."""
    rng = np.random.default_rng(0)
    numerics = model.numerics

    def normal() -> Array:
        shape = (count, model.config.num_key_value_heads, model.config.head_dim)
        return numerics.embed(rng.standard_normal(shape, dtype=np.float32))

    operators = [layer.operator for layer in model.weights.layers]
    return [
        numerics.cache_entries(normal(), normal(), operator.scale)
        for operator in operators
        if isinstance(operator, AttentionWeights)
    ]


def make_engine(model: LoadedModel, requests: int, longest: int, step_tokens: int | None = None) -> FillableEngine:
    """Room for so many requests of at most `longest` tokens, all of them in one step or `step_tokens` at a time."""
    return FillableEngine(
        model,
        num_blocks=requests * -(-longest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=requests,
        max_num_batched_tokens=step_tokens or requests * longest,
        watermark=0.0,
    )


def random_prompt(model: LoadedModel, length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, model.config.vocab_size, length)]


def greedy(max_tokens: int) -> SamplingParams:
    """Of a request that gets exactly so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def decoding_engine(model: LoadedModel, requests: int, context: int, steps: int, fill: Entries) -> FillableEngine:
    """An engine whose requests have `context` tokens in the cache and may run for that many steps.

    All of its cache was written before, as in an engine that has run for a while: to map it at the first write takes a
    step of 64 requests longer than all else that it writes.
    """
    engine = make_engine(model, requests, context + steps)
    cache = engine.cache
    for array in (cache.states, cache.checkpoints, *(entries for layer in cache.blocks for entries in layer)):
        array.fill(0)
    for index in range(requests):
        engine.add_request(str(index), random_prompt(model, context, index), greedy(steps + 1))
    engine.fill = fill
    engine.step()
    engine.fill = None
    return engine


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
