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

from lfm2np.errors import NumericsError
from lfm2np.numerics.attention import first_positions, hide_later_positions, joined_scores, weighted_values
from lfm2np.numerics.matrix import AttentionScale, Matrix
from lfm2np.numerics.pieces import pieces
from lfm2np.numerics.product import product
from lfm2np.numerics.shapes import check, check_attention, require_finite_rows

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


def round_to_bfloat16(x: Array) -> Array:
    """The nearest bfloat16 of each float32, ties to even, as float32. Infinities and NaN stay."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def unchanged(x: Array) -> Array:
    return x


@dataclass(frozen=True)
class Ieee:
    """One ordinary arithmetic: arrays of `dtype`, and `keep` after each operation."""

    name: str
    dtype: DTypeLike
    weight_bytes: int
    keep: Callable[[Array], Array]

    def prepare_matrix(self, weight: Float32, what: str) -> Matrix:
        return Matrix(self.keep(np.ascontiguousarray(weight, self.dtype)))

    def embed(self, rows: Float32) -> Array:
        return self.keep(rows.astype(self.dtype))

    def parameter(self, weight: Float32 | Float64) -> Array:
        """A constant (norm weight, filter, bias, rotary table) in this format."""
        return self.keep(weight.astype(self.dtype))

    def linear(self, x: Array, matrix: Matrix, bias: Float32 | None = None) -> Array:
        if matrix.grid is not None:
            raise NumericsError(f"a matrix with a grid: it was prepared for exact, not for {self.name}")
        made = product(x, matrix.values)
        return self.keep(made if bias is None else made + self.parameter(bias))

    def add(self, x: Array, y: Array) -> Array:
        return self.keep(x + y)

    def multiply(self, x: Array, y: Array) -> Array:
        return self.keep(x * y)

    def rms_norm(self, x: Array, weight: Float32, eps: float) -> Array:
        mean = np.mean(x * x, axis=-1, keepdims=True, dtype=self.dtype)
        normalised = self.keep(x * (1 / np.sqrt(mean + np.asarray(eps, self.dtype))))
        return self.keep(self.parameter(weight) * normalised)

    def swiglu(self, gate: Array, up: Array) -> Array:
        with np.errstate(over="ignore"):  # exp(-gate) may be infinite; the quotient is then 0, as it should be
            silu = self.keep(gate / (1 + np.exp(-gate)))
        return self.keep(silu * up)

    def rotate(self, x: Array, cos: Float64, sin: Float64) -> Array:
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
        window = np.concatenate([history, u])
        filters = self.parameter(taps)
        total = np.zeros_like(u) if bias is None else np.broadcast_to(self.parameter(bias), u.shape).copy()
        for tap in range(taps.shape[1]):
            total += window[tap : tap + len(u)] * filters[:, tap]
        return self.keep(total)

    def cache_columns(self, groups: int, head_dim: int) -> list[tuple[tuple[int, ...], Any]]:
        return [((groups, head_dim), self.dtype), ((groups, head_dim), self.dtype)]

    def cache_entries(self, keys: Array, values: Array, scale: AttentionScale) -> tuple[Array, ...]:
        require_finite_rows(keys=keys, values=values)
        return keys, values

    def attend(self, queries: Array, keys: Array, values: Array, scale: AttentionScale) -> Array:
        check_attention(queries, keys, values)
        return self.attend_cached(queries, [(keys, values)], scale)

    def attend_cached(self, queries: Array, cached: Sequence[tuple[Array, ...]], scale: AttentionScale) -> Array:
        require_finite_rows(queries=queries)
        tokens, heads, head_dim = queries.shape
        groups = cached[0][0].shape[1]
        context = sum(len(keys) for keys, _ in cached)
        grouped = queries.reshape(tokens, groups, heads // groups, head_dim).transpose(1, 2, 0, 3)  # [G, H/G, T, E]
        output = np.empty_like(queries)
        for rows in pieces(tokens, heads * context):
            visible = context - tokens + rows.stop  # no query of this piece sees more
            parts = first_positions(cached, visible)
            scores = self.keep(joined_scores(grouped[:, :, rows], [keys for keys, _ in parts]))
            scores = self.keep(scores * np.asarray(1 / math.sqrt(head_dim), self.dtype))
            hide_later_positions(scores)
            scores -= scores.max(-1, keepdims=True)
            weights = np.exp(scores, out=scores)
            weights = self.keep(weights / weights.sum(-1, keepdims=True))  # [G, H/G, t, visible]
            mixed = self.keep(weighted_values(weights, [values for _, values in parts]))  # [G, H/G, t, E]
            output[rows] = mixed.transpose(2, 0, 1, 3).reshape(-1, heads, head_dim)
        return output

    def log_softmax(self, logits: Array) -> NDArray[np.float64]:
        below = logits.astype(np.float64)
        below -= below.max(-1, keepdims=True)
        return np.asarray(below - np.log(np.exp(below).sum(-1, keepdims=True)))


FLOAT32 = Ieee("float32", np.float32, 4, unchanged)
FLOAT64 = Ieee("float64", np.float64, 8, unchanged)
BFLOAT16 = Ieee("bfloat16", np.float32, 4, round_to_bfloat16)
