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
from lfm2np.model.config import CONV, SLIDING, ModelConfig
from lfm2np.numerics.rope import Rope, angles, rotary_table
from lfm2np.oracle.locate import spread
from lfm2np.oracle.locate.mixture import MIXED, mixture_operations
from lfm2np.oracle.locate.operation import Operation, Oracle, at_precision, is_wanted, product, projection
from lfm2np.oracle.locate.patterns import STEP, Context
from lfm2np.oracle.locate.spread import Measured, joined_rows

Array = NDArray[Any]

OPTIONAL = ("conv.state", "self_attn.keys_read", "self_attn.values_read", "self_attn.scores", "self_attn.weights")


def operations(config: ModelConfig, dumped: Container[str] | None = None) -> list[Operation]:
    """All of them, in the model's order; of the OPTIONAL those in `dumped` alone, if it is given."""
    hidden, last = config.hidden_size, f"model.layers.{config.num_hidden_layers - 1}"
    made = [Operation("model.embed_tokens", "embedding rows of the token ids", None, (), hidden, embed)]
    for index, kind in enumerate(config.layer_types):
        before = made[-1].name
        made += layer_operations(config, index, kind, before, dumped)
    norm = "model.embedding_norm"
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    made.append(Operation(norm, "final norm", None, (last,), hidden, partial(norm_of, norm)))
    words, project = "product with the head's weights", partial(projection, head)
    made.append(product("lm_head", words, None, (norm,), config.vocab_size, project, weights=head))
    return made


def layer_operations(
    config: ModelConfig, index: int, kind: str, before: str, dumped: Container[str] | None
) -> Iterator[Operation]:
    """Those of one layer, whose input is the tensor `before`."""
    prefix, hidden, add = f"model.layers.{index}", config.hidden_size, at_precision(spread.add)
    norm, residual, mlp = f"{prefix}.operator_norm", f"{prefix}.residual", f"{prefix}.feed_forward"
    yield Operation(norm, "norm before the operator", index, (before,), hidden, partial(norm_of, norm))
    of_kind = conv_operations if kind == CONV else attention_operations
    yield from of_kind(config, index, norm, dumped)
    mixed = f"{prefix}.{'conv' if kind == CONV else 'self_attn'}.out_proj"
    if config.use_sandwich_norm:
        norm = f"{prefix}.post_operator_norm"
        yield Operation(norm, "norm of the operator's output", index, (mixed,), hidden, partial(norm_of, norm))
        mixed = norm
    yield Operation(residual, "operator's output plus the layer's input", index, (mixed, before), hidden, add)
    norm = f"{prefix}.ffn_norm"
    yield Operation(norm, "norm before the feed-forward", index, (residual,), hidden, partial(norm_of, norm))
    if config.is_sparse(index):
        yield from mixture_operations(config, index, norm, dumped)
        made = f"{mlp}.{MIXED}"
    else:
        yield from gated_operations(config, index, norm)
        made = f"{mlp}.w2"
    if config.use_sandwich_norm:
        norm = f"{prefix}.post_ffn_norm"
        yield Operation(norm, "norm of the feed-forward's output", index, (made,), hidden, partial(norm_of, norm))
        made = norm
    words = "feed-forward's output plus what entered its norm"
    yield Operation(prefix, words, index, (residual, made), hidden, add)


def gated_operations(config: ModelConfig, index: int, norm: str) -> Iterator[Operation]:
    mlp = f"model.layers.{index}.feed_forward"
    for part in ("w1", "w3"):
        name = f"{mlp}.{part}"
        words = f"feed-forward's projection {part}"
        yield product(name, words, index, (norm,), config.feed_forward_size, partial(projection, name))
    inputs, gated = (f"{mlp}.w1", f"{mlp}.w3"), f"{mlp}.gated"
    yield Operation(gated, "silu(w1) * w3", index, inputs, config.feed_forward_size, at_precision(spread.gated))
    down = partial(projection, f"{mlp}.w2")
    yield product(f"{mlp}.w2", "feed-forward's projection w2", index, (gated,), config.hidden_size, down)


def conv_operations(config: ModelConfig, index: int, norm: str, dumped: Container[str] | None) -> Iterator[Operation]:
    prefix, hidden = f"model.layers.{index}.conv", config.hidden_size
    joined, u, mixed = f"{prefix}.in_proj", f"{prefix}.u", f"{prefix}.conv"
    words, parts = "projection to gate_in, gate_out and value", ("gate_in", "gate_out", "value")
    yield product(joined, words, index, (norm,), 3 * hidden, partial(projection, joined), parts=parts)
    yield Operation(u, "gate_in * value", index, (joined,), hidden, gated_input)
    inputs: tuple[str, ...] = (u,)
    state, columns = f"{prefix}.state", config.conv_L_cache - 1
    if columns and is_wanted(state, dumped):
        words = "what the step found of the convolution's last inputs (its state)"
        back = tuple(f"{n} token{'s' if n > 1 else ''} before" for n in range(columns, 0, -1))
        yield Operation(state, words, index, (u,), columns * hidden, found_state, parts=back, per=STEP)
        inputs = (u, state)
    yield Operation(mixed, "the convolution", index, inputs, hidden, partial(convolution, mixed))
    gated, out = f"{prefix}.gated", f"{prefix}.out_proj"
    yield Operation(gated, "gate_out * the convolution's output", index, (joined, mixed), hidden, gated_output)
    yield product(out, "the convolution's output projection", index, (gated,), hidden, partial(projection, out))


def attention_operations(
    config: ModelConfig, index: int, norm: str, dumped: Container[str] | None
) -> Iterator[Operation]:
    prefix, head_dim = f"model.layers.{index}.self_attn", config.head_dim
    counts = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    called = {"q": "queries", "k": "keys", "v": "values"}
    for part, heads in counts.items():
        name, words = f"{prefix}.{part}_proj", f"projection to {called[part]}"
        yield product(name, words, index, (norm,), heads * head_dim, partial(projection, name), heads)
    for part in "qk":
        name, words, heads = f"{prefix}.{part}_layernorm", f"per-head norm of the {called[part]}", counts[part]
        compute = partial(head_norm, name, heads)
        yield Operation(name, words, index, (f"{prefix}.{part}_proj",), heads * head_dim, compute, heads)
    for part in "qk":
        name, words, heads = f"{prefix}.{part}_rotated", f"rotation of the {called[part]}", counts[part]
        compute = partial(rotation, config.rope(config.layer_types[index]))
        yield Operation(name, words, index, (f"{prefix}.{part}_layernorm",), heads * head_dim, compute, heads)
    keys, values, window = f"{prefix}.k_rotated", f"{prefix}.v_proj", window_of(config, index)
    for what, read in (("keys", f"{prefix}.keys_read"), ("values", f"{prefix}.values_read")):
        if is_wanted(read, dumped):
            words, source = f"{what} as the step found them in the cache", keys if what == "keys" else values
            width, compute = counts["k"] * head_dim, partial(found_rows, window)
            yield Operation(read, words, index, (source,), width, compute, counts["k"], per=Context(window))
            keys, values = (read, values) if what == "keys" else (keys, read)
    yield from mixing_operations(config, index, keys, values, dumped)
    mixed = f"{prefix}.attended"
    if config.use_attention_gate:
        heads, gate = counts["q"], f"{prefix}.gate"
        name = f"{prefix}.g_proj"
        yield product(name, "projection to the heads' gates", index, (norm,), heads, partial(projection, name))
        yield Operation(gate, "sigmoid of the heads' gates", index, (name,), heads, at_precision(spread.sigmoid))
        name, words = f"{prefix}.gated", "each head's output times its gate"
        yield Operation(name, words, index, (mixed, gate), heads * head_dim, gated_heads, heads)
        mixed = name
    out, words = f"{prefix}.out_proj", "attention's output projection"
    yield product(out, words, index, (mixed,), config.hidden_size, partial(projection, out))


def window_of(config: ModelConfig, index: int) -> int | None:
    return config.sliding_window if config.layer_types[index] == SLIDING else None


def mixing_operations(
    config: ModelConfig, index: int, keys: str, values: str, dumped: Container[str] | None
) -> Iterator[Operation]:
    """From queries and these keys and values to attention's output, through what is dumped of scores and weights."""
    prefix, heads = f"model.layers.{index}.self_attn", config.num_attention_heads
    inputs: tuple[str, ...] = (f"{prefix}.q_rotated", keys)
    window = window_of(config, index)
    width, words = heads * config.head_dim, "causal attention"
    if window is not None:
        words = f"causal attention to the last {window} positions"
    scores, weights = f"{prefix}.scores", f"{prefix}.weights"
    first, then = partial(scores_of, window), partial(shares_of, window)
    steps: list[Callable[..., Measured]] = [first, then]
    if is_wanted(scores, dumped):
        text = "scores: products of queries and keys, scaled"
        yield Operation(scores, text, index, inputs, heads, first, heads, by_position=True)
        inputs, words, steps = (scores,), "softmax of the scores, then weighted values", [then]
    if is_wanted(weights, dumped):
        text = "softmax of the scores" if len(steps) == 1 else "scores, then their softmax"
        yield Operation(weights, text, index, inputs, heads, partial(chained, steps), heads, by_position=True)
        inputs, words, steps = (weights,), "values, weighted", []
    compute = partial(attention, window) if len(steps) == 2 else partial(weighted, window, steps)
    name = f"{prefix}.attended"
    yield Operation(name, words, index, (*inputs, values), width, compute, heads)


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
    made = [spread.convolve(u[:first], taps, bias, precision)] if first else []
    for number, span in enumerate(oracle.steps.spans()):
        found = state[number].reshape(columns, -1)
        made.append(spread.convolve(u[span], taps, bias, precision, found))
    return joined_rows(made)


def gated_heads(oracle: Oracle, mixed: Measured, gates: Measured) -> Measured:
    """[T, H*E] by gates [T, H]."""
    tokens = len(mixed.values)
    wide = Measured(*(np.repeat(one, oracle.config.head_dim, axis=1) for one in (gates.values, gates.spread)))
    return spread.multiply(mixed, wide, oracle.precision).reshape(tokens, -1)


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
    made = []
    for _, step in per_step(window, oracle, queries, keys, values):
        asking, keys_read, values_read = (by_heads(oracle, rows) for rows in step)
        made.append(spread.attend(asking, keys_read, values_read, oracle.precision, window))
    return joined_rows(made).reshape(len(oracle.token_ids), -1)


def scores_of(window: int | None, oracle: Oracle, queries: Measured, keys: Measured) -> Measured:
    """[T, H*T], 0 behind each row's own position and before its window."""
    tokens, made = len(oracle.token_ids), []
    for seen, (asking, read) in per_step(window, oracle, queries, keys):
        scores = spread.scores(by_heads(oracle, asking), by_heads(oracle, read), oracle.precision, window)  # [t, H, C]
        made.append(scores.widened(seen.start, tokens).reshape(len(asking.values), -1))
    return joined_rows(made)


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
    tokens, made = len(oracle.token_ids), []
    for seen, (asking, read) in per_step(window, oracle, chained(steps, oracle, given), values):
        weights = asking.reshape(len(asking.values), -1, tokens)[:, :, seen]
        made.append(spread.mix(weights, by_heads(oracle, read), oracle.precision))
    return joined_rows(made).reshape(tokens, -1)


def by_heads(oracle: Oracle, rows: Measured) -> Measured:
    return rows.reshape(len(rows.values), -1, oracle.config.head_dim)
