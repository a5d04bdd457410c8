"""The arithmetics of ordinary engines: float32, float64, and bfloat16 rounded after every operation.

Plain NumPy and its BLAS: fast, and not the same bits on every machine or in every batch. The order of operations
follows transformers (models/lfm2, eager attention). `float64` is the truth that rounding errors are measured
against: nothing in it is float32 but the rotary angles, which the model defines so. `bfloat16` holds float32 arrays
whose values are bfloat16: products accumulate in float32 and are rounded once, as PyTorch's do on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lfm2np.arithmetic.attention import (
    Parts,
    Span,
    attend_in_batches,
    over_spans,
    own_rows,
    stacked_scores,
    weighted_values,
)
from lfm2np.arithmetic.convolution_windows import below_each_other, seen_by_tap
from lfm2np.arithmetic.matrix import AttentionScale, Matrix, Rows, Streamed, Weights
from lfm2np.arithmetic.pieces import SMALL_PIECE, elementwise, over_pieces, pieces, row_size
from lfm2np.arithmetic.products.product import product
from lfm2np.arithmetic.routing import LEAST_SUM, top_k
from lfm2np.arithmetic.shapes import check, check_attention, require_finite_rows
from lfm2np.errors import NumericsError

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


def round_to_bfloat16(x: Array) -> Array:
    """The nearest bfloat16 of each float32 or float64, ties to even, as float32. Infinities and NaN stay."""
    if x.dtype == np.float64:
        x = round_to_odd(x)
    x = np.ascontiguousarray(x, np.float32)
    output = np.empty(x.shape, np.float32)
    bits, rounded, is_nan = x.reshape(-1).view(np.uint32), output.reshape(-1).view(np.uint32), False
    for part in pieces(x.size, 1, SMALL_PIECE):
        piece = rounded[part]
        np.right_shift(bits[part], 16, out=piece)
        piece &= np.uint32(1)
        piece += np.uint32(0x7FFF)
        piece += bits[part]  # of an infinity, whose other bits are 0, no more than those
        piece &= np.uint32(0xFFFF0000)
        is_nan = is_nan or bool(np.isnan(x.reshape(-1)[part].max()))
    return np.where(np.isnan(x), x, output) if is_nan else output


def round_to_odd(x: Float64) -> Float32:
    """float32, next to zero, its last bit set where it is not x: whoever rounds that to fewer bits has rounded once."""
    # What is too large is the largest, which is odd, and rounds to an infinity.
    with np.errstate(over="ignore", under="ignore"):
        near = x.astype(np.float32)
    bits = near.view(np.uint32) - (np.abs(near) > np.abs(x))  # of a float32, one less is the next towards zero
    return np.where(near == x, near, (bits.astype(np.uint32) | np.uint32(1)).view(np.float32))


def unchanged(x: Array) -> Array:
    return x


@dataclass(frozen=True)
class Ieee:
    """One ordinary arithmetic: arrays of `dtype`, and `keep` after each operation."""

    name: str
    dtype: DTypeLike
    weight_bytes: int
    keep: Callable[[Array], Array]
    longest_context = 2**20  # as many as have rotary angles
    top_k = staticmethod(top_k)

    def prepare_matrix(self, weight: Weights, what: str) -> Matrix:
        if self.keep is unchanged and weight.dtype == self.dtype:
            return Matrix(np.ascontiguousarray(weight))
        return Matrix(Streamed(weight, self.prepared_rows, self.dtype).prepared(slice(0, len(weight))))

    def stream_matrix(self, weight: Rows, what: str) -> Matrix:
        return Matrix(Streamed(weight, self.prepared_rows, self.dtype))

    def prepared_rows(self, weight: Weights) -> Array:
        """Rounded once: quantised weights come as float64."""
        return np.ascontiguousarray(self.keep(weight), self.dtype)

    def embed(self, rows: Weights) -> Array:
        return self.keep(rows).astype(self.dtype)

    def parameter(self, weight: Float32 | Float64) -> Array:
        """A constant (norm weight, filter, bias, rotary table) in this format."""
        return self.keep(weight.astype(self.dtype))

    def linear(self, x: Array, matrix: Matrix, bias: Float32 | None = None) -> Array:
        if matrix.grid is not None:
            raise NumericsError(f"a matrix with a grid: it was prepared for exact, not for {self.name}")
        parts = [product(x, values) for _, values in matrix.pieces()]
        products = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return self.keep(products if bias is None else products + self.parameter(bias))

    def add(self, x: Array, y: Array) -> Array:
        return self.keep(elementwise(np.add, x, y))

    def multiply(self, x: Array, y: Array) -> Array:
        return self.keep(elementwise(np.multiply, x, y))

    def rms_norm(self, x: Array, weight: Float32, eps: float) -> Array:
        normed, scale = np.empty_like(x), self.parameter(weight)

        def compute(rows: slice) -> None:
            mean = np.mean(x[rows] * x[rows], axis=-1, keepdims=True, dtype=self.dtype)
            normalised = self.keep(x[rows] * (1 / np.sqrt(mean + np.asarray(eps, self.dtype))))
            normed[rows] = self.keep(scale * normalised)

        over_pieces(compute, len(x), row_size(x))
        return normed

    def swiglu(self, gate: Array, up: Array) -> Array:
        gated = np.empty(gate.shape, gate.dtype)

        def compute(rows: slice) -> None:
            # exp(-gate) may be infinite; the quotient is then 0, as it should be.
            with np.errstate(over="ignore", under="ignore"):
                silu = np.exp(-gate[rows])
            silu += 1
            silu = self.keep(np.divide(gate[rows], silu, out=silu))
            gated[rows] = self.keep(np.multiply(silu, up[rows], out=silu))

        over_pieces(compute, len(gate), row_size(gate))
        return gated

    def sigmoid(self, x: Array) -> Array:
        with np.errstate(over="ignore", under="ignore"):  # as in swiglu
            return self.keep(np.asarray(1 / (1 + np.exp(-x)), self.dtype))

    def add_expert_bias(self, scores: Array, bias: Float32) -> Array:
        """Not rounded to bfloat16: the bias is float32 in a bfloat16 model, too, and so is the sum."""
        return np.asarray(scores + bias.astype(self.dtype))

    def routing_weights(self, scores: Array, normalised: bool, factor: float) -> Array:
        """PyTorch rounds a number that it adds to the format, and one that it multiplies by not."""
        if normalised:
            total = self.keep(scores.sum(-1, keepdims=True)) + self.parameter(np.full(1, LEAST_SUM))
            scores = self.keep(scores / self.keep(total))
        return self.keep(scores * np.asarray(factor, self.dtype))

    def combine_experts(self, outputs: Array, weights: Array) -> Array:
        return self.keep(self.keep(outputs * weights[..., None]).sum(axis=1))

    def rotate(self, x: Array, cos: Float64, sin: Float64, float32_table: bool = False) -> Array:
        """With a table in float32 the products are, too, and only their sums are rounded to the format."""
        if float32_table:
            return self.keep(rotated_wide(x, cos, sin, np.result_type(self.dtype, np.float32)))
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        cos, sin = self.parameter(cos)[:, None, :], self.parameter(sin)[:, None, :]
        rotated = [
            self.keep(first * cos) + self.keep(-second * sin),
            self.keep(second * cos) + self.keep(first * sin),
        ]
        return self.keep(np.concatenate(rotated, axis=-1))

    def convolve(self, history: Array, u: Array, taps: Float32, bias: Float32 | None = None) -> Array:
        check({"taps": (taps, "DL"), "u": (u, "TD"), "history": (history, "KD")}, K=taps.shape[1] - 1)
        return self.convolve_ragged([np.concatenate([history, u])], taps, bias)

    def convolve_ragged(self, windows: Sequence[Array], taps: Float32, bias: Float32 | None = None) -> Array:
        stacked, begins = below_each_other(windows, taps.shape[1] - 1)
        filters = np.ascontiguousarray(self.parameter(taps).T)  # [L, D]
        count = len(stacked) - len(windows) * (len(filters) - 1)
        total = np.zeros((count, stacked.shape[1]), self.dtype)
        if bias is not None:
            total += self.parameter(bias)

        def compute(rows: slice) -> None:
            for tap in range(len(filters)):
                total[rows] += seen_by_tap(stacked, begins, rows, tap) * filters[tap]

        over_pieces(compute, count, row_size(stacked))
        return self.keep(total)

    def cache_columns(self, groups: int, head_dim: int) -> list[tuple[tuple[int, ...], Any]]:
        return [((groups, head_dim), self.dtype), ((groups, head_dim), self.dtype)]

    def cache_entries(self, keys: Array, values: Array, scale: AttentionScale) -> tuple[Array, ...]:
        require_finite_rows(keys=keys, values=values)
        return keys, values

    def attend(self, queries: Array, keys: Array, values: Array, scale: AttentionScale) -> Array:
        check_attention(queries, keys, values)
        return self.attend_ragged(queries, [slice(0, len(queries))], [[(keys, values)]], scale)

    def attend_ragged(
        self, queries: Array, rows: Sequence[slice], cached: Sequence[Parts], scale: AttentionScale
    ) -> Array:
        return attend_in_batches(
            queries, rows, cached, lambda grouped, batch: self.attend_spans(grouped, batch, scale.window), scale.window
        )

    def attend_spans(self, queries: Array, spans: Sequence[Span], window: int | None) -> list[Array]:
        """Queries [G, H/G, T, E]; for each span [t, H, E]."""
        head_dim = queries.shape[-1]
        stacked = stacked_scores(queries, spans, window)  # [rows, C]

        def compute(rows: slice) -> None:
            scores = self.keep(self.keep(stacked[rows]) * np.asarray(1 / math.sqrt(head_dim), self.dtype))
            scores -= scores.max(-1, keepdims=True)
            weights = np.exp(scores, out=scores)
            weights /= weights.sum(-1, keepdims=True)
            stacked[rows] = self.keep(weights)

        over_pieces(compute, *stacked.shape)
        mixed = np.empty((len(stacked), head_dim), self.dtype)

        def mix_values(span: Span, weights: Array, output: Array) -> None:
            output[...] = self.keep(weighted_values(weights[..., : span.context], [values for _, values in span.parts]))

        over_spans(mix_values, spans, *(own_rows(array, spans, queries) for array in (stacked, mixed)))
        return [
            row.transpose(2, 0, 1, 3).reshape(span.tokens, -1, head_dim)
            for span, row in zip(spans, own_rows(mixed, spans, queries), strict=True)
        ]

    def log_softmax(self, logits: Array) -> NDArray[np.float64]:
        below = logits.astype(np.float64)
        below -= below.max(-1, keepdims=True)
        return np.asarray(below - np.log(np.exp(below).sum(-1, keepdims=True)))


def rotated_wide(x: Array, cos: Float64, sin: Float64, dtype: DTypeLike) -> Array:
    """x [T, heads, E] by the angles of cos and sin [T, E/2], in this format."""
    first, second = np.split(x.astype(dtype, copy=False), 2, axis=-1)
    c, s = cos[:, None, :].astype(dtype), sin[:, None, :].astype(dtype)
    return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)


FLOAT32 = Ieee("float32", np.float32, 4, unchanged)
FLOAT64 = Ieee("float64", np.float64, 8, unchanged)
BFLOAT16 = Ieee("bfloat16", np.float32, 4, round_to_bfloat16)
