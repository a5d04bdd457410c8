"""LFM2 as a table of operations, each with the tensors it reads and a function of them: what `locate` walks through.

An operation is named as its output is by transformers' modules; what runs between two modules has names of ours
(docs/engine/7-locate.md). Source: transformers 5.23, models/lfm2/modeling_lfm2.py and models/lfm2_moe. OPTIONAL tensors
are looked at if they are dumped, and nothing is recomputed for lack of them.

T tokens, D hidden, H query heads, G key/value heads, E head_dim, F feed-forward, V vocabulary, L convolution taps, S
steps, C positions that a step sees (of a layer with a window, from its first row's window on), N experts, K of a token.
Tensors are [T, width]; `conv.state` is [S, (L-1)*D], `keys_read` and `values_read` are [sum of C, G*E].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.routing import LEAST_SUM
from lfm2np.checkpoint.stored import StoredTensor, require_finite, widen
from lfm2np.checkpoint.weights import vector, widened
from lfm2np.oracle.judging.emulate import ROTARY_UNITS
from lfm2np.oracle.locate import rounded_inputs
from lfm2np.oracle.locate.attention import mixed_heads
from lfm2np.oracle.locate.choice import best
from lfm2np.oracle.locate.patterns import STEP, TOKEN, Context, Per, Steps
from lfm2np.oracle.locate.spread import (
    EXP_UNITS,
    SUM_UNIT,
    Array,
    Measured,
    Precision,
    add,
    as_kept,
    dot,
    joined,
    known,
    linear,
    moved,
    multiply,
    rounded,
    together,
)
from lfm2np.truth.config import CONV, SLIDING, MixtureConfig, ModelConfig
from lfm2np.truth.rope import angles

CHOSEN = "experts_chosen"
MOST_LEFT_OUT = 1e-5  # relative: the most that a weight of an expert may differ without LEAST_SUM


@dataclass(frozen=True, eq=False)
class Oracle:
    """What operations need beside their inputs."""

    tensors: Mapping[str, StoredTensor]
    config: ModelConfig
    precision: Precision
    token_ids: Array  # [T] int64
    steps: Steps
    rounds_inputs: bool = False  # of products with quantised weights

    def vector(self, name: str) -> NDArray[np.float32] | None:
        return vector(self.tensors, name) if name in self.tensors else None

    @property
    def mixture(self) -> MixtureConfig:
        assert self.config.mixture is not None
        return self.config.mixture


Compute = Callable[..., Measured]


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation: computes the tensor `name` [rows, width] from `inputs`."""

    name: str
    words: str  # what it computes from its inputs
    inputs: tuple[str, ...]
    width: int
    compute: Compute  # of an Oracle, the operation and its measured inputs
    heads: int = 0  # its channels are those of so many heads, one after another; 0: there are none
    parts: tuple[str, ...] = ()  # its channels are these, of equal width, one after another
    per: Per = TOKEN  # what has a row: a token, a step, or each token that a step sees
    by_position: bool = False  # `width` channels for each of the T positions, one position after another
    noun: str = "channel"  # what a column is
    weights: str = ""  # the matrix that it multiplies by, or one of several alike
    chosen: str = ""  # the tensor of the experts whose numbers these are, place by place or added up
    layer: int | None = None

    @property
    def is_choice(self) -> bool:
        """Whether its numbers are ids of experts."""
        return self.name.endswith(CHOSEN)


# --- what each computes: oracle, operation and inputs [T, width] -> [T, width]


def embed(oracle: Oracle, operation: Operation) -> Measured:
    stored = oracle.tensors["model.embed_tokens.weight"]
    require_finite(stored)
    return rounded(widen(stored.values[oracle.token_ids], stored.dtype).astype(np.float64), oracle.precision)


def projection(oracle: Oracle, operation: Operation, x: Measured) -> Measured:
    return product_with(operation.weights, oracle, x)


def product_with(name: str, oracle: Oracle, x: Measured) -> Measured:
    tensor, bias = oracle.tensors[f"{name}.weight"], oracle.vector(f"{name}.bias")
    weight = widened(oracle.tensors, f"{name}.weight")
    if oracle.rounds_inputs and rounded_inputs.rounds(tensor):
        return rounded_inputs.linear(x, weight, bias, tensor, oracle.precision)
    return linear(x, weight, bias, oracle.precision)


def added(oracle: Oracle, operation: Operation, x: Measured, y: Measured) -> Measured:
    return add(x, y, oracle.precision)


def rms_norm(oracle: Oracle, operation: Operation, x: Measured) -> Measured:
    """Of each head, if there are some. Rounded before the weight and behind it; mean, root, quotient are float32."""
    weight, precision = oracle.vector(f"{operation.name}.weight"), oracle.precision
    assert weight is not None
    by_head, size = x.reshape(len(x), -1, len(weight)), len(weight)
    squares = moved(np.square, by_head)
    mean = squares.values.mean(-1, keepdims=True)
    spread = np.sqrt(np.square(squares.spread).sum(-1, keepdims=True)) / size
    mean_square = Measured(mean, together(spread, math.sqrt(size) * SUM_UNIT * mean))
    scale = moved(lambda mean: 1.0 / np.sqrt(np.maximum(mean, 0.0) + oracle.config.norm_eps), mean_square)
    inner = moved(np.multiply, by_head, scale)
    inner = rounded(inner.values, precision, inner.spread, 3.0 * SUM_UNIT * inner.values)
    return multiply(inner, as_kept(weight, precision), precision).reshape(len(x), -1)


def sigmoid(oracle: Oracle, operation: Operation, x: Measured) -> Measured:
    """1 / (1 + exp(-x)); sum and quotient are float32."""
    output = moved(lambda x: 0.5 * (1.0 + np.tanh(0.5 * x)), x)  # which does not overflow
    fast = EXP_UNITS * SUM_UNIT * (1.0 + np.abs(x.values)) * output.values * (1.0 - output.values)
    return rounded(output.values, oracle.precision, output.spread, fast, 2.0 * SUM_UNIT * output.values)


def gated(oracle: Oracle, operation: Operation | None, gate: Measured, up: Measured) -> Measured:
    """gate * sigmoid(gate), times up."""
    silu = moved(lambda x: x / (1.0 + np.exp(-np.maximum(x, -700.0))), gate)
    fast = EXP_UNITS * SUM_UNIT * (1.0 + np.abs(gate.values)) * silu.values
    return multiply(rounded(silu.values, oracle.precision, silu.spread, fast), up, oracle.precision)


def gated_input(oracle: Oracle, operation: Operation, x: Measured) -> Measured:
    size = operation.width
    return multiply(x[:, :size], x[:, 2 * size :], oracle.precision)


def gated_output(oracle: Oracle, operation: Operation, x: Measured, mixed: Measured) -> Measured:
    size = operation.width
    return multiply(x[:, size : 2 * size], mixed, oracle.precision)


def gated_heads(oracle: Oracle, operation: Operation, mixed: Measured, gates: Measured) -> Measured:
    """[T, H*E] by gates [T, H]."""
    by_head = mixed.reshape(len(mixed), operation.heads, -1)
    return multiply(by_head, gates.reshape(len(gates), -1, 1), oracle.precision).reshape(len(mixed), -1)


def states(oracle: Oracle, operation: Operation, u: Measured) -> Measured:
    """[S, (L-1)*D]: the last L-1 rows of u [T, D] before each step, the oldest first, zeros before the first token."""
    columns = len(operation.parts)
    padded = u.behind_zeros(columns)
    return joined([padded[start : start + columns].reshape(1, -1) for start in oracle.steps.starts])


def convolution(oracle: Oracle, operation: Operation, u: Measured, state: Measured | None = None) -> Measured:
    """Of u [T, D]; if `state` is there, each step's rows after what the step found."""
    taps, bias = oracle.vector(f"{operation.name}.weight"), oracle.vector(f"{operation.name}.bias")
    assert taps is not None
    count, columns = taps.shape[-1], taps.shape[-1] - 1
    windows = [u[: oracle.steps.first if state else None].behind_zeros(columns)]
    if state:
        found = state.reshape(len(state), columns, -1)
        windows += [joined([found[step], u[rows]]) for step, rows in enumerate(oracle.steps.spans())]
    slide = np.lib.stride_tricks.sliding_window_view
    pairs = [(slide(x.values, count, 0), slide(x.spread, count, 0)) for x in windows if len(x) > columns]
    output = dot(joined([Measured(*pair) for pair in pairs]), as_kept(taps[:, 0, :], oracle.precision))  # of [T, D, L]
    if bias is not None:
        kept = as_kept(bias, oracle.precision)
        order = SUM_UNIT * (np.abs(output.values) + np.abs(kept.values))
        output = Measured(output.values + kept.values, together(output.spread, kept.spread, order))
    return rounded(output.values, oracle.precision, output.spread)


def rotation(oracle: Oracle, operation: Operation, x: Measured) -> Measured:
    """Products, sums and tables are rounded, and angles a little off."""
    config, layer, precision = oracle.config, operation.layer, oracle.precision
    assert layer is not None
    rope, positions = config.rope(config.layer_types[layer]), np.arange(len(oracle.token_ids))
    theta = angles(positions, config.head_dim, rope).astype(np.float64)[:, None]
    angle, half = Measured(theta, ROTARY_UNITS * SUM_UNIT * theta), config.head_dim // 2
    shaped = x.reshape(len(positions), -1, config.head_dim)
    first, second = shaped[..., :half], shaped[..., half:]
    halves = []
    for kept, other in ((first, second), (second, Measured(-first.values, first.spread))):
        output = moved(lambda kept, other, theta: kept * np.cos(theta) - other * np.sin(theta), kept, other, angle)
        products = precision.unit * together(kept.values * np.cos(theta), other.values * np.sin(theta))
        halves.append(rounded(output.values, precision, output.spread, products, products))
    return joined(halves, axis=-1).reshape(len(positions), -1)


def reads(oracle: Oracle, operation: Operation, rows: Measured) -> Measured:
    """Of rows [T, width] those that each step sees, one step after another, behind those that came before all steps."""
    assert isinstance(operation.per, Context)
    return joined([rows[: oracle.steps.first], *(rows[seen] for seen in oracle.steps.seen(operation.per.window))])


def attention(oracle: Oracle, operation: Operation, first: Measured, *cached: Measured) -> Measured:
    """From queries [T, H*E], scores or weights [T, H*T] to scores, weights or attention's output [T, H*E]."""
    given, made = (name.rpartition(".")[2] for name in (operation.inputs[0], operation.name))
    assert operation.layer is not None
    window, by_head = window_of(oracle.config, operation.layer), first.reshape(len(first), operation.heads, -1)
    read = [rows.reshape(len(rows), -1, oracle.config.head_dim) for rows in cached]
    return mixed_heads(given, made, oracle.precision, oracle.steps, window, by_head, read)


def preferred(oracle: Oracle, operation: Operation, scores: Measured) -> Measured:
    """What experts are chosen by: scores plus the bias [N]; bias and sum are float32 in every format."""
    if not oracle.mixture.use_expert_bias:
        return scores
    bias = oracle.vector(operation.name.replace(CHOSEN, "expert_bias"))
    assert bias is not None
    values = scores.values + bias.astype(np.float64)
    return Measured(values, together(scores.spread, SUM_UNIT * values))


def choice(oracle: Oracle, operation: Operation, scores: Measured) -> Measured:
    """Scores [T, N] -> ids [T, K]."""
    return best(preferred(oracle, operation, scores), oracle.mixture.num_experts_per_tok)


def routing_weights(oracle: Oracle, operation: Operation, scores: Measured, chosen: Measured) -> Measured:
    """[T, K] from scores [T, N] and ids [T, K]. The sum may be rounded at each of its terms, and the quotient.

    Some engines (vLLM) do not add LEAST_SUM to the sum: no finding.
    """
    mixture, precision, ids = oracle.mixture, oracle.precision, chosen.values.astype(np.int64)
    shares = Measured(*(np.take_along_axis(x, ids, axis=-1) for x in (scores.values, scores.spread)))
    left_out: Array | float = 0.0
    if mixture.norm_topk_prob:
        total = shares.values.sum(-1, keepdims=True) + LEAST_SUM
        off = np.sqrt(np.square(shares.spread).sum(-1, keepdims=True))
        rounding = precision.unit * math.sqrt(operation.width) * total
        left_out = 0.5 * np.minimum(LEAST_SUM / total, MOST_LEFT_OUT)
        shares = moved(np.divide, shares, Measured(total, together(off, rounding)))
    values = mixture.routed_scaling_factor * shares.values
    spread = mixture.routed_scaling_factor * shares.spread
    return rounded(values, precision, spread, precision.unit * values, left_out * values, chosen.spread)


def expert_outputs(oracle: Oracle, operation: Operation, x: Measured, chosen: Measured) -> Measured:
    """[T, K*D] from x [T, D] and ids [T, K]."""
    ids, mlp = chosen.values.astype(np.int64), operation.name.rpartition(".")[0]
    outputs = known(np.zeros((*ids.shape, x.values.shape[1])))  # [T, K, D]
    for expert in np.unique(ids):
        at = rows, _ = np.nonzero(ids == expert)
        gate, up = (product_with(f"{mlp}.experts.{expert}.{part}", oracle, x[rows]) for part in ("w1", "w3"))
        output = product_with(f"{mlp}.experts.{expert}.w2", oracle, gated(oracle, None, gate, up))
        outputs.values[at], outputs.spread[at] = output.values, together(output.spread, chosen.spread[at][:, None])
    return outputs.reshape(len(ids), -1)


def combine_experts(oracle: Oracle, operation: Operation, outputs: Measured, weights: Measured) -> Measured:
    """The sum [T, D] of outputs [T, K*D] times weights [T, K]. Each product and partial sum may be rounded."""
    tokens, count = weights.values.shape
    terms = multiply(outputs.reshape(tokens, count, -1), weights.reshape(tokens, count, 1), oracle.precision)
    sums = oracle.precision.unit * math.sqrt(count - 1) * np.abs(terms.values).sum(axis=1)
    return rounded(terms.values.sum(axis=1), oracle.precision, np.sqrt(np.square(terms.spread).sum(axis=1)), sums)


# --- the table: name, which layers and dumps have it, inputs, width, how it is evaluated (and its bound), words
#
# Of a layer's operator and feed-forward. A row needs what its second column names (see `facts_of`); of several with one
# name the first counts. An input is a name of the same module, else of the layer: the first of a/b that there is, none
# if there is none; `before` is the layer's input, ^ the operation before. In a width R is L - 1, 3 the parts of
# in_proj. The last name, "", is the layer's output.

KEYS, VALUES = "keys_read/k_rotated", "values_read/v_proj"
Row = tuple[str, str, str, str, Compute, str]
LAYER: tuple[Row, ...] = (
    ("operator_norm", "", "before", "D", rms_norm, "norm before the operator"),
    ("conv.in_proj", "", "operator_norm", "3*D", projection, "projection to gate_in, gate_out and value"),
    ("conv.u", "", "in_proj", "D", gated_input, "gate_in * value"),
    ("conv.state", "state", "u", "R*D", states, "what the step found of the convolution's last inputs (its state)"),
    ("conv.conv", "", "u state", "D", convolution, "the convolution"),
    ("conv.gated", "", "in_proj conv", "D", gated_output, "gate_out * the convolution's output"),
    ("conv.out_proj", "", "gated", "D", projection, "the convolution's output projection"),
    ("self_attn.q_proj", "", "operator_norm", "H*E", projection, "projection to queries"),
    ("self_attn.k_proj", "", "operator_norm", "G*E", projection, "projection to keys"),
    ("self_attn.v_proj", "", "operator_norm", "G*E", projection, "projection to values"),
    ("self_attn.q_layernorm", "", "q_proj", "H*E", rms_norm, "per-head norm of the queries"),
    ("self_attn.k_layernorm", "", "k_proj", "G*E", rms_norm, "per-head norm of the keys"),
    ("self_attn.q_rotated", "", "q_layernorm", "H*E", rotation, "rotation of the queries"),
    ("self_attn.k_rotated", "", "k_layernorm", "G*E", rotation, "rotation of the keys"),
    ("self_attn.keys_read", "keys_read", "k_rotated", "G*E", reads, "keys as the step found them in the cache"),
    ("self_attn.values_read", "values_read", "v_proj", "G*E", reads, "values as the step found them in the cache"),
    ("self_attn.scores", "scores", f"q_rotated {KEYS}", "H*T", attention, "products of queries and keys, scaled"),
    ("self_attn.weights", "weights scores", "scores", "H*T", attention, "softmax of the scores"),
    ("self_attn.weights", "weights", f"q_rotated {KEYS}", "H*T", attention, "scores, then their softmax"),
    ("self_attn.attended", "weights", f"weights {VALUES}", "H*E", attention, "values, weighted"),
    ("self_attn.attended", "scores", f"scores {VALUES}", "H*E", attention, "softmax of the scores, values weighted"),
    ("self_attn.attended", "", f"q_rotated {KEYS} {VALUES}", "H*E", attention, "causal attention{window}"),
    ("self_attn.g_proj", "gates", "operator_norm", "H", projection, "projection to the heads' gates"),
    ("self_attn.gate", "gates", "g_proj", "H", sigmoid, "sigmoid of the heads' gates"),
    ("self_attn.gated", "gates", "attended gate", "H*E", gated_heads, "each head's output times its gate"),
    ("self_attn.out_proj", "", "gated/attended", "D", projection, "attention's output projection"),
    ("post_operator_norm", "sandwich", "^", "D", rms_norm, "norm of the operator's output"),
    ("residual", "", "^ before", "D", added, "operator's output plus the layer's input"),
    ("ffn_norm", "", "residual", "D", rms_norm, "norm before the feed-forward"),
    ("feed_forward.w1", "dense", "ffn_norm", "F", projection, "feed-forward's projection w1"),
    ("feed_forward.w3", "dense", "ffn_norm", "F", projection, "feed-forward's projection w3"),
    ("feed_forward.gated", "dense", "w1 w3", "F", gated, "silu(w1) * w3"),
    ("feed_forward.w2", "dense", "gated", "D", projection, "feed-forward's projection w2"),
    ("feed_forward.gate", "moe", "ffn_norm", "N", projection, "the router's product"),
    ("feed_forward.scores", "moe", "gate", "N", sigmoid, "sigmoid of the router's product"),
    ("feed_forward.experts_chosen", "moe", "scores", "K", choice, "choice of experts by scores{bias}"),
    (
        "feed_forward.expert_weights",
        "moe",
        "scores experts_chosen",
        "K",
        routing_weights,
        "chosen experts' weights{sum}",
    ),
    ("feed_forward.expert_outputs", "moe", "ffn_norm experts_chosen", "K*D", expert_outputs, "chosen experts' outputs"),
    (
        "feed_forward.mixed",
        "moe",
        "expert_outputs expert_weights",
        "D",
        combine_experts,
        "chosen experts' outputs, weighted and added up",
    ),
    ("post_ffn_norm", "sandwich", "^", "D", rms_norm, "norm of the feed-forward's output"),
    ("", "", "residual ^", "D", added, "feed-forward's output plus what entered its norm"),
)
OPTIONAL = ("conv.state", "self_attn.keys_read", "self_attn.values_read", "self_attn.scores", "self_attn.weights")


def operations(config: ModelConfig, dumped: Container[str] | None = None) -> list[Operation]:
    """All of them, in the model's order; of the OPTIONAL those in `dumped` alone, if it is given."""
    hidden, last = config.hidden_size, "model.embedding_norm"
    steps = [Operation("model.embed_tokens", "embedding rows of the token ids", (), hidden, embed)]
    for index in range(config.num_hidden_layers):
        steps += layer_operations(config, index, steps[-1].name, dumped)
    steps.append(Operation(last, "final norm", (steps[-1].name,), hidden, rms_norm))
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    words = "product with the head's weights"
    return [*steps, Operation("lm_head", words, (last,), config.vocab_size, projection, weights=head)]


def layer_operations(
    config: ModelConfig, index: int, before: str, dumped: Container[str] | None
) -> Iterator[Operation]:
    """Those of one layer, whose input is the tensor `before`."""
    facts, names = facts_of(config, index, dumped), {"before": before, "^": before}
    other = "self_attn." if config.layer_types[index] == CONV else "conv."
    for name, needs, inputs, width, compute, words in LAYER:
        if name in names or name.startswith(other) or not facts.issuperset(needs.split()):
            continue
        module, sources = name.rpartition(".")[0], []
        for word in inputs.split():
            ways = [way for each in word.split("/") for way in (f"{module}.{each}", each) if way in names]
            sources += [names[way] for way in ways[:1]]
        names[name] = names["^"] = f"model.layers.{index}.{name}".removesuffix(".")
        yield from_row(config, index, names[name], tuple(sources), width, compute, words)


def facts_of(config: ModelConfig, index: int, dumped: Container[str] | None) -> set[str]:
    """What rows of a layer may need: dense or moe, sandwich, gates; what is dumped, or all if that is not given."""
    facts = {"moe" if config.is_sparse(index) else "dense"}
    facts |= {"sandwich"} if config.use_sandwich_norm else set()
    facts |= {"gates"} if config.use_attention_gate else set()
    for name in OPTIONAL if config.conv_L_cache > 1 else OPTIONAL[1:]:
        if dumped is None or f"model.layers.{index}.{name}" in dumped:
            facts.add(name.rpartition(".")[2])
    return facts


def from_row(
    config: ModelConfig, index: int, name: str, inputs: tuple[str, ...], width: str, compute: Compute, words: str
) -> Operation:
    """An operation of a layer: what its row and the config imply."""
    mixture, window, back = config.mixture, window_of(config, index), range(config.conv_L_cache - 1, 0, -1)
    experts, count = (mixture.num_experts, mixture.num_experts_per_tok) if mixture else (0, 0)
    heads = {"H": config.num_attention_heads, "G": config.num_key_value_heads}
    sizes = {"D": config.hidden_size, "F": config.feed_forward_size, "E": config.head_dim, "T": 1, "3": 3}
    sizes |= {**heads, "R": len(back), "N": experts, "K": count}
    parts = {"3": ("gate_in", "gate_out", "value"), "K": tuple(f"place {place}" for place in range(count))}
    parts["R"] = tuple(f"{n} token{'s' if n > 1 else ''} before" for n in back)
    per: dict[str, Per] = {"state": STEP, "keys_read": Context(window), "values_read": Context(window)}
    (first, *more), (module, _, part) = width.split("*"), name.rpartition(".")
    return Operation(
        name=name,
        words=words.format(
            window="" if window is None else f" to the last {window} positions",
            bias=" and bias" if mixture and mixture.use_expert_bias else "",
            sum=", of sum 1" if mixture and mixture.norm_topk_prob else "",
        ),
        inputs=inputs,
        width=math.prod(sizes[letter] for letter in (first, *more)),
        compute=compute,
        heads=heads.get(first, 0) if more else 0,
        parts=parts.get(first, ()) if more else (),
        per=per.get(part, TOKEN),
        by_position="T" in more,
        noun={"N": "expert", "K": "place"}.get(width, "channel"),
        weights={projection: name, expert_outputs: f"{module}.experts.0.w1"}.get(compute, ""),
        chosen=f"{module}.{CHOSEN}" if part in ("expert_weights", "expert_outputs", "mixed") else "",
        layer=index,
    )


def window_of(config: ModelConfig, index: int) -> int | None:
    return config.sliding_window if config.layer_types[index] == SLIDING else None
