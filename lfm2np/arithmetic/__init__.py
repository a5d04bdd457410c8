"""The arithmetics of the network: `exact` (default), `float32`, `float64` and emulated `bfloat16`; and `integers`.

Each offers the operations of `ReferenceNumerics`, in which reference.py is written, and in nothing else. `integers`
offers no more: it defines what `exact` has to equal. The others are `Numerics`, which the batched engine needs.
Letters: T tokens, C context length, D width, H query heads, G key/value heads, E head_dim, L convolution taps,
N experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import exact, ieee
from lfm2np.arithmetic.attention import Parts
from lfm2np.arithmetic.matrix import AttentionScale, Matrix, Rows, Weights
from lfm2np.errors import RequestError
from lfm2np.truth import integers

Array = NDArray[Any]
NAMES = ("exact", "float32", "float64", "bfloat16")  # of the engine
TRUTH = "integers"  # of reference.py only


class ReferenceNumerics(Protocol):
    """What reference.py needs. Arrays are float32 (float64 in `float64`); the batch axis comes first.

    A matrix is whatever `prepare_matrix` of the same arithmetic made.
    """

    @property
    def name(self) -> str: ...

    @property
    def longest_context(self) -> int:
        """The most positions that attention can see."""

    @property
    def weight_bytes(self) -> int:
        """Memory of one weight of a matrix."""

    def prepare_matrix(self, weight: Weights, what: str) -> Any:
        """Weights [outputs, inputs] in the form that `linear` wants; `what` names them in errors."""

    def embed(self, rows: Weights) -> Array:
        """Embedding rows [T, D] as activations."""

    def linear(self, x: Array, matrix: Any, bias: NDArray[np.float32] | None = None) -> Array:
        """x [T, inputs] -> [T, outputs]."""

    def add(self, x: Array, y: Array) -> Array: ...

    def multiply(self, x: Array, y: Array) -> Array: ...

    def rms_norm(self, x: Array, weight: NDArray[np.float32], eps: float) -> Array:
        """x / sqrt(mean(x**2) + eps) * weight over the last axis."""

    def swiglu(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up, elementwise."""

    def sigmoid(self, x: Array) -> Array:
        """1 / (1 + exp(-x)): the router's scores [T, N]."""

    def add_expert_bias(self, scores: Array, bias: NDArray[np.float32]) -> Array:
        """Scores [T, N] plus the experts' bias [N], by which they are chosen."""

    def top_k(self, preferred: Array, count: int) -> NDArray[np.int64]:
        """The experts [T, count] with the largest of preferred [T, N], best first; of equal ones the lowest ids."""

    def routing_weights(self, scores: Array, normalised: bool, factor: float) -> Array:
        """Chosen experts' scores [T, K] as weights: divided by their sum + 1e-6 if `normalised`, times `factor`."""

    def combine_experts(self, outputs: Array, weights: Array) -> Array:
        """Outputs [T, K, D] of each token's experts, times their weights [T, K], added best expert first: [T, D]."""

    def rotate(self, x: Array, cos: NDArray[np.float64], sin: NDArray[np.float64], float32_table: bool = ...) -> Array:
        """Rotary embedding of x [T, heads, E] by the angles [T, E/2] of its pairs (i, i + E/2).

        float32_table  an arithmetic of fewer bits does not round cos and sin: see rope.Rope
        """

    def attend(self, queries: Array, keys: Array, values: Array, scale: AttentionScale) -> Array:
        """Causal attention of one request: queries [T, H, E] are the last T of the C positions of keys [C, G, E].

        `scale` says how many positions back a query sees. What else it holds cannot change the result but by rounding;
        only `exact` uses it.
        """

    def convolve(
        self, history: Array, u: Array, taps: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> Array:
        """Depthwise causal convolution of u [T, D] by taps [D, L], after the L-1 rows of history."""

    def log_softmax(self, logits: Array) -> NDArray[np.float64]:
        """Log-probabilities over the last axis, float64."""


class Numerics(ReferenceNumerics, Protocol):
    """What the engine needs beside that: a cache, several requests at once, weights that are not prepared."""

    def prepare_matrix(self, weight: Weights, what: str) -> Matrix: ...

    def stream_matrix(self, weight: Rows, what: str) -> Matrix:
        """The same, of weights that stay where they are and are prepared for each product, piece by piece."""

    def cache_columns(self, groups: int, head_dim: int) -> Sequence[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each array that the cache holds of one token's keys and values."""

    def cache_entries(self, keys: Array, values: Array, scale: AttentionScale) -> tuple[Array, ...]:
        """Keys and values [T, G, E] in the form in which the cache holds them: arrays [T, ...], a row a token."""

    def attend_ragged(
        self, queries: Array, rows: Sequence[slice], cached: Sequence[Parts], scale: AttentionScale
    ) -> Array:
        """`attend` for several requests, over cache entries; 0 in the rows of finite queries [T, H, E] that none has.

        A request's C positions come in parts that follow each other.
        """

    def convolve_ragged(
        self, windows: Sequence[Array], taps: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> Array:
        """The same for several requests, each its history and u below each other [L-1+t, D]: [T, D] of all."""


_ARITHMETICS: dict[str, Numerics] = {
    TRUTH: cast("Numerics", integers),  # no Numerics: whoever builds an engine refuses it
    "exact": exact,
    "float32": ieee.FLOAT32,
    "float64": ieee.FLOAT64,
    "bfloat16": ieee.BFLOAT16,
}


def numerics_named(name: str) -> Numerics:
    """The arithmetic of that name; RequestError for another."""
    if not isinstance(name, str) or name not in _ARITHMETICS:
        raise RequestError(f"numerics {name!r}: expected one of {', '.join([*NAMES, TRUTH])}")
    return _ARITHMETICS[name]
