"""Sizes beyond those that examples are drawn from; whole sequences; the cache's arrays, which no token shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from internal_properties.internal import internal, require
from internal_properties.schedules import StrictRun, fork, preempt
from lfm2np.arithmetic import numerics_named
from lfm2np.arithmetic.attention import Span, attend_in_batches
from lfm2np.engine.cache import bytes_per_block, default_blocks, default_window_blocks, make_cache
from lfm2np.engine.uncached import hidden_states
from lfm2np.suite.adapters import own
from lfm2np.suite.properties.driver import generate, require_truth
from lfm2np.suite.schedulers.programs import PROMPT
from lfm2np.suite.strategies.scenarios import Scenario, greedy_params, models, prompts, scenarios
from lfm2np.suite.strategies.tiny_models import TinyModel, loaded
from lfm2np.truth.reference import output_logits
from scheduler import POLICIES, FinishReason, Request, Scheduler, SchedulerConfig
from scheduler.groups import groups_of

LONG = 700  # tokens
MANY = 560  # requests


@internal(
    "large-schedules",
    "With hundreds of requests, blocks and positions everything holds as with a few.",
    7,
    lambda: st.sampled_from(tuple(POLICIES)),
)
def large_schedule(policy: str) -> None:
    run = StrictRun(
        {
            "block_size": 2,
            "num_blocks": 1100,
            "max_num_seqs": 280,
            "max_num_batched_tokens": 3000,
            "policy": policy,
        }
    )
    run.add("long", PROMPT * (LONG // len(PROMPT)), 6, children=["long#1"])
    for index in range(MANY if policy == "fcfs" else MANY // 2):
        prompt = (*PROMPT[:2], index, *PROMPT[: 1 + index % 4])  # all share one block
        run.add(f"m{index}", prompt, 1 + index % 5, children=[] if index % 7 else [f"m{index}#1"])
    for turn in range(5):
        run.speculate(1, turn % 2)
        for which in range(0, 12, 3):
            fork(run, which, turn + 1)
        preempt(run, turn)
        run.add(f"again{turn}", (*PROMPT * 9, turn), 3)
        run.abort(list(run.live)[2 * turn], "finish")
    run.drain()


@internal(
    "long-outputs-end",
    "A request of hundreds of tokens ends with the last one that it may have.",
    7,
    lambda: st.sampled_from(tuple(POLICIES)),
)
def long_output(policy: str) -> None:
    subject = Scheduler(SchedulerConfig(num_blocks=200, block_size=2, policy=policy))
    request = Request("a", (1,), LONG // 2)
    subject.add(request)
    while not request.is_finished:
        plan = subject.schedule()
        drafts = {"a": [9]} if subject.step % 3 == 2 else {}
        plan = subject.add_drafts(plan, drafts)
        require(request.is_decoding, subject.step > 0, "is decoding:", f"step {subject.step}")
        subject.update(plan, {"a": [9] * (1 + plan.scheduled[0].num_drafts)})
    ending = request.num_output_tokens, request.finish_reason
    require(ending, (LONG // 2, FinishReason.LENGTH), "tokens, and the reason to end", policy)


@internal(
    "attention-in-pieces",
    "However attention cuts a prompt into pieces, every token and logit is the reference's.",
    1,
    lambda lengths=None: st.tuples(
        scenarios(greedy_params(), most=3, lengths=lengths), st.sampled_from((1, 100, 1000, 10_000))
    ),
    weight=1.5,
    at_length=True,
)
def attention_in_pieces(example: tuple[Scenario, int]) -> None:
    """So few bytes of scores at once that prompts are cut, as otherwise only those of thousands of tokens are."""
    scenario, scores = example
    with patch("lfm2np.arithmetic.attention.SCORES", scores):
        outcome = generate(own, scenario)
    require_truth(own, scenario, outcome)


@internal(
    "attention-is-cut-to-size",
    "Attention computes each query once, over what it may see, and as much at a time as a piece holds.",
    3,
    lambda: st.tuples(
        st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5),
        st.sampled_from([(2, 1), (4, 4), (6, 2)]),
        st.sampled_from(["float64", "float32"]),
        st.sampled_from([8, 300, 900, 3000, 10**6]),
    ),
    weight=3.0,
)
def attention_is_cut(example: tuple[list[tuple[int, int]], tuple[int, int], str, int]) -> None:
    """Requests as (tokens, positions before them), heads and groups, a dtype, and the bytes of scores in a piece."""
    requests, (heads, groups), dtype, scores = example
    most, rows, cached, first = scores // np.dtype(dtype).itemsize, [], [], 1
    seen: dict[int, int] = {}  # by row, the positions that it sees
    for tokens, before in requests:
        rows.append(slice(first, first + tokens))
        seen |= {first + index: before + index + 1 for index in range(tokens)}
        positions = np.arange(tokens + before, dtype=dtype)
        keys = np.broadcast_to(positions[:, None, None], (tokens + before, groups, 2))
        cached.append([(keys[at : at + 3], keys[at : at + 3]) for at in range(0, tokens + before, 3)])
        first += tokens + 1  # a row of nobody between them
    batches: list[list[Span]] = []

    def compute(queries: NDArray[Any], spans: list[Span]) -> list[NDArray[Any]]:
        batches.append(list(spans))
        return [np.full((span.tokens, heads, 2), span.context, dtype) for span in spans]

    with patch("lfm2np.arithmetic.attention.SCORES", scores):
        mixed = attend_in_batches(np.zeros((first, heads, 2), dtype), rows, cached, compute)[:, 0, 0]
    todo = [span for batch in batches for span in batch]
    require([row for span in todo for row in range(span.rows.start, span.rows.stop)], list(seen), "rows", "the step")
    for span in todo:
        require(span.context, seen[span.rows.stop - 1], "positions", span.rows)
        positions = np.concatenate([part[0][:, 0, 0] for part in span.parts])
        require(positions.tolist(), list(range(span.context)), "positions", span.rows)
        require(set(mixed[span.rows]), {span.context}, "result of", span.rows)
        (tokens, before) = next(each for each, mine in zip(requests, rows, strict=True) if span.rows.stop <= mine.stop)
        require(span.tokens == 1 or heads * span.tokens * (tokens + before) <= most, True, "small enough:", span.rows)
    require(int((mixed == 0).sum()), 1 + len(requests), "rows of nobody", "the step")
    for batch, after in zip(batches, [*batches[1:], None], strict=True):
        require(len(batch) == 1 or cells_of(batch, heads) <= most, True, "within a piece:", str(batch))
        if after is not None:
            require(cells_of([*batch, after[0]], heads) > most, True, "no more fits:", str(batch))


def cells_of(batch: list[Span], heads: int) -> int:
    return heads * sum(span.tokens for span in batch) * max(span.context for span in batch)


@internal(
    "whole-sequences-are-ragged",
    "Whole sequences in one flat batch have the reference's logits; one that overflows does so alone.",
    3,
    lambda: st.tuples(models(), st.lists(prompts(), min_size=1, max_size=4).map(tuple), st.booleans()),
    weight=4.0,
    bugs=("transformers 46588",),
)
def whole_sequences(example: tuple[TinyModel, tuple[tuple[int, ...], ...], bool]) -> None:
    tiny, sequences, overflows = example
    model = loaded(replace(tiny, overflows=overflows, tied=tiny.tied and not overflows))
    poison = tiny.vocab_size - 1
    if overflows:  # only attention tells; the logits are for the caller
        sequences = tuple((*ids, poison) if index == 1 else ids for index, ids in enumerate(sequences))
    states, runs = hidden_states(model.weights, model.config, model.numerics, sequences)
    require(len(runs), len(sequences), "runs", "sequences")
    for index, (one, ids) in enumerate(zip(runs, sequences, strict=True)):
        has_attention = "A" in tiny.layers[1:] or "S" in tiny.layers[1:]
        bad = poison in ids and has_attention  # the first layer's feed-forward is what overflows
        require(one.error is not None, bad, "overflows:", f"sequence {index}, {ids}")
        if poison not in ids:
            rows = output_logits(model.weights, model.numerics, states[one.rows])
            require(rows.tobytes() == model.logits(ids).tobytes(), True, "as alone:", f"sequence {index}, {ids}")


# --- the arrays of the cache

GIBIBYTE = 1024**3


@st.composite
def cache_sizes(draw: st.DrawFn) -> tuple[TinyModel, str, SchedulerConfig]:
    window = draw(st.sampled_from((None, 2, 5)))
    config = SchedulerConfig(
        num_blocks=draw(st.integers(1, 5)),
        block_size=draw(st.integers(1, 4)),
        max_num_seqs=draw(st.integers(1, 4)),
        prefix_caching=draw(st.booleans()),
        sliding_window=window,
        num_window_blocks=draw(st.integers(1, 5)) if window else 0,
    )
    windowed = st.sampled_from([TinyModel(lfm3=True, layers=layers) for layers in ("cSAc", "SSc", "SAS")])
    return (
        draw(windowed if window else models()),
        draw(st.sampled_from(("exact", "float32", "float64", "bfloat16"))),
        config,
    )


@internal(
    "cache-is-sized",
    "The cache has the arrays that the sizes ask for, and knows what they cost.",
    7,
    cache_sizes,
    weight=5.0,
    bugs=("SGLang 35270",),
)
def cache_is_sized(example: tuple[TinyModel, str, SchedulerConfig]) -> None:
    model, name, sizes = example
    config, numerics = loaded(model).config, numerics_named(name)
    cache = make_cache(config, numerics, sizes)
    attention = [kind for kind in config.layer_types if kind != "conv"]
    windowed = [kind == "sliding_attention" and sizes.sliding_window is not None for kind in attention]
    state = (len(config.layer_types) - len(attention), config.conv_L_cache - 1, config.hidden_size)
    require(cache.states.shape, (sizes.max_num_seqs, *state), "shape of the states", name)
    require(cache.checkpoints.shape, (sizes.num_blocks * sizes.prefix_caching, *state), "of the checkpoints", name)
    wide = name == "float64"
    require({one.dtype.itemsize for one in (cache.states, cache.checkpoints)}, {8 if wide else 4}, "bytes", name)
    require(list(cache.is_windowed), windowed, "layers in the pool of windows", name)
    counts = (sizes.num_blocks, sizes.num_window_blocks)
    require(len(cache.blocks), len(attention), "layers with keys and values", name)
    for is_windowed, layer in zip(windowed, cache.blocks, strict=True):
        for array in layer:
            require(array.shape[:2], (counts[is_windowed], sizes.block_size), "blocks and their size", name)
    require(cache == make_cache(config, numerics, sizes), False, "is another cache:", name)
    require(type(cache).__dataclass_params__.frozen, True, "is fixed:", name)  # type: ignore[attr-defined]
    pools: tuple[list[Any], list[Any]] = ([cache.checkpoints], [])
    for is_windowed, layer in zip(windowed, cache.blocks, strict=True):
        pools[is_windowed].extend(layer)
    one_block = sum(array.nbytes for array in pools[0]) // sizes.num_blocks
    require(bytes_per_block(config, numerics, sizes), one_block, "bytes of a block", name)
    in_windows = sum(array.nbytes for array in pools[1]) // max(1, sizes.num_window_blocks)
    require(bytes_per_block(config, numerics, sizes, in_windows=True), in_windows, "bytes of a window's block", name)
    if sizes.sliding_window is not None:
        require_default_windows(config, numerics, sizes)
    whole = -(-config.max_position_embeddings // sizes.block_size) * sizes.max_num_seqs
    fitting = whole if one_block == 0 else min(whole, GIBIBYTE // one_block)
    require(default_blocks(config, numerics, sizes), fitting, "blocks by default", name)


def require_default_windows(config: Any, numerics: Any, sizes: SchedulerConfig) -> None:
    """Room for any step of a request that the other pool has room for, and never more blocks than that has."""
    least = groups_of(sizes)[1].longest_span(10**9, sizes.max_num_batched_tokens)
    for num_blocks in (3, 10**6):
        blocks = default_window_blocks(config, numerics, sizes, num_blocks)
        require(min(least, num_blocks) <= blocks <= num_blocks, True, "blocks of windows by default:", blocks)


@internal(
    "memory-is-bounded",
    "Without being asked for a size, the cache takes at most a gibibyte, or one block.",
    7,
    lambda: st.sampled_from((1, 16, 2**40)),
)
def memory_is_bounded(example: int) -> None:
    """With contexts of a million tokens the blocks fill a gibibyte, but for less than one block; one is the least."""
    config, numerics = loaded(TinyModel()).config, numerics_named("exact")
    sizes = SchedulerConfig(num_blocks=1, block_size=example, max_num_seqs=10**7)
    one = bytes_per_block(config, numerics, sizes)
    require(default_blocks(config, numerics, sizes), max(1, GIBIBYTE // one), "blocks by default", example)
