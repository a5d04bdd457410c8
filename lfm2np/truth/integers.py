"""The arithmetic that defines the right answer: every sum is a sum of integers, which has no rounding and no order.

This file and reference.py are what has to be believed; `exact` computes the same bits by BLAS, on threads and in
batches, and is compared with this one. Nothing here is clever: NumPy's int64 arrays, one request, one operation after
another. Between operations activations are float32.

A sum of products a[i] * b[i] is computed so. Each operand is put on a grid: divided by a power of two that fits its
row and rounded to the nearest integer, ties to even. The integers are multiplied and added up; the grids are chosen so
that the absolute products of any sum add up to at most 2**53, so int64 never overflows, and the sum is a float64 as it
stands. It is multiplied by its powers of two, and rounded to float32. Each grid has its bits and its proof where it
is used. What is no sum is elementwise in float64, in the order that is written here: IEEE 754 defines +, -, *, /, sqrt,
rint, ldexp and frexp to the last bit, and elementary.py makes exp, log, sin and cos of them.

Two roundings remain where several float64 are added, and are part of the definition: the slices of weights that need
more than 20 bits, and a bias, are added in float64, one after another, before the result is rounded to float32.

Letters: T tokens, C context, D width, H query heads, G key/value heads, E head_dim, L taps, N experts, K experts of a
token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.errors import NumericsError
from lfm2np.truth import elementary

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Weights = Float32 | Float64  # as a checkpoint holds them: float64 where they are quantised

name = "integers"

SUM_BITS = 53  # integers up to 2**53 are float64
WEIGHT_BITS = 20  # weights: bfloat16 is then exact down to 2**-12 of the row's largest, float16 to 2**-9
LOW_WEIGHT_BITS = 16  # each further slice: the second of float32 weights, what quantised weights need
MOST_SLICES = 3  # 52 bits: of quantised weights, whose values are float64
LEAST_BITS, MOST_BITS = 16, 30  # of inputs: coarser ones are refused, finer ones gain nothing over float32
TERM_BITS = 36  # of each half of a term of exact_sum,
TERMS = 2**18  # which has at most so many;
EXACT_TERMS = 2**17  # so many are summed without rounding: EXACT_TERMS * 2**TERM_BITS = 2**SUM_BITS
VALUE_BITS = 24  # attention's values
SHARE_BITS, LOW_SHARE_BITS = 28, 12  # attention's weights relative to their sum, and what that leaves
ZERO_EXPONENT = -200  # of a row of zeros
LEAST_SUM = 1e-6  # added to a sum of experts' weights before it divides them
longest_context = TERMS
weight_bytes = 8


class Matrix(NamedTuple):
    """Weights [outputs, inputs] on their grids: columns times the sum over slices of units * 2**-shift."""

    columns: Int32  # [inputs]: column i was divided by 2**columns[i]; input i is multiplied by it
    slices: tuple[tuple[Int64, Int32], ...]  # units [outputs, inputs], and the shift [outputs, 1] that made them so
    input_bits: int

    @property
    def outputs(self) -> int:
        return len(self.slices[0][0])


class AttentionScale(NamedTuple):
    """Powers of two that bring the channels of one attention layer to a common size, and how far the layer looks back.

    They come from the weights, so every token has the same: a channel that is always large must not coarsen the grid
    of the others.
    """

    keys: Int32  # [E]: keys are multiplied by 2**keys, queries divided by it
    values: Int32  # [G, E]: values are divided by 2**values, outputs multiplied by it
    window: int | None = None  # positions that a token sees, its own included; None: all before it


def exponent_of(x: Weights) -> Int32:
    """The least e of each row [..., 1] with |x| < 2**e over the last axis; ZERO_EXPONENT for a row of zeros."""
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    return np.where(largest == 0.0, np.int32(ZERO_EXPONENT), np.frexp(largest)[1])


def scale(x: Weights | Int64, shift: Int32 | int) -> Float64:
    """x * 2**shift in float64: exact unless it becomes subnormal."""
    return np.asarray(np.ldexp(x.astype(np.float64), shift))


def units_of(x: Weights, shift: Int32 | int = 0) -> Int64:
    """The integers nearest to x * 2**shift, ties to even; below 2**63 by whoever chose the shift."""
    return np.rint(scale(x, shift)).astype(np.int64)


def exact_sum(x: Float64) -> Float64:
    """Sum over the last axis [..., n] of at most 2**18 terms; off by less than 2**-51 of sum|x|.

    Each term is high + low, multiples of 2**-36 and of 2**-72 of the row's power of two, at most 2**36 and 2**35 units.
    Up to 2**17 terms either sum is at most 2**53, so that only adding the two rounds, by less than 2**-52 of sum|x|;
    with more, the high sum is rounded to float64 before.
    """
    if x.shape[-1] > TERMS:
        raise NumericsError(f"a sum of {x.shape[-1]} terms: at most {TERMS} can be added exactly")
    shift = TERM_BITS - exponent_of(x)
    high = units_of(x, shift)
    low = units_of(scale(x, shift) - high, TERM_BITS)
    total = scale(high.sum(-1), 0) + scale(low.sum(-1), -TERM_BITS)
    return scale(total, -shift[..., 0])


def prepare_matrix(weight: Weights, what: str) -> Matrix:
    """Weights [outputs, inputs] on their grids, `what` names them. NumericsError where inputs would get few bits.

    Columns are first brought to a common size by powers of two: an input channel that is large where its weights are
    small must not coarsen the grid of the others. A row's first slice has 20 bits, each further one 16 bits of what
    those before it leave. If the absolute units of no row of a slice sum to more than 2**s and inputs have b bits, no
    sum of products exceeds 2**(b + s); hence b = 53 - s.
    """
    columns = column_exponents(weight)
    scaled = scale(weight, -columns)
    shift = WEIGHT_BITS - exponent_of(scaled)
    rest, slices = scale(scaled, shift), []  # in units of the first slice
    for _ in range(most_slices(weight)):
        units = units_of(rest)
        slices.append((units, shift))
        rest = scale(rest - units, LOW_WEIGHT_BITS)
        shift = shift + np.int32(LOW_WEIGHT_BITS)
        if weight.dtype == np.float64 and not rest.any():
            break  # quantised weights get the slices that hold every bit
    sum_bits = max((int(np.abs(units).sum(-1).max()) - 1).bit_length() for units, _ in slices)
    input_bits = min(MOST_BITS, SUM_BITS - sum_bits)
    if input_bits < LEAST_BITS:
        raise NumericsError(
            f"{what}: rows of {weight.shape[1]} weights sum to 2**{sum_bits} units of {WEIGHT_BITS} bits, which "
            f"leaves {input_bits} bits for their inputs; expected at least {LEAST_BITS}"
        )
    return Matrix(columns, tuple(slices), input_bits)


def most_slices(weight: Weights) -> int:
    """One for weights stored in bfloat16 or float16, which have at most 11 significant bits; two for float32."""
    if weight.dtype == np.float64:
        return MOST_SLICES
    return 2 if np.any(weight.view(np.uint32) & 0x1FFF) else 1


def column_exponents(weight: Weights) -> Int32:
    """[inputs]: of each column's largest weight relative to its row, as one large row must not decide for all."""
    relative = scale(np.abs(weight), -exponent_of(weight))
    return exponent_of(relative.max(axis=0)[:, None])[:, 0]


def embed(rows: Weights) -> Float32:
    """As activations are: float32, to which only quantised rows can be rounded."""
    return rows.astype(np.float32)


def linear(x: Float32, matrix: Matrix, bias: Float32 | None = None) -> Float32:
    """x [T, inputs] -> [T, outputs]: each row of x on its grid, sums of integer products, slices, bias, float32."""
    wide = scale(x, matrix.columns)
    shift = np.int32(matrix.input_bits) - exponent_of(wide)  # [T, 1]
    units = units_of(wide, shift)
    total = np.zeros((len(x), matrix.outputs), np.float64)
    for weights, weight_shift in matrix.slices:
        products = units @ weights.T  # int64, at most 2**53
        total += scale(products, -(shift + weight_shift.T))
    if bias is not None:
        total += bias
    return total.astype(np.float32)


def add(x: Float32, y: Float32) -> Float32:
    return x + y


def multiply(x: Float32, y: Float32) -> Float32:
    return x * y


def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis; squares of float32 are exact in float64."""
    wide = x.astype(np.float64)
    mean = exact_sum(wide * wide) / x.shape[-1]
    inverse = 1.0 / np.sqrt(mean + eps)
    return np.asarray(wide * inverse[..., None] * weight.astype(np.float64)).astype(np.float32)


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x))."""
    return (1.0 / (elementary.exp(-x.astype(np.float64)) + 1.0)).astype(np.float32)


def swiglu(gate: Float32, up: Float32) -> Float32:
    """gate / (1 + exp(-gate)) * up."""
    wide = gate.astype(np.float64)
    return (wide / (elementary.exp(-wide) + 1.0) * up.astype(np.float64)).astype(np.float32)


def rotate(x: Float32, cos: Float64, sin: Float64, float32_table: bool = True) -> Float32:
    """x [T, heads, E] by the angles of cos and sin [T, E/2], which are not rounded here: pairs (i, i + E/2)."""
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(np.float32)


def convolve(history: Float32, u: Float32, taps: Float32, bias: Float32 | None = None) -> Float32:
    """history [L-1, D], u [T, D], taps [D, L] -> [T, D]: added up in float64, the oldest tap first, then the bias."""
    window = np.concatenate([history, u]).astype(np.float64)  # [L-1+T, D]
    total = np.zeros(u.shape, np.float64)
    for tap in range(taps.shape[1]):
        total += window[tap : tap + len(u)] * taps[:, tap].astype(np.float64)
    if bias is not None:
        total += bias
    return total.astype(np.float32)


def attention_scale(q_norm: Float32, k_norm: Float32, v_proj: Weights, window: int | None = None) -> AttentionScale:
    """Scales from the norms' weights [E] and the value projection [G * E, D].

    Keys: half the difference of the norms' exponents, the larger of each rotated pair (i, i + E/2), which must share
    a scale. Values: the exponent of the row that computes each channel.
    """
    pairs = [np.abs(norm).reshape(2, -1).T for norm in (q_norm, k_norm)]  # each [E/2, 2]
    sizes = [np.where(np.any(pair != 0.0, axis=1), exponent_of(pair)[:, 0], 0) for pair in pairs]
    half_difference = (sizes[0] - sizes[1]) // 2
    rows = exponent_of(v_proj)[:, 0].reshape(-1, len(q_norm))
    return AttentionScale(np.concatenate([half_difference, half_difference]).astype(np.int32), rows, window)


def attend(queries: Float32, keys: Float32, values: Float32, scales: AttentionScale) -> Float32:
    """Causal attention: queries [T, H, E] stand at the last T of the C positions of keys and values [C, G, E]."""
    for what, operand in (("queries", queries), ("keys", keys), ("values", values)):
        if not np.isfinite(operand).all():
            raise NumericsError(f"{what} of attention: expected finite numbers")
    shared = queries.shape[1] // keys.shape[1]
    positions, query_positions = np.arange(len(keys)), np.arange(len(keys) - len(queries), len(keys))[:, None]
    visible = positions <= query_positions  # [T, C]
    if scales.window is not None:
        visible &= positions > query_positions - scales.window
    mixed = np.empty(queries.shape, np.float32)
    for head in range(queries.shape[1]):
        group = head // shared
        scores = head_scores(queries[:, head], keys[:, group], scales.keys)
        mixed[:, head] = mix_values(np.where(visible, scores, -np.inf), values[:, group], scales.values[group])
    return mixed


def head_scores(queries: Float32, keys: Float32, shift: Int32) -> Float64:
    """Queries [T, E] of one head times its keys [C, E], over sqrt(E): [T, C].

    Each row of either on a grid of b bits, with 2b + ceil(log2 E) <= 53: no sum of E products exceeds 2**53.
    """
    bits = min(MOST_BITS, (SUM_BITS - (queries.shape[-1] - 1).bit_length()) // 2)
    wide_queries, wide_keys = scale(queries, -shift), scale(keys, shift)
    query_shift, key_shift = bits - exponent_of(wide_queries), bits - exponent_of(wide_keys)
    products = units_of(wide_queries, query_shift) @ units_of(wide_keys, key_shift).T
    return scale(products, -(query_shift + key_shift.T)) * (1.0 / math.sqrt(queries.shape[-1]))


def mix_values(scores: Float64, values: Float32, channels: Int32) -> Float32:
    """Softmax of scores [T, C], -inf where hidden, times the values [C, E] of one group: [T, E].

    A value is at most 2**24 units of its own row's power of two, which is moved to its weight. The weights of a row sum
    to less than 2**top; a high unit is 2**-28 of that, a low unit 2**-12 of a high one. So a row's high units sum to at
    most 2**28 + C, its low ones are at most 2**11 each, and with C <= 2**18 neither sum of products exceeds 2**53.
    """
    scaled = scale(values, -channels)
    exponents = exponent_of(scaled)  # [C, 1]
    units = units_of(scaled, VALUE_BITS - exponents)
    weights = elementary.exp(scores - scores.max(-1, keepdims=True))  # 0 where hidden
    totals = exact_sum(weights)[:, None]
    weights = scale(weights, exponents.T)
    shift = TERM_BITS - exponent_of(weights)
    top = np.frexp(scale(units_of(weights, shift).sum(-1, keepdims=True), 0))[1] - shift  # [T, 1]
    shares = scale(weights, SHARE_BITS - top)
    high = units_of(shares)
    low = units_of(shares - high, LOW_SHARE_BITS)
    mixed = scale(high @ units, 0) + scale(low @ units, -LOW_SHARE_BITS)
    mixed = scale(mixed, top + channels - (SHARE_BITS + VALUE_BITS))
    return np.asarray(mixed / totals).astype(np.float32)


def add_expert_bias(scores: Float32, bias: Float32) -> Float32:
    """Scores [T, N] and the bias [N]: by them experts are chosen."""
    return scores + bias


def top_k(preferred: NDArray[Any], count: int) -> Int64:
    """The experts [T, count] with the largest of preferred [T, N], best first; of equal ones the lowest ids."""
    return np.argsort(-preferred, axis=-1, kind="stable")[:, :count]


def routing_weights(scores: Float32, normalised: bool, factor: float) -> Float32:
    """The chosen experts' scores [T, K] as weights: divided by their sum plus 1e-6 if `normalised`, times `factor`."""
    wide = scores.astype(np.float64)
    if normalised:
        wide = wide / (exact_sum(wide)[..., None] + LEAST_SUM)
    return (wide * factor).astype(np.float32)


def combine_experts(outputs: Float32, weights: Float32) -> Float32:
    """Outputs [T, K, D] of each token's experts, times their weights [T, K], added in float64, best first: [T, D]."""
    total = np.zeros((len(outputs), outputs.shape[2]), np.float64)
    for place in range(outputs.shape[1]):
        total += outputs[:, place].astype(np.float64) * weights[:, place, None]
    return total.astype(np.float32)


def log_softmax(logits: Float32) -> Float64:
    """Log-probabilities over the last axis, float64; off by less than 2**-46 of their size plus 2**-50."""
    below = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(below - elementary.log(exact_sum(elementary.exp(below)))[..., None])
