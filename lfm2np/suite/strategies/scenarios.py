"""What is tried: models, requests, sizes of memory and steps, schedules. All of it is plain data that prints as Python.

Small numbers and few distinct tokens, so that prefixes are shared by chance, borders of blocks and chunks are met
often, and what Hypothesis shrinks to can be read. Where a strategy takes `lengths`, it draws at an engine's own sizes:
see lengths.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.engines.records import Request
from lfm2np.suite.strategies.lengths import ALPHABET, Lengths, common_text
from lfm2np.suite.strategies.tiny_models import AnyModel, Checkpoint, TinyModel
from scheduler import POLICIES

LONGEST_PROMPT, MOST_TOKENS, MOST_REQUESTS, MOST_SAMPLES = 14, 6, 5, 3
MOST_LONG_REQUESTS, MOST_LONG_SAMPLES, BLOCKS_OF_OUTPUT = 3, 2, 3
BLOCKS_SHARED, LEAST_CROWD, MOST_CROWD = 3, 9, 18
Op = tuple[Any, ...]  # ("add", i), ("step",), ("abort", i), ("preempt", i), ("fork", i, seed): i counts requests


@dataclass(frozen=True)
class Scenario:
    """Requests for one engine. `ops` is what happens, in order; afterwards it steps until nothing is left.

    With `any_noise` no drawn token is compared with the reference's, so an engine without its noise still draws.
    """

    model: AnyModel
    requests: tuple[Request, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    ops: tuple[Op, ...] = ()
    any_noise: bool = False


HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (3, 1))  # query heads, key/value heads
OF_ANY = {
    "layers": ("cA", "c", "A", "cc", "Ac", "ccAc"),
    "taps": (3, 2, 4, 1, 5),
    "head_dim": (4, 2),
    "feed_forward": (12, 7),
    "auto_adjust": (False, True),
    "conv_bias": (False, True),
    "tied": (False, True),
    "theta": (100.0, 10000.0),
    "eps": (1e-5, 0.1),
    "multiplier": (1.0, 1.5),
    "seed": (0, 1),
}
EXPERTS = ((4, 2), (3, 1), (12, 3), (5, 3), (2, 2), (1, 1))  # and how many of them for a token
OF_MIXTURES = {
    "expert_width": (4, 7),
    "dense_layers": (1, 0, 2),
    "expert_bias": (True, True, False),
    "normalised": (True, False),
    "scaling": (1.0, 2.5),
    "fused": (False, True),
}
ATTENTIONS = ("SA", "S", "AS", "A")  # what becomes of a layer with attention in an LFM3
OF_LFM3 = {
    "window": (3, 1, 2, 5, 17),
    "sandwich": (True, True, False),
    "gated": (True, True, False),
    "attention_bias": (False, True),
    "rotated": (0.5, 1.0),
    "local_theta": (10.0, 1000.0),
    "head_dim": (8, 4, 12),  # half of the pairs of 4 are one, whose frequency no theta changes
}
FAMILIES = (*("dense",) * 4, *("mixture",) * 2, "lfm3")


@st.composite
def models(draw: st.DrawFn, lengths: Lengths | None = None) -> TinyModel:
    """Every odd shape, each switch of routers and windows; with contexts of that length."""
    family = draw(st.sampled_from(FAMILIES))

    def some(fields: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        return {name: draw(st.sampled_from(values)) for name, values in fields.items()}

    heads, kv_heads = draw(st.sampled_from(HEADS))
    model = TinyModel(heads=heads, kv_heads=kv_heads, **some(OF_ANY))
    if lengths is not None:
        model = replace(model, positions=lengths.longest)
    if family == "mixture":
        experts, few = draw(st.sampled_from(EXPERTS))
        model = replace(model, experts=experts, experts_a_token=few, **some(OF_MIXTURES))
        return replace(model, dense_layers=min(model.dense_layers, len(model.layers) - 1))
    if family == "lfm3":
        layers = model.layers.replace("A", draw(st.sampled_from(ATTENTIONS)))
        return replace(model, lfm3=True, layers=layers, auto_adjust=False, **some(OF_LFM3))
    return model


def counts(lengths: Lengths, most: int) -> st.SearchStrategy[int]:
    """Numbers of tokens from 1 to `most`: a multiple of a block or a chunk, one more or one less."""
    units = st.sampled_from([min(size, most) for size in (lengths.block_size, lengths.chunk)])
    around = units.flatmap(lambda unit: st.integers(0, most // unit).map(lambda times: unit * times))
    return st.tuples(around, st.sampled_from([0, 1, -1])).map(lambda pair: max(1, min(most, sum(pair))))


@st.composite
def long_prompts(draw: st.DrawFn, lengths: Lengths, longest: int) -> tuple[int, ...]:
    """The beginning of one common text; in some, one token near the end of a block is another."""
    length = draw(counts(lengths, longest))
    ids = common_text(length)
    place = draw(counts(lengths, longest)) - 1 if draw(st.booleans()) else length
    return tuple(9 if index == place else token for index, token in enumerate(ids))


def prompts(longest: int = LONGEST_PROMPT) -> st.SearchStrategy[tuple[int, ...]]:
    """A few tokens, or the beginning of a long common text, at any length: also around borders of blocks and chunks."""
    common = common_text(longest)
    free = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=5).map(tuple)
    shared = st.tuples(st.integers(1, longest), st.lists(st.sampled_from(ALPHABET), max_size=2))
    return st.one_of(free, shared.map(lambda pair: (*common[: pair[0]], *pair[1])[:longest]))


def greedy_params(most_tokens: int = MOST_TOKENS) -> st.SearchStrategy[SamplingParams]:
    """No randomness, and nothing but what every engine has."""
    return st.builds(
        SamplingParams, temperature=st.just(0.0), max_tokens=st.integers(1, most_tokens), ignore_eos=st.just(True)
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
        frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
        presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
        logit_bias=st.sampled_from([None, {6: 2.0}]),
        banned_token_ids=st.sampled_from([(), (7,)]),
        allowed_token_ids=st.sampled_from([None, None, (0, 2, 3, 4, 5, 7, 9)]),
        stop_token_ids=st.sampled_from([(), (8, 9, 10), (2, 9)]),
        min_tokens=st.sampled_from([0, 1]),
        ignore_eos=st.booleans(),
        seed=st.sampled_from([None, 0, 1]),
        profile=st.sampled_from(["vllm", "transformers"]),
        logprobs=st.sampled_from([None, 0]),
        prompt_logprobs=st.sampled_from([None, 0]),
    )


@st.composite
def requests(
    draw: st.DrawFn,
    params: st.SearchStrategy[SamplingParams] | None = None,
    most: int = MOST_REQUESTS,
    lengths: Lengths | None = None,
) -> tuple[Request, ...]:
    """Requests named a, b, c, ..."""
    chosen = sampling_params() if params is None else params
    count = draw(st.integers(1, most if lengths is None else min(most, MOST_LONG_REQUESTS)))
    return tuple(draw(request("abcdefgh"[index], chosen, lengths)) for index in range(count))


@st.composite
def request(draw: st.DrawFn, name: str, params: st.SearchStrategy[SamplingParams], lengths: Lengths | None) -> Request:
    """One; at length it has a long prompt and a few new tokens, or the other way round, or is small."""
    kind = "small" if lengths is None else draw(st.sampled_from(["long prompt", "long prompt", "long output", "small"]))
    long = None if kind != "long prompt" else lengths
    prompt = draw(prompts() if long is None else long_prompts(long, long.longest - MOST_TOKENS))
    chosen = draw(params)
    if lengths is not None:
        chosen = replace(chosen, n=min(chosen.n, MOST_LONG_SAMPLES))
    if lengths is not None and kind == "long output":
        most = min(BLOCKS_OF_OUTPUT * lengths.block_size + 1, lengths.longest - len(prompt))
        chosen = replace(chosen, max_tokens=max(chosen.max_tokens or 1, draw(counts(lengths, most))))
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=chosen,
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from(["", "", "x", "y"])),
    )


@st.composite
def sizes(draw: st.DrawFn, lengths: Lengths | None = None, longest: int | None = None) -> dict[str, Any]:
    """Memory from "just fits the longest request" up; steps from one token up; every policy."""
    if lengths is None:
        block_size = draw(st.sampled_from([2, 1, 3, 5, 16]))
        least = -(-(LONGEST_PROMPT + 2 + MOST_TOKENS) // block_size)
        most_seqs, steps = 6, [64, 1, 2, 3, 5, 9]
    else:
        block_size, least = lengths.block_size, -(-(longest or lengths.longest) // lengths.block_size)
        most_seqs, steps = lengths.max_num_seqs, [lengths.chunk, lengths.chunk, max(1, lengths.chunk // 2 + 1)]
    return {
        "block_size": block_size,
        "num_blocks": least + draw(st.integers(0, 12)),
        "max_num_seqs": draw(st.integers(1, most_seqs)),
        "max_num_batched_tokens": draw(st.sampled_from(steps)),
        "policy": draw(st.sampled_from(tuple(POLICIES))),
        "prefix_caching": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.2])),
    }


@st.composite
def schedules(
    draw: st.DrawFn, count: int, kinds: tuple[str, ...] = ("abort", "preempt", "fork"), steps: int = 3
) -> tuple[Op, ...]:
    """Each request is added once, with steps in between; some are aborted, preempted or forked at any moment."""
    ops: list[Op] = []
    for index in range(count):
        ops.append(("add", index))
        for _ in range(draw(st.integers(0, steps))):
            if kinds and draw(st.integers(0, 3)) == 3:
                kind, whom = draw(st.sampled_from(kinds)), draw(st.integers(0, index))
                ops.append((kind, whom, draw(st.integers(0, 1))) if kind == "fork" else (kind, whom))
            else:
                ops.append(("step",))
    return tuple(ops)


@st.composite
def scenarios(
    draw: st.DrawFn,
    params: st.SearchStrategy[SamplingParams] | None = None,
    kinds: tuple[str, ...] = (),
    most: int = MOST_REQUESTS,
    lengths: Lengths | None = None,
) -> Scenario:
    """A whole run; `kinds` are the disturbances that it may contain."""
    chosen = draw(requests(params, most, lengths))
    steps = 3 if lengths is None else 3 + 2 * lengths.longest // lengths.chunk
    longest = max(LONGEST_PROMPT + 2 + MOST_TOKENS, *map(positions_of, chosen))
    memory = sizes(lengths, longest)
    return Scenario(draw(models(lengths)), chosen, draw(memory), draw(schedules(len(chosen), kinds, steps)))


@st.composite
def shared_prefixes(draw: st.DrawFn, lengths: Lengths) -> Scenario:
    """Requests whose prompts share one to three full blocks, and go on differently; some under a salt."""
    most = max(1, min(BLOCKS_SHARED, (lengths.longest - 2 * MOST_TOKENS) // lengths.block_size))
    blocks = draw(st.integers(1, most))
    tails = draw(
        st.lists(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=MOST_TOKENS), min_size=2, max_size=4)
    )
    prompts = [(*common_text(blocks * lengths.block_size), *tail)[: lengths.longest - MOST_TOKENS] for tail in tails]
    scenario = with_logprobs(draw, lengths, prompts, lengths.max_num_seqs)
    *others, last = scenario.requests
    salted = replace(last, cache_salt=draw(st.sampled_from(["", "", "x"])))
    return replace(scenario, requests=(*others, salted))


@st.composite
def crowds(draw: st.DrawFn, lengths: Lengths) -> Scenario:
    """More than eight small requests, which all run at once where the engine has the room."""
    batch = draw(st.lists(prompts(), min_size=LEAST_CROWD, max_size=MOST_CROWD))
    return with_logprobs(draw, lengths, batch, MOST_CROWD, steps=max(lengths.chunk, MOST_CROWD))


def with_logprobs(
    draw: st.DrawFn, lengths: Lengths, batch: Sequence[tuple[int, ...]], max_num_seqs: int, steps: int | None = None
) -> Scenario:
    """Greedy requests that are added together, with the log-probability of each token: what goes wrong in one shows.

    The memory holds all of them, in the engine's own blocks.
    """
    chosen = tuple(
        Request(f"r{index}", ids, replace(draw(greedy_params()), logprobs=0)) for index, ids in enumerate(batch)
    )
    memory = {
        "block_size": lengths.block_size,
        "num_blocks": sum(-(-positions_of(request) // lengths.block_size) + 1 for request in chosen),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": steps or draw(st.sampled_from([lengths.chunk, max(1, lengths.chunk // 2 + 1)])),
        "prefix_caching": True,
    }
    ops = tuple(("add", index) for index in range(len(chosen)))
    return Scenario(draw(models(lengths)), chosen, memory, ops)


def positions_of(request: Request) -> int:
    return len(request.prompt_token_ids) + (request.params.max_tokens or 0)


@st.composite
def poisoned(draw: st.DrawFn, most: int = MOST_REQUESTS, lengths: Lengths | None = None) -> Scenario:
    """Greedy requests, to a model whose last token makes any sequence that it stands in overflow."""
    model = replace(draw(models(lengths)), overflows=True, tied=False)
    return replace(draw(scenarios(greedy_params(), most=most, lengths=lengths)), model=model)


def size_of(example: Any) -> int:
    """How much there is to read in an example: requests, tokens, operations."""
    if isinstance(example, Scenario):
        return size_of(example.requests) + len(example.ops)
    if isinstance(example, Request):
        return 1 + len(example.prompt_token_ids) + (example.params.max_tokens or 0) * example.params.n
    if isinstance(example, tuple | list):
        return sum(map(size_of, example))
    return 0 if isinstance(example, Mapping | TinyModel | Checkpoint) else 1
