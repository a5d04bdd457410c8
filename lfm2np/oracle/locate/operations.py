"""LFM2 as a list of operations, each with the tensors it reads and a function of them: what `locate` walks through.

An operation is named as its output is by transformers' modules. What runs between two modules has names of ours: `u`
and `gated` around the convolution, `q_rotated`, `k_rotated` and `attended` of attention, `residual` (what enters the
feed-forward's norm), `feed_forward.gated`; of a mixture of experts, whose router's module is `gate`, `scores` (its
sigmoid), `experts_chosen` (ids, best first), `expert_weights`, `expert_outputs` (of each chosen expert, before its
weight), `mixed` (their sum), weights and outputs in the order of the dumped ids. Source: transformers 5.23,
models/lfm2/modeling_lfm2.py and models/lfm2_moe.

OPTIONAL tensors are looked at if they are dumped, and nothing is recomputed for lack of them: what a step found in the
caches (so that a wrong number that is stored is told from one that is computed), and attention's scores and weights.

T tokens, D hidden, H query heads, G key/value heads, E head_dim, F feed-forward, V vocabulary, L convolution taps, S
steps, C positions that a step sees (of a layer with a window, from its first row's window on), N experts, K of a token.
Tensors are [T, width]; `conv.state` is [S, (L-1)*D], `keys_read` and `values_read` are [sum of C, G*E].
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.routing import LEAST_SUM
from lfm2np.checkpoint.stored import StoredTensor, require_finite, widen
from lfm2np.checkpoint.weights import vector, widened
from lfm2np.oracle.judging.emulate import ROTARY_UNITS
from lfm2np.oracle.locate import rounded_inputs
from lfm2np.oracle.locate.attention import QUERIES, SCORES, WEIGHTS, mixed_heads
from lfm2np.oracle.locate.choice import chosen_ids, places
from lfm2np.oracle.locate.patterns import STEP, TOKEN, Context, Per, Steps
from lfm2np.oracle.locate.spread import (
    EXP_UNITS,
    SUM_UNIT,
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

Array = NDArray[Any]
OPTIONAL = ("conv.state", "self_attn.keys_read", "self_attn.values_read", "self_attn.scores", "self_attn.weights")
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


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation: computes the tensor `name` [rows, width] from `inputs`."""

    name: str
    words: str  # what it computes from its inputs
    inputs: tuple[str, ...]
    width: int
    compute: Callable[..., Measured]  # of an Oracle, the operation and its measured inputs
    heads: int = 0  # its channels are those of so many heads, one after another; 0: there are none
    parts: tuple[str, ...] = ()  # its channels are these, of equal width, one after another
    per: Per = TOKEN  # what has a row: a token, a step, or each token that a step sees
    by_position: bool = False  # `width` channels for each of the T positions, one position after another
    noun: str = "channel"  # what a column is
    weights: str = ""  # the matrix that it multiplies by, or one of several alike
    chosen: str = ""  # the tensor of the experts whose numbers these are, place by place or added up

    @property
    def layer(self) -> int | None:
        match = re.match(r"model\.layers\.(\d+)", self.name)
        return int(match[1]) if match else None

    @property
    def is_choice(self) -> bool:
        """Whether its numbers are ids of experts."""
        return self.name.endswith(CHOSEN)


def operations(config: ModelConfig, dumped: Container[str] | None = None) -> list[Operation]:
    """All of them, in the model's order; of the OPTIONAL those in `dumped` alone, if it is given."""
    hidden, before = config.hidden_size, "model.embed_tokens"
    steps = [Operation(before, "embedding rows of the token ids", (), hidden, embed)]
    for index in range(config.num_hidden_layers):
        steps += layer_operations(config, index, before, dumped)
        before = steps[-1].name
    last = "model.embedding_norm"
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    steps.append(Operation(last, "final norm", (before,), hidden, rms_norm))
    words = "product with the head's weights"
    return [*steps, Operation("lm_head", words, (last,), config.vocab_size, projection, weights=head)]


def layer_operations(
    config: ModelConfig, index: int, before: str, dumped: Container[str] | None
) -> Iterator[Operation]:
    """Those of one layer, whose input is the tensor `before`; names below are within the layer, "" is its output."""
    layer, hidden = f"model.layers.{index}", config.hidden_size
    is_conv, is_sparse = config.layer_types[index] == CONV, config.is_sparse(index)

    def whole(name: str) -> str:
        return name if name == before else f"{layer}.{name}".removesuffix(".")

    def is_wanted(name: str) -> bool:
        return dumped is None or whole(name) in dumped

    def operation(name: str, words: str, inputs: str, width: int, compute: Any = projection, **facts: Any) -> Operation:
        if compute is projection:
            facts = {"weights": whole(name), **facts}
        return Operation(whole(name), words, tuple(whole(each) for each in inputs.split()), width, compute, **facts)

    yield operation("operator_norm", "norm before the operator", before, hidden, rms_norm)
    yield from (conv_operations if is_conv else attention_operations)(config, index, operation, is_wanted)
    output = f"{'conv' if is_conv else 'self_attn'}.out_proj"
    if config.use_sandwich_norm:
        yield operation("post_operator_norm", "norm of the operator's output", output, hidden, rms_norm)
        output = "post_operator_norm"
    yield operation("residual", "operator's output plus the layer's input", f"{output} {before}", hidden, added)
    yield operation("ffn_norm", "norm before the feed-forward", "residual", hidden, rms_norm)
    yield from (mixture_operations if is_sparse else gated_operations)(config, operation, is_wanted)
    output = f"feed_forward.{'mixed' if is_sparse else 'w2'}"
    if config.use_sandwich_norm:
        yield operation("post_ffn_norm", "norm of the feed-forward's output", output, hidden, rms_norm)
        output = "post_ffn_norm"
    yield operation("", "feed-forward's output plus what entered its norm", f"residual {output}", hidden, added)


Make = Callable[..., Operation]
IsWanted = Callable[[str], bool]


def gated_operations(config: ModelConfig, operation: Make, is_wanted: IsWanted) -> Iterator[Operation]:
    mlp, size = "feed_forward", config.feed_forward_size
    yield operation(f"{mlp}.w1", "feed-forward's projection w1", "ffn_norm", size)
    yield operation(f"{mlp}.w3", "feed-forward's projection w3", "ffn_norm", size)
    yield operation(f"{mlp}.gated", "silu(w1) * w3", f"{mlp}.w1 {mlp}.w3", size, gated)
    yield operation(f"{mlp}.w2", "feed-forward's projection w2", f"{mlp}.gated", config.hidden_size)


def mixture_operations(config: ModelConfig, operation: Make, is_wanted: IsWanted) -> Iterator[Operation]:
    mixture, hidden, mlp = config.mixture, config.hidden_size, "feed_forward"
    assert mixture is not None
    experts, count = mixture.num_experts, mixture.num_experts_per_tok
    whole = operation(f"{mlp}.{CHOSEN}", "", "", 0).name
    yield operation(f"{mlp}.gate", "the router's product", "ffn_norm", experts, noun="expert")
    words = "sigmoid of the router's product"
    yield operation(f"{mlp}.scores", words, f"{mlp}.gate", experts, sigmoid, noun="expert")
    words = f"choice of experts by scores{' and bias' if mixture.use_expert_bias else ''}"
    by_place = any(is_wanted(f"{mlp}.{part}") for part in ("expert_weights", "expert_outputs"))
    choose = choice_by_place if by_place else choice
    yield operation(f"{mlp}.{CHOSEN}", words, f"{mlp}.scores", count, choose, noun="place")
    words = f"weights of the chosen experts{', of sum 1' if mixture.norm_topk_prob else ''}"
    inputs = f"{mlp}.scores {mlp}.{CHOSEN}"
    yield operation(f"{mlp}.expert_weights", words, inputs, count, routing_weights, noun="place", chosen=whole)
    facts = {"parts": tuple(f"place {place}" for place in range(count)), "chosen": whole}
    words, inputs, first = (
        "outputs of the chosen experts",
        f"ffn_norm {mlp}.{CHOSEN}",
        whole.replace(CHOSEN, "experts.0.w1"),
    )
    yield operation(f"{mlp}.expert_outputs", words, inputs, count * hidden, expert_outputs, weights=first, **facts)
    words, inputs = "outputs of the chosen experts, weighted and added up", f"{mlp}.expert_outputs {mlp}.expert_weights"
    yield operation(f"{mlp}.mixed", words, inputs, hidden, combine_experts, chosen=whole)


def conv_operations(config: ModelConfig, index: int, operation: Make, is_wanted: IsWanted) -> Iterator[Operation]:
    hidden, columns = config.hidden_size, config.conv_L_cache - 1
    words, thirds = "projection to gate_in, gate_out and value", ("gate_in", "gate_out", "value")
    yield operation("conv.in_proj", words, "operator_norm", 3 * hidden, parts=thirds)
    yield operation("conv.u", "gate_in * value", "conv.in_proj", hidden, gated_input)
    inputs = "conv.u"
    if columns and is_wanted("conv.state"):
        words = "what the step found of the convolution's last inputs (its state)"
        back = tuple(f"{n} token{'s' if n > 1 else ''} before" for n in range(columns, 0, -1))
        yield operation("conv.state", words, "conv.u", columns * hidden, found_state, parts=back, per=STEP)
        inputs = "conv.u conv.state"
    yield operation("conv.conv", "the convolution", inputs, hidden, convolution)
    words = "gate_out * the convolution's output"
    yield operation("conv.gated", words, "conv.in_proj conv.conv", hidden, gated_output)
    yield operation("conv.out_proj", "the convolution's output projection", "conv.gated", hidden)


def attention_operations(config: ModelConfig, index: int, operation: Make, is_wanted: IsWanted) -> Iterator[Operation]:
    heads, kv_heads, window = config.num_attention_heads, config.num_key_value_heads, window_of(config, index)
    width, kv_width = heads * config.head_dim, kv_heads * config.head_dim
    parts = (("q", "queries", heads, width), ("k", "keys", kv_heads, kv_width), ("v", "values", kv_heads, kv_width))
    for part, noun, count, size in parts:
        yield operation(f"self_attn.{part}_proj", f"projection to {noun}", "operator_norm", size, heads=count)
    for after, before, compute, words in (
        ("layernorm", "proj", head_norm, "per-head norm"),
        ("rotated", "layernorm", rotation, "rotation"),
    ):
        for part, noun, count, size in parts[:2]:
            name, source = f"self_attn.{part}_{after}", f"self_attn.{part}_{before}"
            yield operation(name, f"{words} of the {noun}", source, size, compute, heads=count)
    cached = []
    for noun, source in (("keys", "self_attn.k_rotated"), ("values", "self_attn.v_proj")):
        if is_wanted(read := f"self_attn.{noun}_read"):
            words = f"{noun} as the step found them in the cache"
            yield operation(read, words, source, kv_width, found_rows, heads=kv_heads, per=Context(window))
            source = read
        cached.append(source)
    keys, values = cached
    given, inputs = QUERIES, f"self_attn.q_rotated {keys}"
    words = "causal attention" + ("" if window is None else f" to the last {window} positions")
    for made, text, then in (
        (SCORES, "scores: products of queries and keys, scaled", "softmax of the scores, then weighted values"),
        (WEIGHTS, "softmax of the scores", "values, weighted"),
    ):
        if is_wanted(name := f"self_attn.{made}"):
            text = "scores, then their softmax" if (made, given) == (WEIGHTS, QUERIES) else text
            yield operation(name, text, inputs, heads, attention, heads=heads, by_position=True)
            given, inputs, words = made, name, then
    yield operation("self_attn.attended", words, f"{inputs} {values}", width, attention, heads=heads)
    output = "self_attn.attended"
    if config.use_attention_gate:
        yield operation("self_attn.g_proj", "projection to the heads' gates", "operator_norm", heads)
        yield operation("self_attn.gate", "sigmoid of the heads' gates", "self_attn.g_proj", heads, sigmoid)
        words, inputs, output = "each head's output times its gate", f"{output} self_attn.gate", "self_attn.gated"
        yield operation(output, words, inputs, width, gated_heads, heads=heads)
    yield operation("self_attn.out_proj", "attention's output projection", output, config.hidden_size)


def window_of(config: ModelConfig, index: int) -> int | None:
    return config.sliding_window if config.layer_types[index] == SLIDING else None


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
    """x [..., D]. Rounded before the weight and behind it; mean, root and quotient are float32."""
    eps, size, precision = oracle.config.norm_eps, x.values.shape[-1], oracle.precision
    squares = moved(np.square, x)
    mean = squares.values.mean(-1, keepdims=True)
    spread = np.sqrt(np.square(squares.spread).sum(-1, keepdims=True)) / size
    mean_square = Measured(mean, together(spread, math.sqrt(size) * SUM_UNIT * mean))
    scale = moved(lambda mean: 1.0 / np.sqrt(np.maximum(mean, 0.0) + eps), mean_square)
    inner = moved(np.multiply, x, scale)
    inner = rounded(inner.values, precision, inner.spread, 3.0 * SUM_UNIT * inner.values)
    weight = oracle.vector(f"{operation.name}.weight")
    assert weight is not None
    return multiply(inner, as_kept(weight, precision), precision)


def head_norm(oracle: Oracle, operation: Operation, x: Measured) -> Measured:
    tokens = len(x.values)
    return rms_norm(oracle, operation, x.reshape(tokens, operation.heads, -1)).reshape(tokens, -1)


def sigmoid(oracle: Oracle, operation: Operation, x: Measured) -> Measured:
    """1 / (1 + exp(-x)); sum and quotient are float32."""
    output = moved(logistic, x)
    fast = EXP_UNITS * SUM_UNIT * (1.0 + np.abs(x.values)) * output.values * (1.0 - output.values)
    return rounded(output.values, oracle.precision, output.spread, fast, 2.0 * SUM_UNIT * output.values)


def logistic(x: Array) -> Array:
    """1 / (1 + exp(-x)), which does not overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


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


def found_state(oracle: Oracle, operation: Operation, u: Measured) -> Measured:
    """[S, (L-1)*D]: the last L-1 rows of u [T, D] before each step, the oldest first, zeros before the first token."""
    columns = len(operation.parts)
    padded = u.behind_zeros(columns)
    return joined([padded[start : start + columns].reshape(1, -1) for start in oracle.steps.starts])


def convolution(oracle: Oracle, operation: Operation, u: Measured, state: Measured | None = None) -> Measured:
    """Of u [T, D]; if `state` is there, each step's rows after what the step found."""
    taps = oracle.vector(f"{operation.name}.weight")
    assert taps is not None
    filters, bias = as_kept(taps[:, 0, :], oracle.precision), oracle.vector(f"{operation.name}.bias")
    count, columns = taps.shape[-1], taps.shape[-1] - 1
    windows = [u[: oracle.steps.first if state else None].behind_zeros(columns)]
    if state:
        found = state.reshape(len(state.values), columns, -1)
        windows += [joined([found[step], u[rows]]) for step, rows in enumerate(oracle.steps.spans())]
    seen = joined(
        [
            Measured(
                *(np.lib.stride_tricks.sliding_window_view(array, count, axis=0) for array in (x.values, x.spread))
            )
            for x in windows
            if len(x.values) > columns
        ]
    )
    output = dot(seen, filters)  # [T, D, L] by [D, L]
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


def found_rows(oracle: Oracle, operation: Operation, rows: Measured) -> Measured:
    """Of rows [T, width] those that each step sees, one step after another, behind those that came before all steps."""
    assert isinstance(operation.per, Context)
    return joined([rows[: oracle.steps.first], *(rows[seen] for seen in oracle.steps.seen(operation.per.window))])


def attention(oracle: Oracle, operation: Operation, first: Measured, *cached: Measured) -> Measured:
    """From queries [T, H*E], scores or weights [T, H*T] to scores, weights or attention's output [T, H*E]."""
    given, made = (name.rpartition(".")[2] for name in (operation.inputs[0], operation.name))
    assert operation.layer is not None
    return mixed_heads(
        given,
        made,
        oracle.precision,
        oracle.steps,
        window_of(oracle.config, operation.layer),
        first.reshape(len(first.values), operation.heads, -1),
        [rows.reshape(len(rows.values), -1, oracle.config.head_dim) for rows in cached],
    )


def gated_heads(oracle: Oracle, operation: Operation, mixed: Measured, gates: Measured) -> Measured:
    """[T, H*E] by gates [T, H]."""
    tokens = len(gates.values)
    by_head = multiply(mixed.reshape(tokens, operation.heads, -1), gates.reshape(tokens, -1, 1), oracle.precision)
    return by_head.reshape(tokens, -1)


def preferred(oracle: Oracle, operation: Operation, scores: Measured) -> Measured:
    """What experts are chosen by: scores plus the bias [N]; bias and sum are float32 in every format."""
    if not oracle.mixture.use_expert_bias:
        return scores
    bias = oracle.vector(operation.name.replace(CHOSEN, "expert_bias"))
    assert bias is not None
    values = scores.values + bias.astype(np.float64)
    return Measured(values, together(scores.spread, SUM_UNIT * values))


def choice(oracle: Oracle, operation: Operation, scores: Measured, by_place: bool = False) -> Measured:
    """Scores [T, N] -> places [T, N]; `by_place`: the order of the chosen may be open, too."""
    return places(preferred(oracle, operation, scores), oracle.mixture.num_experts_per_tok, by_place)


def choice_by_place(oracle: Oracle, operation: Operation, scores: Measured) -> Measured:
    return choice(oracle, operation, scores, by_place=True)


def routing_weights(oracle: Oracle, operation: Operation, scores: Measured, chosen: Measured) -> Measured:
    """[T, K] from scores [T, N] and places [T, N]. The sum may be rounded at each of its terms, and the quotient.

    Some engines (vLLM) do not add LEAST_SUM to the sum: no finding.
    """
    mixture, precision, ids = oracle.mixture, oracle.precision, chosen_ids(chosen, operation.width)
    values, spread, doubt = (np.take_along_axis(x, ids, axis=-1) for x in (scores.values, scores.spread, chosen.spread))
    apart = np.abs(values[..., None] - scores.values[:, None]) * chosen.spread[:, None]  # [T, K, N]
    shares, left_out = Measured(values, together(spread, apart.max(axis=-1) * doubt)), 0.0
    if mixture.norm_topk_prob:
        total = values.sum(-1, keepdims=True) + LEAST_SUM
        off = np.sqrt(np.square(shares.spread).sum(-1, keepdims=True))
        rounding = precision.unit * math.sqrt(operation.width) * total
        left_out = 0.5 * np.minimum(LEAST_SUM / total, MOST_LEFT_OUT)
        shares = moved(np.divide, shares, Measured(total, together(off, rounding)))
    values = mixture.routed_scaling_factor * shares.values
    spread = mixture.routed_scaling_factor * shares.spread
    return rounded(values, precision, spread, precision.unit * values, left_out * values)


def expert_outputs(oracle: Oracle, operation: Operation, x: Measured, chosen: Measured) -> Measured:
    """[T, K*D] from x [T, D] and places [T, N]; a place in doubt is off by as much as its farthest other expert."""
    ids, mlp = chosen_ids(chosen, len(operation.parts)), operation.name.rpartition(".")[0]
    outputs = known(np.zeros((*ids.shape, x.values.shape[1])))  # [T, K, D]
    is_possible = (chosen.values > 0.0) | (chosen.spread > 0.0)
    by_expert: dict[int, tuple[Array, Measured]] = {}
    for expert in map(int, np.flatnonzero(is_possible.any(axis=0))):
        rows = np.flatnonzero(is_possible[:, expert])
        gate, up = (product_with(f"{mlp}.experts.{expert}.{part}", oracle, x[rows]) for part in ("w1", "w3"))
        output = product_with(f"{mlp}.experts.{expert}.w2", oracle, gated(oracle, None, gate, up))
        by_expert[expert] = rows, output
        of_expert, place = np.nonzero(ids[rows] == expert)
        outputs.values[rows[of_expert], place] = output.values[of_expert]
        outputs.spread[rows[of_expert], place] = output.spread[of_expert]
    is_open = np.take_along_axis(chosen.spread, ids, axis=-1) > 0.0  # [T, K]
    off = np.zeros_like(outputs.values)
    for expert, (rows, output) in by_expert.items():
        is_rival = is_open[rows] & (chosen.spread[rows, expert] > 0.0)[:, None] & (ids[rows] != expert)
        of_expert, place = np.nonzero(is_rival)
        at = rows[of_expert], place
        off[at] = np.maximum(off[at], np.abs(output.values[of_expert] - outputs.values[at]))
    return Measured(outputs.values, together(outputs.spread, off)).reshape(len(ids), -1)


def combine_experts(oracle: Oracle, operation: Operation, outputs: Measured, weights: Measured) -> Measured:
    """The sum [T, D] of outputs [T, K*D] times weights [T, K]. Each product and partial sum may be rounded."""
    tokens, count = weights.values.shape
    terms = multiply(outputs.reshape(tokens, count, -1), weights.reshape(tokens, count, 1), oracle.precision)
    sums = oracle.precision.unit * math.sqrt(count - 1) * np.abs(terms.values).sum(axis=1)
    return rounded(terms.values.sum(axis=1), oracle.precision, np.sqrt(np.square(terms.spread).sum(axis=1)), sums)
