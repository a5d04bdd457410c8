"""LFM2 as a list of operations, each with the tensors it reads: what `locate` walks through.

An operation is named as its output is by transformers' modules. What runs between two modules has names of ours: `u`
and `gated` around the convolution, `q_rotated`, `k_rotated` and `attended` of attention, `residual` (what enters the
feed-forward's norm), `feed_forward.gated`. A mixture of experts has its own in mixture.py. Source: transformers 5.23,
models/lfm2/modeling_lfm2.py.

OPTIONAL tensors are looked at if they are dumped, and nothing is recomputed for lack of them: what a step found in the
caches (so that a wrong number that is stored is told from one that is computed), and attention's scores and weights.

T tokens, D hidden, H query heads, G key/value heads, E head_dim, F feed-forward, V vocabulary, L convolution taps, S
steps, C positions that a step sees (of a layer with a window, from its first row's window on). Tensors are [T, width];
`conv.state` is [S, (L-1)*D], `keys_read` and `values_read` are [sum of C, G*E].
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.stored import require_finite, widen
from lfm2np.oracle.locate import spread
from lfm2np.oracle.locate.mixture import MIXED, mixture_operations
from lfm2np.oracle.locate.operation import Operation, Oracle, at_precision, is_wanted, product
from lfm2np.oracle.locate.patterns import STEP, Context
from lfm2np.oracle.locate.spread import Measured, joined_rows
from lfm2np.truth.config import CONV, SLIDING, ModelConfig
from lfm2np.truth.rope import Rope, angles, rotary_table

Array = NDArray[Any]

OPTIONAL = ("conv.state", "self_attn.keys_read", "self_attn.values_read", "self_attn.scores", "self_attn.weights")


def operations(config: ModelConfig, dumped: Container[str] | None = None) -> list[Operation]:
    """All of them, in the model's order; of the OPTIONAL those in `dumped` alone, if it is given."""
    hidden, before = config.hidden_size, "model.embed_tokens"
    steps = [Operation(before, "embedding rows of the token ids", (), hidden, embed)]
    for index in range(config.num_hidden_layers):
        steps += layer_operations(config, index, before, dumped)
        before = steps[-1].name
    last = norm("model.embedding_norm", "final norm", before, hidden)
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return [*steps, last, product("lm_head", "product with the head's weights", last.name, config.vocab_size, head)]


def layer_operations(
    config: ModelConfig, index: int, before: str, dumped: Container[str] | None
) -> Iterator[Operation]:
    """Those of one layer, whose input is the tensor `before`."""
    prefix, hidden, add = f"model.layers.{index}", config.hidden_size, at_precision(spread.add)
    is_conv, residual, normed = config.layer_types[index] == CONV, f"{prefix}.residual", f"{prefix}.operator_norm"
    yield norm(normed, "norm before the operator", before, hidden)
    yield from (conv_operations if is_conv else attention_operations)(config, index, normed, dumped)
    mixed = f"{prefix}.{'conv' if is_conv else 'self_attn'}.out_proj"
    if config.use_sandwich_norm:
        yield norm(f"{prefix}.post_operator_norm", "norm of the operator's output", mixed, hidden)
        mixed = f"{prefix}.post_operator_norm"
    yield Operation(residual, "operator's output plus the layer's input", (mixed, before), hidden, add)
    normed = f"{prefix}.ffn_norm"
    yield norm(normed, "norm before the feed-forward", residual, hidden)
    is_sparse = config.is_sparse(index)
    yield from (
        mixture_operations(config, index, normed, dumped) if is_sparse else gated_operations(config, index, normed)
    )
    output = f"{prefix}.feed_forward.{MIXED if is_sparse else 'w2'}"
    if config.use_sandwich_norm:
        yield norm(f"{prefix}.post_ffn_norm", "norm of the feed-forward's output", output, hidden)
        output = f"{prefix}.post_ffn_norm"
    yield Operation(prefix, "feed-forward's output plus what entered its norm", (residual, output), hidden, add)


def norm(name: str, words: str, source: str, width: int) -> Operation:
    return Operation(name, words, (source,), width, partial(norm_of, name))


def gated_operations(config: ModelConfig, index: int, normed: str) -> Iterator[Operation]:
    mlp, size = f"model.layers.{index}.feed_forward", config.feed_forward_size
    gate, up, gated = f"{mlp}.w1", f"{mlp}.w3", f"{mlp}.gated"
    yield product(gate, "feed-forward's projection w1", normed, size)
    yield product(up, "feed-forward's projection w3", normed, size)
    yield Operation(gated, "silu(w1) * w3", (gate, up), size, at_precision(spread.gated))
    yield product(f"{mlp}.w2", "feed-forward's projection w2", gated, config.hidden_size)


def conv_operations(config: ModelConfig, index: int, normed: str, dumped: Container[str] | None) -> Iterator[Operation]:
    prefix, hidden = f"model.layers.{index}.conv", config.hidden_size
    joined, u, mixed, gated = (f"{prefix}.{part}" for part in ("in_proj", "u", "conv", "gated"))
    parts = ("gate_in", "gate_out", "value")
    yield product(joined, "projection to gate_in, gate_out and value", normed, 3 * hidden, parts=parts)
    yield Operation(u, "gate_in * value", (joined,), hidden, gated_input)
    inputs: tuple[str, ...] = (u,)
    state, columns = f"{prefix}.state", config.conv_L_cache - 1
    if columns and is_wanted(state, dumped):
        words = "what the step found of the convolution's last inputs (its state)"
        back = tuple(f"{n} token{'s' if n > 1 else ''} before" for n in range(columns, 0, -1))
        yield Operation(state, words, (u,), columns * hidden, found_state, parts=back, per=STEP)
        inputs = (u, state)
    yield Operation(mixed, "the convolution", inputs, hidden, partial(convolution, mixed))
    yield Operation(gated, "gate_out * the convolution's output", (joined, mixed), hidden, gated_output)
    yield product(f"{prefix}.out_proj", "the convolution's output projection", gated, hidden)


def attention_operations(
    config: ModelConfig, index: int, normed: str, dumped: Container[str] | None
) -> Iterator[Operation]:
    prefix, head_dim, window = f"model.layers.{index}.self_attn", config.head_dim, window_of(config, index)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width, kv_width = heads * head_dim, kv_heads * head_dim
    parts = (("q", "queries", heads, width), ("k", "keys", kv_heads, kv_width), ("v", "values", kv_heads, kv_width))
    for part, noun, count, size in parts:
        yield product(f"{prefix}.{part}_proj", f"projection to {noun}", normed, size, heads=count)
    for part, noun, count, size in parts[:2]:
        name, source = f"{prefix}.{part}_layernorm", f"{prefix}.{part}_proj"
        compute = partial(head_norm, name, count)
        yield Operation(name, f"per-head norm of the {noun}", (source,), size, compute, count)
    for part, noun, count, size in parts[:2]:
        name, source = f"{prefix}.{part}_rotated", f"{prefix}.{part}_layernorm"
        compute = partial(rotation, config.rope(config.layer_types[index]))
        yield Operation(name, f"rotation of the {noun}", (source,), size, compute, count)
    sources = []
    for noun, source in (("keys", f"{prefix}.k_rotated"), ("values", f"{prefix}.v_proj")):
        read, words = f"{prefix}.{noun}_read", f"{noun} as the step found them in the cache"
        is_read, find = is_wanted(read, dumped), partial(found_rows, window)
        if is_read:
            yield Operation(read, words, (source,), kv_width, find, kv_heads, per=Context(window))
        sources.append(read if is_read else source)
    keys, values = sources
    yield from mixing_operations(config, index, keys, values, dumped)
    mixed = f"{prefix}.attended"
    if config.use_attention_gate:
        gates, gate, gated = f"{prefix}.g_proj", f"{prefix}.gate", f"{prefix}.gated"
        yield product(gates, "projection to the heads' gates", normed, heads)
        yield Operation(gate, "sigmoid of the heads' gates", (gates,), heads, at_precision(spread.sigmoid))
        yield Operation(gated, "each head's output times its gate", (mixed, gate), width, gated_heads, heads)
        mixed = gated
    yield product(f"{prefix}.out_proj", "attention's output projection", mixed, config.hidden_size)


def window_of(config: ModelConfig, index: int) -> int | None:
    return config.sliding_window if config.layer_types[index] == SLIDING else None


def mixing_operations(
    config: ModelConfig, index: int, keys: str, values: str, dumped: Container[str] | None
) -> Iterator[Operation]:
    """From queries and these keys and values to attention's output, through what is dumped of scores and weights."""
    prefix, heads, window = f"model.layers.{index}.self_attn", config.num_attention_heads, window_of(config, index)
    inputs: tuple[str, ...] = (f"{prefix}.q_rotated", keys)
    words = "causal attention" + ("" if window is None else f" to the last {window} positions")
    scores, weights = f"{prefix}.scores", f"{prefix}.weights"
    first, then = partial(scores_of, window), partial(shares_of, window)
    steps: list[Callable[..., Measured]] = [first, then]
    if is_wanted(scores, dumped):
        text = "scores: products of queries and keys, scaled"
        yield Operation(scores, text, inputs, heads, first, heads, by_position=True)
        inputs, words, steps = (scores,), "softmax of the scores, then weighted values", [then]
    if is_wanted(weights, dumped):
        text = "softmax of the scores" if len(steps) == 1 else "scores, then their softmax"
        yield Operation(weights, text, inputs, heads, partial(chained, steps), heads, by_position=True)
        inputs, words, steps = (weights,), "values, weighted", []
    compute = partial(attention, window) if len(steps) == 2 else partial(weighted, window, steps)
    yield Operation(f"{prefix}.attended", words, (*inputs, values), heads * config.head_dim, compute, heads)


# --- what each computes: oracle and inputs [T, width] -> [T, width]


def embed(oracle: Oracle) -> Measured:
    stored = oracle.tensors["model.embed_tokens.weight"]
    require_finite(stored)
    return spread.embed(widen(stored.values[oracle.token_ids], stored.dtype), oracle.precision)


def norm_of(name: str, oracle: Oracle, x: Measured) -> Measured:
    return spread.rms_norm(x, oracle.vector(name), oracle.config.norm_eps, oracle.precision)


def head_norm(name: str, heads: int, oracle: Oracle, x: Measured) -> Measured:
    tokens = len(x.values)
    return norm_of(name, oracle, x.reshape(tokens, heads, -1)).reshape(tokens, -1)


def thirds(joined: Measured) -> Sequence[Measured]:
    """gate_in, gate_out and value, each [T, D]."""
    size = joined.values.shape[1] // 3
    return [joined[:, start : start + size] for start in (0, size, 2 * size)]


def gated_input(oracle: Oracle, joined: Measured) -> Measured:
    gate_in, _, value = thirds(joined)
    return spread.multiply(gate_in, value, oracle.precision)


def gated_output(oracle: Oracle, joined: Measured, mixed: Measured) -> Measured:
    _, gate_out, _ = thirds(joined)
    return spread.multiply(gate_out, mixed, oracle.precision)


def found_state(oracle: Oracle, u: Measured) -> Measured:
    """[S, (L-1)*D]: the last L-1 rows of u [T, D] before each step, the oldest first, zeros before the first token."""
    columns = oracle.config.conv_L_cache - 1
    padded = u.behind_zeros(columns)
    return joined_rows([padded[start : start + columns].reshape(1, -1) for start in oracle.steps.starts])


def convolution(name: str, oracle: Oracle, u: Measured, state: Measured | None = None) -> Measured:
    """Of u [T, D]; if `state` is there, each step's rows after what the step found."""
    taps, bias, precision = oracle.vector(name)[:, 0, :], oracle.bias(name), oracle.precision
    if state is None:
        return spread.convolve(u, taps, bias, precision)
    columns, first = taps.shape[1] - 1, oracle.steps.first
    outputs = [spread.convolve(u[:first], taps, bias, precision)] if first else []
    for number, span in enumerate(oracle.steps.spans()):
        history = state[number].reshape(columns, -1)
        outputs.append(spread.convolve(u[span], taps, bias, precision, history))
    return joined_rows(outputs)


def gated_heads(oracle: Oracle, mixed: Measured, gates: Measured) -> Measured:
    """[T, H*E] by gates [T, H]."""
    wide = Measured(*(np.repeat(array, oracle.config.head_dim, axis=1) for array in (gates.values, gates.spread)))
    return spread.multiply(mixed, wide, oracle.precision)


def rotation(rope: Rope, oracle: Oracle, heads: Measured) -> Measured:
    config, tokens = oracle.config, len(oracle.token_ids)
    positions = np.arange(tokens)
    cos, sin = rotary_table(positions, config.head_dim, rope)
    theta = angles(positions, config.head_dim, rope).astype(np.float64)
    shaped = heads.reshape(tokens, -1, config.head_dim)
    return spread.rotate(shaped, cos, sin, theta, oracle.precision).reshape(tokens, -1)


def found_rows(window: int | None, oracle: Oracle, rows: Measured) -> Measured:
    """Of rows [T, width] those that each step sees, one step after another, behind those that came before all steps."""
    return joined_rows([rows[: oracle.steps.first], *(rows[seen] for seen in oracle.steps.seen(window))])


def per_step(
    window: int | None, oracle: Oracle, queries: Measured, *cached: Measured
) -> Iterator[tuple[slice, list[Measured]]]:
    """The positions that each step sees; its queries, then keys or values there: of [T, width], or of what
    `found_rows` says.

    What came before the steps sees itself.
    """
    tokens, before, read = len(oracle.token_ids), slice(0, oracle.steps.first), 0
    spans, views = [before, *oracle.steps.spans()], [before, *oracle.steps.seen(window)]
    for span, seen in zip(spans, views, strict=True):
        stored = slice(read, read + seen.stop - seen.start)
        read = stored.stop
        if span.stop > span.start:
            views_of_step = [rows[seen if len(rows.values) == tokens else stored] for rows in cached]
            yield seen, [queries[span], *views_of_step]


def attention(window: int | None, oracle: Oracle, queries: Measured, keys: Measured, values: Measured) -> Measured:
    outputs = []
    for _, step in per_step(window, oracle, queries, keys, values):
        asking, keys_read, values_read = (by_heads(oracle, rows) for rows in step)
        outputs.append(spread.attend(asking, keys_read, values_read, oracle.precision, window))
    return joined_rows(outputs).reshape(len(oracle.token_ids), -1)


def scores_of(window: int | None, oracle: Oracle, queries: Measured, keys: Measured) -> Measured:
    """[T, H*T], 0 behind each row's own position and before its window."""
    tokens, rows = len(oracle.token_ids), []
    for seen, (asking, read) in per_step(window, oracle, queries, keys):
        scores = spread.scores(by_heads(oracle, asking), by_heads(oracle, read), oracle.precision, window)  # [t, H, C]
        rows.append(scores.widened(seen.start, tokens).reshape(len(asking.values), -1))
    return joined_rows(rows)


def shares_of(window: int | None, oracle: Oracle, scores: Measured) -> Measured:
    tokens = len(oracle.token_ids)
    return spread.shares(scores.reshape(tokens, -1, tokens), oracle.precision, window).reshape(tokens, -1)


def chained(steps: Sequence[Callable[..., Measured]], oracle: Oracle, *inputs: Measured) -> Measured:
    for compute in steps:
        inputs = (compute(oracle, *inputs),)
    return inputs[0]


def weighted(
    window: int | None, steps: Sequence[Callable[..., Measured]], oracle: Oracle, given: Measured, values: Measured
) -> Measured:
    """Values [T, G*E] times weights [T, H*T], or times what `steps` make weights of."""
    tokens, outputs = len(oracle.token_ids), []
    for seen, (asking, read) in per_step(window, oracle, chained(steps, oracle, given), values):
        weights = asking.reshape(len(asking.values), -1, tokens)[:, :, seen]
        outputs.append(spread.mix(weights, by_heads(oracle, read), oracle.precision))
    return joined_rows(outputs).reshape(tokens, -1)


def by_heads(oracle: Oracle, rows: Measured) -> Measured:
    return rows.reshape(len(rows.values), -1, oracle.config.head_dim)
