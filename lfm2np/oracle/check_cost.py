"""What long requests will cost, before they are sent: tokens of the engine and the truth, and estimated seconds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lfm2np.engine import ragged
from lfm2np.engine.loading import Model
from lfm2np.oracle.engines.records import Request
from lfm2np.oracle.workloads import LONG, left_out_lengths
from lfm2np.truth.weights import AttentionWeights

SHORT, SEEN = 128, 2048  # tokens of the measured pass; positions that the measured queries see
QUERIES = 32
UNKNOWN = -1  # a token of a response


@dataclass(frozen=True)
class Cost:
    """Of the requests of the case `long`."""

    requests: int
    engine_tokens: int  # of all prompts: an engine with a prefix cache computes little more than truth_tokens
    truth_tokens: int  # what prompts begin with alike is counted once, unless the model has experts
    longest: int  # tokens of the longest request, its response included
    seconds: float  # estimated, of the truth on this machine


def cost_of(model: Model, requests: Sequence[Request]) -> Cost | None:
    """None if no request is long. Takes a fraction of a second to measure; seconds for a large model."""
    sequences = sorted(
        {(*request.prompt_token_ids, *[UNKNOWN] * request.max_tokens) for request in requests if request.case == LONG}
    )
    if not sequences:
        return None
    shared = [0]  # of each sequence, tokens that the one before it has
    for before, ids in itertools.pairwise(sequences):
        shared.append(0 if model.config.sparse_layers else ragged.common_prefix(before, ids))
    spans = [(first, len(ids)) for first, ids in zip(shared, sequences, strict=True)]
    prompts = [len(request.prompt_token_ids) for request in requests if request.case == LONG]
    return Cost(
        requests=len(prompts),
        engine_tokens=sum(prompts),
        truth_tokens=sum(stop - first for first, stop in spans),
        longest=max(stop for _, stop in spans),
        seconds=seconds_of(model, spans),
    )


def seconds_of(model: Model, spans: Sequence[tuple[int, int]]) -> float:
    """Of a pass over rows `first` to `stop` of sequences: matrix products by the token, attention by the pairs of a
    query and a position that it sees. Both are measured here, on few tokens.
    """
    token_ids = np.random.Generator(np.random.Philox(key=[0, 7])).integers(0, model.config.vocab_size, SHORT)
    short = min(SHORT, model.config.max_position_embeddings)
    ids = token_ids[:short].tolist()
    each_token = timed(lambda: ragged.hidden_states(model.weights, model.config, model.numerics, [ids])) / short
    seconds = each_token * sum(stop - first for first, stop in spans)
    measured: dict[int | None, float] = {}  # by window
    for layer in model.weights.layers:
        if isinstance(layer.operator, AttentionWeights):
            window = layer.operator.scale.window
            if window not in measured:
                measured[window] = 0.0 if window is not None else each_pair(model, layer.operator)
            seconds += measured[window] * sum((stop * stop - first * first) / 2 for first, stop in spans)
    return seconds


def each_pair(model: Model, weights: AttentionWeights) -> float:
    """Seconds of attention for a query and a position of one layer."""
    config = model.config
    drawn = np.random.Generator(np.random.Philox(key=[0, 8]))
    queries = drawn.standard_normal((QUERIES, config.num_attention_heads, config.head_dim), np.float32)
    keys, values = drawn.standard_normal((2, SEEN, config.num_key_value_heads, config.head_dim), np.float32)
    return timed(lambda: model.numerics.attend(queries, keys, values, weights.scale)) / (QUERIES * SEEN)


def timed(compute: Callable[[], object]) -> float:
    """Seconds, the second time: the first allocates memory."""
    compute()
    began = time.perf_counter()
    compute()
    return time.perf_counter() - began


def cost_lines(cost: Cost, positions: int) -> list[str]:
    """In words, one sentence a line."""
    left_out = left_out_lengths(positions)
    lines = [
        f"long: {cost.requests} requests of up to {cost.longest} tokens; {cost.engine_tokens} prompt tokens for the "
        "engine, fewer with a prefix cache",
        f"long: {cost.truth_tokens} tokens for the truth, shared beginnings once: about {words(cost.seconds)} here, "
        "and about as long for each of the 1 to 8 emulated engines",
    ]
    if left_out:
        lines.append(f"long: lengths left out: {', '.join(map(str, left_out))}, beyond {positions} positions")
    return lines


def words(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
