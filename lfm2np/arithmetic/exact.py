"""The default arithmetic: every sum is exact, so its order cannot matter and the bits are the same everywhere.

Operands are rounded to a grid, the multiples of one power of two. A product of two grid values is an integer multiple
of the product of their grids; if the absolute products of a sum are at most 2**53 of those units, then every partial
sum, in whatever order, blocking, thread or fused multiply-add, is a float64, and nothing is ever rounded. That is the
whole proof; each function says which grid keeps it true. Scaling by a power of two does not round: float32 operands,
and the weights of a quantised checkpoint, lie between 2**-149 and 2**128, so products and grids stay far inside float64
(only weights of attention may become subnormal, and those are 0 on its grid).

All else is elementwise IEEE +, -, *, /, sqrt, rint, ldexp, frexp in a written order. Between operations values are
float32. A zero sum is made +0, since its sign does depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from lfm2np.arithmetic.convolution_windows import below_each_other, seen_by_tap
from lfm2np.arithmetic.exact_attention import attend as attend
from lfm2np.arithmetic.exact_attention import attend_ragged as attend_ragged
from lfm2np.arithmetic.exact_attention import cache_columns as cache_columns
from lfm2np.arithmetic.exact_attention import cache_entries as cache_entries
from lfm2np.arithmetic.grids import (
    TERMS,
    Float32,
    Float64,
    exact_sum,
    round_to_grid,
)
from lfm2np.arithmetic.matrix import Grid, Matrix, Rows, Streamed, Weights
from lfm2np.arithmetic.pieces import PRODUCTS, elementwise, over_pieces, pieces, row_size
from lfm2np.arithmetic.products.product import product
from lfm2np.arithmetic.routing import add_expert_bias as add_expert_bias
from lfm2np.arithmetic.routing import combine_experts as combine_experts
from lfm2np.arithmetic.routing import routing_weights as routing_weights
from lfm2np.arithmetic.routing import sigmoid as sigmoid
from lfm2np.arithmetic.routing import top_k as top_k
from lfm2np.arithmetic.shapes import check
from lfm2np.arithmetic.weight_grids import prepared, prepared_rows, prove_grid
from lfm2np.errors import NumericsError
from lfm2np.truth import elementary

name = "exact"
weight_bytes = 8

longest_context = TERMS


def prepare_matrix(weight: Weights, what: str) -> Matrix:
    """Weights [slices * outputs, inputs] on the proved grids, a second slice below the first."""
    values, grid = prepared(weight, what)
    return Matrix(values.reshape(-1, weight.shape[1]), grid)


def stream_matrix(weight: Rows, what: str) -> Matrix:
    """The same, prepared anew for each product."""
    grid = prove_grid(weight, what)
    return Matrix(Streamed(weight, partial(prepared_rows, grid=grid), np.float64, grid.slices), grid)


def embed(rows: Weights) -> Float32:
    """As activations are: float32, to which only quantised rows can be rounded."""
    return rows.astype(np.float32, copy=False)


def linear(x: Float32, matrix: Matrix, bias: Float32 | None = None) -> Float32:
    """x [T, inputs] -> [T, outputs]. Exact by the matrix's grid, then rounded to float32 (a bias comes before)."""
    if matrix.grid is None:
        raise NumericsError("a matrix without a grid: it was prepared for another arithmetic than exact")
    rounded = on_matrix_grid(x, matrix.grid)
    result = np.empty((len(x), matrix.outputs), np.float32)
    for outputs, values in matrix.pieces():
        part = None if bias is None else bias[outputs]
        rounded_product(rounded, values, result[:, outputs], matrix.grid.slices, part)
    return result


def rounded_product(x: Float64, values: Float64, result: Float32, slices: int, bias: Float32 | None) -> None:
    """Grid values x [T, inputs] times values [slices * outputs, inputs], and a bias, rounded into result [T, outputs].

    By the matrix's grid the sums over inputs are exact in whatever order. Some outputs at a time, with several slices
    all of them.
    """
    outputs = result.shape[1]
    for part in pieces(outputs, len(x), PRODUCTS) if slices == 1 else [slice(0, outputs)]:
        products = product(x, values[part] if slices == 1 else values)
        round_products(products, slices, None if bias is None else bias[part], result[:, part])


def on_matrix_grid(x: Float32, grid: Grid) -> Float64:
    """Inputs x [T, inputs] of a product on the grid that its weights leave them."""
    rounded = np.empty(x.shape, np.float64)

    def compute(rows: slice) -> None:
        wide = x[rows].astype(np.float64)  # first: an operation on two formats converts them in small pieces
        wide *= grid.factors
        rounded[rows] = round_to_grid(wide, grid.activation_bits)

    over_pieces(compute, len(x), x.shape[1])
    return rounded


def round_products(products: Float64, slices: int, bias: Float32 | None, result: Float32) -> None:
    """Exact products [T, slices * outputs], and a bias, rounded once to float32 into result [T, outputs]."""
    outputs = result.shape[1]

    def compute(rows: slice) -> None:
        total = products[rows, :outputs] + 0.0  # -0 + 0 is +0
        for index in range(1, slices):
            total += products[rows, index * outputs : (index + 1) * outputs]
        if bias is not None:
            total += bias
        result[rows] = total

    over_pieces(compute, len(products), outputs)


def add(x: Float32, y: Float32) -> Float32:
    return elementwise(np.add, x, y)


def multiply(x: Float32, y: Float32) -> Float32:
    return elementwise(np.multiply, x, y)


def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis; squares of float32 are exact in float64."""
    normed, factors = np.empty(x.shape, np.float32), weight.astype(np.float64)

    def compute(rows: slice) -> None:
        wide = x[rows].astype(np.float64)
        mean = exact_sum(wide * wide, signed=False) / x.shape[-1]
        scale: Float64 = 1.0 / np.sqrt(mean + eps)
        wide *= scale[..., None]
        wide *= factors
        normed[rows] = wide

    over_pieces(compute, len(x), row_size(x))
    return normed


def swiglu(gate: Float32, up: Float32) -> Float32:
    """gate / (1 + exp(-gate)) * up; computed in float64, then rounded to float32."""
    gated = np.empty(gate.shape, np.float32)

    def compute(rows: slice) -> None:
        wide = gate[rows].astype(np.float64)
        divisor = elementary.exp(-wide)
        divisor += 1.0
        wide /= divisor
        wide *= up[rows].astype(np.float64)
        gated[rows] = wide

    over_pieces(compute, len(gate), row_size(gate))
    return gated


def rotate(x: Float32, cos: Float64, sin: Float64, float32_table: bool = True) -> Float32:
    """x [T, heads, E] by the angles of cos and sin [T, E/2], in float64, then rounded to float32."""
    half = x.shape[-1] // 2
    rotated = np.empty(x.shape, np.float32)

    def compute(rows: slice) -> None:
        part, own_cos, own_sin = x[rows], cos[rows, None, :], sin[rows, None, :]
        first, second = part[..., :half].astype(np.float64), part[..., half:].astype(np.float64)
        rotated[rows, :, :half] = first * own_cos - second * own_sin
        rotated[rows, :, half:] = second * own_cos + first * own_sin

    over_pieces(compute, len(x), row_size(x))
    return rotated


def convolve(history: Float32, u: Float32, taps: Float32, bias: Float32 | None = None) -> Float32:
    """history [L-1, D], u [T, D], taps [D, L] -> [T, D]. Elementwise in float64, oldest tap first, then float32."""
    check({"taps": (taps, "DL"), "u": (u, "TD"), "history": (history, "KD")}, K=taps.shape[1] - 1)
    return convolve_ragged([np.concatenate([history, u])], taps, bias)


def convolve_ragged(windows: Sequence[Float32], taps: Float32, bias: Float32 | None = None) -> Float32:
    """The same for several requests, each its history and u below each other [L-1+t, D]: [T, D] of all."""
    stacked, begins = below_each_other(windows, taps.shape[1] - 1)
    filters = taps.T.astype(np.float64)  # [L, D]
    count = len(stacked) - len(windows) * (len(filters) - 1)
    result = np.empty((count, stacked.shape[1]), np.float32)

    def compute(rows: slice) -> None:
        total = np.zeros((rows.stop - rows.start, stacked.shape[1]), np.float64)
        for tap in range(len(filters)):
            wide = seen_by_tap(stacked, begins, rows, tap).astype(np.float64)
            wide *= filters[tap]
            total += wide
        if bias is not None:
            total += bias
        result[rows] = total

    over_pieces(compute, len(result), result.shape[1])
    return result


def log_softmax(logits: Float32) -> Float64:
    """Log-probabilities over the last axis, float64; off by less than 2**-46 of their size plus 2**-50."""
    below = logits.astype(np.float64)
    below -= below.max(-1, keepdims=True)
    return np.asarray(below - elementary.log(exact_sum(elementary.exp(below), signed=False))[..., None])
