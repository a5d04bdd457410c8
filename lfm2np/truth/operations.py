"""The operations in which reference.py is written, and in nothing else: each arithmetic offers them.

Letters: T tokens, C context length, D width, H query heads, G key/value heads, E head_dim, L convolution taps,
N experts, K experts of a token.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lfm2np.truth.integers import AttentionScale, Weights

Array = NDArray[Any]


class Operations(Protocol):
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
