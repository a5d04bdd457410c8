"""The arithmetics of the network: `exact` (default), `float32`, `float64` and emulated `bfloat16`; and `integers`.

Each offers the operations of truth/operations.py, in which reference.py is written, and in nothing else. `integers`
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
from lfm2np.truth.operations import Array, Operations

NAMES = ("exact", "float32", "float64", "bfloat16")  # of the engine
TRUTH = "integers"  # of reference.py only


class Numerics(Operations, Protocol):
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
