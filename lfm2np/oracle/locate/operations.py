"""LFM2 as a list of operations, each with the tensors it reads: what `locate` walks through.

An operation is named as its output is by transformers' modules; what runs between two modules (gates, rotation,
attention, SiLU) belongs to the one behind it. Two names are no module's output: `self_attn.attended`, which out_proj
reads, and `residual`, what enters the feed-forward's norm. Source: transformers 5.23, models/lfm2/modeling_lfm2.py.

T tokens, D hidden, H query heads, G key/value heads, E head_dim, F feed-forward, V vocabulary. Tensors are [T, width].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.config import ModelConfig
from lfm2np.checkpoint.tensors import StoredTensor, require_finite, widen
from lfm2np.checkpoint.weights import widened
from lfm2np.numerics.rope import angles, rotary_table
from lfm2np.oracle.locate import spread
from lfm2np.oracle.locate.spread import Measured, Precision

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Oracle:
    """What an operation needs beside its inputs."""

    tensors: Mapping[str, StoredTensor]
    config: ModelConfig
    precision: Precision
    token_ids: Array  # [T] int64

    def weight(self, name: str) -> NDArray[np.float32]:
        return widened(self.tensors, name + ".weight")

    def bias(self, name: str) -> NDArray[np.float32] | None:
        return widened(self.tensors, name + ".bias") if name + ".bias" in self.tensors else None


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation: reads `inputs`, makes the tensor `name` [T, width]."""

    name: str
    words: str  # what it does, from its inputs on
    layer: int | None
    inputs: tuple[str, ...]
    width: int
    compute: Callable[..., Measured]  # of an Oracle and the measured inputs
    heads: int = 0  # its channels are those of so many heads, one after another; 0: there are none
    parts: tuple[str, ...] = ()  # its channels are these, of equal width, one after another


def operations(config: ModelConfig) -> list[Operation]:
    """All of them, in the model's order."""
    hidden, last = config.hidden_size, f"model.layers.{config.num_hidden_layers - 1}"
    made = [Operation("model.embed_tokens", "embedding rows of the token ids", None, (), hidden, embed)]
    for index, kind in enumerate(config.layer_types):
        before = made[-1].name
        made += layer_operations(config, index, kind, before)
    norm = "model.embedding_norm"
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    made.append(Operation(norm, "final norm", None, (last,), hidden, partial(norm_of, norm)))
    project = partial(projection, head)
    made.append(Operation("lm_head", "product with the head's weights", None, (norm,), config.vocab_size, project))
    return made


def layer_operations(config: ModelConfig, index: int, kind: str, before: str) -> Iterator[Operation]:
    """Those of one layer, whose input is the tensor `before`."""
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    norm, residual, mlp = f"{prefix}.operator_norm", f"{prefix}.residual", f"{prefix}.feed_forward"
    yield Operation(norm, "norm before the operator", index, (before,), hidden, partial(norm_of, norm))
    of_kind = conv_operations if kind == "conv" else attention_operations
    yield from of_kind(config, index, norm)
    mixed = f"{prefix}.{'conv' if kind == 'conv' else 'self_attn'}.out_proj"
    yield Operation(residual, "operator's output plus the layer's input", index, (mixed, before), hidden, total)
    norm = f"{prefix}.ffn_norm"
    yield Operation(norm, "norm before the feed-forward", index, (residual,), hidden, partial(norm_of, norm))
    for part in ("w1", "w3"):
        name = f"{mlp}.{part}"
        words = f"feed-forward's projection {part}"
        yield Operation(name, words, index, (norm,), config.feed_forward_size, partial(projection, name))
    inputs = (f"{mlp}.w1", f"{mlp}.w3")
    down = partial(gated_down, f"{mlp}.w2")
    yield Operation(f"{mlp}.w2", "silu(w1) * w3, then the projection w2", index, inputs, hidden, down)
    words = "feed-forward's output plus what entered its norm"
    yield Operation(prefix, words, index, (residual, f"{mlp}.w2"), hidden, total)


def conv_operations(config: ModelConfig, index: int, norm: str) -> Iterator[Operation]:
    prefix, hidden = f"model.layers.{index}.conv", config.hidden_size
    joined, mixed, out = f"{prefix}.in_proj", f"{prefix}.conv", f"{prefix}.out_proj"
    words, parts = "projection to gate_in, gate_out and value", ("gate_in", "gate_out", "value")
    yield Operation(joined, words, index, (norm,), 3 * hidden, partial(projection, joined), parts=parts)
    words = "gate_in * value, then the convolution"
    yield Operation(mixed, words, index, (joined,), hidden, partial(gated_convolution, mixed))
    words = "gate_out * the convolution's output, then the output projection"
    yield Operation(out, words, index, (joined, mixed), hidden, partial(gated_out, out))


def attention_operations(config: ModelConfig, index: int, norm: str) -> Iterator[Operation]:
    prefix, head_dim = f"model.layers.{index}.self_attn", config.head_dim
    counts = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    called = {"q": "queries", "k": "keys", "v": "values"}
    for part, heads in counts.items():
        name, words = f"{prefix}.{part}_proj", f"projection to {called[part]}"
        yield Operation(name, words, index, (norm,), heads * head_dim, partial(projection, name), heads)
    for part in "qk":
        name, words, heads = f"{prefix}.{part}_layernorm", f"per-head norm of the {called[part]}", counts[part]
        compute = partial(head_norm, name, heads)
        yield Operation(name, words, index, (f"{prefix}.{part}_proj",), heads * head_dim, compute, heads)
    inputs, heads = (f"{prefix}.q_layernorm", f"{prefix}.k_layernorm", f"{prefix}.v_proj"), counts["q"]
    words = "rotation of queries and keys, then causal attention"
    yield Operation(f"{prefix}.attended", words, index, inputs, heads * head_dim, attention, heads)
    out = f"{prefix}.out_proj"
    words = "attention's output projection"
    yield Operation(out, words, index, (f"{prefix}.attended",), config.hidden_size, partial(projection, out))


# --- what each computes: oracle and inputs [T, width] -> [T, width]


def embed(oracle: Oracle) -> Measured:
    stored = oracle.tensors["model.embed_tokens.weight"]
    require_finite(stored)
    return spread.embed(widen(stored.values[oracle.token_ids], stored.dtype), oracle.precision)


def norm_of(name: str, oracle: Oracle, x: Measured) -> Measured:
    return spread.rms_norm(x, oracle.weight(name), oracle.config.norm_eps, oracle.precision)


def head_norm(name: str, heads: int, oracle: Oracle, x: Measured) -> Measured:
    tokens = len(x.values)
    return norm_of(name, oracle, x.reshape(tokens, heads, -1)).reshape(tokens, -1)


def projection(name: str, oracle: Oracle, x: Measured) -> Measured:
    return spread.linear(x, oracle.weight(name), oracle.bias(name), oracle.precision)


def total(oracle: Oracle, x: Measured, y: Measured) -> Measured:
    return spread.add(x, y, oracle.precision)


def thirds(joined: Measured) -> Sequence[Measured]:
    """gate_in, gate_out and value, each [T, D]."""
    size = joined.values.shape[1] // 3
    return [joined[:, start : start + size] for start in (0, size, 2 * size)]


def gated_convolution(name: str, oracle: Oracle, joined: Measured) -> Measured:
    gate_in, _, value = thirds(joined)
    u = spread.multiply(gate_in, value, oracle.precision)
    return spread.convolve(u, oracle.weight(name)[:, 0, :], oracle.bias(name), oracle.precision)


def gated_out(name: str, oracle: Oracle, joined: Measured, mixed: Measured) -> Measured:
    _, gate_out, _ = thirds(joined)
    return projection(name, oracle, spread.multiply(gate_out, mixed, oracle.precision))


def gated_down(name: str, oracle: Oracle, gate: Measured, up: Measured) -> Measured:
    precision = oracle.precision
    return projection(name, oracle, spread.multiply(spread.silu(gate, precision), up, precision))


def attention(oracle: Oracle, queries: Measured, keys: Measured, values: Measured) -> Measured:
    config, precision, tokens = oracle.config, oracle.precision, len(oracle.token_ids)
    positions = np.arange(tokens)
    cos, sin = rotary_table(positions, config.head_dim, config.rope_theta)
    theta = angles(positions, config.head_dim, config.rope_theta).astype(np.float64)
    queries, keys = (
        spread.rotate(one.reshape(tokens, -1, config.head_dim), cos, sin, theta, precision) for one in (queries, keys)
    )
    mixed = spread.attend(queries, keys, values.reshape(tokens, -1, config.head_dim), precision)
    return mixed.reshape(tokens, -1)
