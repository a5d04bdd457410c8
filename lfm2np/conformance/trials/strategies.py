"""What is tried: models, requests, sizes of memory and steps, schedules. All of it is plain data that prints as Python.

Small numbers and few distinct tokens, so that prefixes are shared by chance, borders of blocks and chunks are met
often, and what Hypothesis shrinks to can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from lfm2np.conformance.protocol import Request
from lfm2np.conformance.trials.models import TinyModel
from lfm2np.sampling.params import SamplingParams

ALPHABET = (3, 4, 5)  # token ids of prompts
LONGEST_PROMPT, MOST_TOKENS, MOST_REQUESTS, MOST_SAMPLES = 14, 6, 5, 3
PLAIN_FIELDS = ("temperature", "n", "max_tokens", "stop_token_ids", "ignore_eos", "seed", "logprobs", "prompt_logprobs")
Op = tuple[Any, ...]  # ("add", i), ("step",), ("abort", i), ("preempt", i), ("fork", i, seed): i counts requests


@dataclass(frozen=True)
class Scenario:
    """Requests for one engine. `ops` is what happens, in order; afterwards it steps until nothing is left."""

    model: TinyModel
    requests: tuple[Request, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    ops: tuple[Op, ...] = ()


def models() -> st.SearchStrategy[TinyModel]:
    """Every odd shape: one kind of layer only, one to five taps, biases, grouped heads, tied and separate heads."""
    heads = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)])
    return st.builds(
        lambda pair, **others: TinyModel(heads=pair[0], kv_heads=pair[1], **others),
        heads,
        layers=st.sampled_from(["cA", "c", "A", "cc", "Ac", "ccAc"]),
        taps=st.sampled_from([3, 2, 4, 1, 5]),
        head_dim=st.sampled_from([4, 2]),
        feed_forward=st.sampled_from([12, 7]),
        auto_adjust=st.booleans(),
        conv_bias=st.booleans(),
        tied=st.booleans(),
        theta=st.sampled_from([100.0, 10000.0]),
        eps=st.sampled_from([1e-5, 0.1]),
        multiplier=st.sampled_from([1.0, 1.5]),
        seed=st.integers(0, 1),
    )


def prompts(longest: int = LONGEST_PROMPT) -> st.SearchStrategy[tuple[int, ...]]:
    """A few tokens, or the beginning of a long common text, at any length: also around borders of blocks and chunks."""
    common = (3, 4, 3, 5, 4, 3, 3, 5, 5, 4, 3, 4, 5, 3)
    free = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=5).map(tuple)
    shared = st.tuples(st.integers(1, longest), st.lists(st.sampled_from(ALPHABET), max_size=2))
    return st.one_of(free, shared.map(lambda pair: (*common[: pair[0]], *pair[1])[:longest]))


def greedy_params(most_tokens: int = MOST_TOKENS) -> st.SearchStrategy[SamplingParams]:
    """No randomness, and nothing but what every engine has."""
    return st.builds(
        SamplingParams,
        temperature=st.just(0.0),
        max_tokens=st.integers(1, most_tokens),
        ignore_eos=st.just(True),
    )


def sampling_params(most_samples: int = MOST_SAMPLES) -> st.SearchStrategy[SamplingParams]:
    """Greedy or drawn, any processor, several samples."""

    def build(temperature: float, n: int, **others: Any) -> SamplingParams:
        return SamplingParams(temperature=temperature, n=1 if temperature == 0.0 else n, **others)

    return st.builds(
        build,
        temperature=st.sampled_from([0.0, 1.0, 2.5]),
        n=st.integers(1, most_samples),
        max_tokens=st.integers(1, MOST_TOKENS),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.7]),
        min_p=st.sampled_from([0.0, 0.1]),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        logit_bias=st.sampled_from([None, {6: 2.0}]),
        banned_token_ids=st.sampled_from([(), (7,)]),
        allowed_token_ids=st.sampled_from([None, None, (0, 2, 3, 4, 5, 7, 9)]),
        stop_token_ids=st.sampled_from([(), (8, 9, 10)]),
        min_tokens=st.sampled_from([0, 1]),
        ignore_eos=st.booleans(),
        seed=st.sampled_from([None, 0, 1]),
        profile=st.sampled_from(["vllm", "transformers"]),
        logprobs=st.sampled_from([None, 0]),
        prompt_logprobs=st.sampled_from([None, 0]),
    )


@st.composite
def requests(
    draw: st.DrawFn, params: st.SearchStrategy[SamplingParams] | None = None, most: int = MOST_REQUESTS
) -> tuple[Request, ...]:
    """Requests named a, b, c, ..."""
    chosen = sampling_params() if params is None else params
    return tuple(
        Request(
            request_id="abcdefgh"[index],
            prompt_token_ids=draw(prompts()),
            params=draw(chosen),
            priority=draw(st.integers(0, 2)),
            cache_salt=draw(st.sampled_from(["", "", "x", "y"])),
        )
        for index in range(draw(st.integers(1, most)))
    )


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Memory from "just fits the longest request" up; steps from one token up; every policy."""
    block_size = draw(st.sampled_from([2, 1, 3, 5, 16]))
    least = -(-(LONGEST_PROMPT + 2 + MOST_TOKENS) // block_size)
    return {
        "block_size": block_size,
        "num_blocks": least + draw(st.integers(0, 12)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.sampled_from([64, 1, 2, 3, 5, 9])),
        "policy": draw(st.sampled_from(["fcfs", "priority", "prefill-first", "waiting-served", "static"])),
        "prefix_caching": draw(st.booleans()),
        "num_host_blocks": draw(st.sampled_from([0, 0, 6])),
        "watermark": draw(st.sampled_from([0.0, 0.2])),
    }


@st.composite
def schedules(draw: st.DrawFn, count: int, kinds: tuple[str, ...] = ("abort", "preempt", "fork")) -> tuple[Op, ...]:
    """Each request is added once, with steps in between; some are aborted, preempted or forked at any moment."""
    ops: list[Op] = []
    for index in range(count):
        ops.append(("add", index))
        for _ in range(draw(st.integers(0, 3))):
            ops.append(("step",))
            if kinds and draw(st.integers(0, 3)) == 3:
                kind, whom = draw(st.sampled_from(kinds)), draw(st.integers(0, index))
                ops.append((kind, whom, draw(st.integers(0, 1))) if kind == "fork" else (kind, whom))
    return tuple(ops)


@st.composite
def scenarios(
    draw: st.DrawFn,
    params: st.SearchStrategy[SamplingParams] | None = None,
    kinds: tuple[str, ...] = (),
    most: int = MOST_REQUESTS,
) -> Scenario:
    """A whole run; `kinds` are the disturbances that it may contain."""
    chosen = draw(requests(params, most))
    return Scenario(draw(models()), chosen, draw(sizes()), draw(schedules(len(chosen), kinds)))


def fit(example: Any, lacks: frozenset[str]) -> Any:
    """The example without what an engine lacks."""
    if isinstance(example, tuple):
        return tuple(fit(one, lacks) for one in example)
    if isinstance(example, TinyModel):
        attends = "A" in example.layers or "convolution-only" not in lacks
        return example if attends else replace(example, layers=example.layers + "A")
    if isinstance(example, Scenario):
        fitted = (fit(example.model, lacks), fit(example.requests, lacks))
        return replace(example, model=fitted[0], requests=fitted[1])
    if not isinstance(example, Request):
        return example
    params = example.params
    if "processors" in lacks:
        params = SamplingParams(**{name: getattr(params, name) for name in PLAIN_FIELDS})
    if "sampling" in lacks:
        params = replace(params, temperature=0.0, n=1)
    if "samples" in lacks:
        params = replace(params, n=1)
    if "stops" in lacks:
        params = replace(params, stop_token_ids=(), ignore_eos=True)
    return replace(example, params=params)


def size_of(example: Any) -> int:
    """How much there is to read in an example: requests, tokens, operations."""
    if isinstance(example, Scenario):
        return size_of(example.requests) + len(example.ops)
    if isinstance(example, Request):
        return 1 + len(example.prompt_token_ids) + (example.params.max_tokens or 0) * example.params.n
    if isinstance(example, tuple | list):
        return sum(map(size_of, example))
    return 0 if isinstance(example, Mapping | TinyModel) else 1
