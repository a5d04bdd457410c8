"""The experts each token went to: the engine's choice is computed with, and judged by itself.

One rounding can send a token to another expert, which changes everything after it. So routes are teacher-forced like
tokens: the network runs with the routes of an engine, and at each position and layer its choice is compared with the
scores that the exact network has there. T positions, L sparse layers, N experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.records import Routes
from lfm2np.truth.config import MixtureConfig, ModelConfig

Array = NDArray[Any]
OWN = -1  # in the place of an expert: the arithmetic's own choice
LEAST = 2.0**-40  # of a score's noise


class RoutedNumerics:
    """An arithmetic for one pass: its T tokens go to the given experts, and it keeps the scores and choices.

    given [T, L, K] ids, OWN where the arithmetic chooses itself; None: everywhere
    """

    def __init__(self, numerics: Numerics, given: NDArray[np.int64] | None = None) -> None:
        self._numerics, self._given = numerics, given
        self._preferred: list[Array] = []
        self._chosen: list[NDArray[np.int64]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._numerics, name)

    def top_k(self, preferred: Array, count: int) -> NDArray[np.int64]:
        chosen = self._numerics.top_k(preferred, count)
        if self._given is not None:
            given = self._given[:, len(self._chosen)]
            chosen = np.where(given == OWN, chosen, given)
        self._preferred.append(np.array(preferred))
        self._chosen.append(chosen)
        return chosen

    def chosen(self) -> NDArray[np.int64]:
        """[T, L, K]."""
        return np.stack(self._chosen, axis=1)

    def preferred(self) -> Array:
        """[T, L, N]."""
        return np.stack(self._preferred, axis=1)


def routed(numerics: Numerics, given: NDArray[np.int64] | None = None) -> tuple[Numerics, RoutedNumerics]:
    """The same object twice: typed as an arithmetic, and as what it keeps."""
    wrapped = RoutedNumerics(numerics, given)
    return cast(Numerics, wrapped), wrapped


def fitted(routes: Routes, rows: int, config: ModelConfig) -> Routes:
    """Reported routes of `rows` positions and the sparse layers; RequestError if they can't be those.

    Engines may report more: the last token's, those of dense layers (which are dropped), all layers in one. OWN stands
    for all experts of a position and layer that are not reported.
    """
    mixture, sparse = config.mixture, config.sparse_layers
    if mixture is None or not sparse:
        raise RequestError("routes: the model has no experts")
    if len(routes) < rows:
        raise RequestError(f"routes: {len(routes)} positions, expected {rows}")
    count, fitting = mixture.num_experts_per_tok, []
    for row, layers in enumerate(routes[:rows]):
        if len(layers) == 1 and len(layers[0]) in (len(sparse) * count, config.num_hidden_layers * count):
            layers = tuple(layers[0][start : start + count] for start in range(0, len(layers[0]), count))
        if len(layers) == config.num_hidden_layers:
            layers = tuple(layers[layer] for layer in sparse)
        if len(layers) != len(sparse):
            raise RequestError(f"routes[{row}]: {len(layers)} layers, expected the {len(sparse)} sparse ones, or all")
        for layer, experts in zip(sparse, layers, strict=True):
            require_experts(experts, mixture, f"routes[{row}], layer {layer}")
        fitting.append(layers)
    return tuple(fitting)


def require_experts(experts: Sequence[int], mixture: MixtureConfig, where: str) -> None:
    count, most = mixture.num_experts_per_tok, mixture.num_experts - 1
    are_told = len(set(experts)) == count and 0 <= min(experts) <= max(experts) <= most
    if len(experts) != count or not (are_told or set(experts) == {OWN}):
        raise RequestError(f"{where}: {list(experts)}, expected {count} different experts from 0 to {most}")


def as_key(routes: Routes | NDArray[np.int64] | None, rows: int) -> bytes:
    """Routes of the first rows as bytes; empty if none were reported."""
    return b"" if routes is None else np.array(routes[:rows], np.int64).astype("<i4").tobytes()


def from_key(key: bytes, config: ModelConfig) -> NDArray[np.int64] | None:
    """[T, L, K]."""
    if not key:
        return None
    assert config.mixture is not None
    shape = (-1, len(config.sparse_layers), config.mixture.num_experts_per_tok)
    return np.frombuffer(key, "<i4").astype(np.int64).reshape(shape)


@dataclass(frozen=True)
class RouteDifference:
    """The route of one position that the oracle would least have taken."""

    layer: int
    expert: int  # that the engine took,
    instead_of: int  # and the oracle would have
    ratio: float  # difference of their scores, in units of its noise


def difference(
    preferred: Array, routes: NDArray[np.int64], squares: Array, layers: Sequence[int]
) -> RouteDifference | None:
    """One position's routes [L, K] against the scores [L, N], whose errors have mean squares [L, N]; None: no
    difference.
    """
    worst = None
    for index, layer in enumerate(layers):
        outside = np.setdiff1d(np.arange(preferred.shape[1]), routes[index])
        if not len(outside):
            continue
        taken = max(routes[index].tolist(), key=lambda expert: (-preferred[index, expert], expert))
        left = int(outside[np.argmax(preferred[index, outside])])
        gap = float(preferred[index, left]) - float(preferred[index, taken])
        if gap > 0.0 or (gap == 0.0 and left < taken):
            ratio = gap / float(gap_scale(squares[index], np.array([taken, left])))
            if worst is None or ratio > worst.ratio:
                worst = RouteDifference(layer, taken, left, ratio)
    return worst


def gap_scale(squares: Array, experts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard deviation of the difference of two experts' scores [..., 2], whose errors have mean squares [..., N].

    Half of it comes from these two, half from all experts: the first knows what is special, the second is steady.
    """
    pair_squares = np.take_along_axis(squares, experts, axis=-1).mean(axis=-1, dtype=np.float64)
    return np.asarray(np.maximum(LEAST, np.sqrt(pair_squares + squares.mean(axis=-1, dtype=np.float64))))


def margins(preferred: Array, squares: Array, count: int) -> NDArray[np.float64]:
    """[T, L] by how much the last chosen expert is ahead of the first unchosen, in units of that gap's noise.

    Infinite where all experts are chosen. preferred and squares are [T, L, N].
    """
    if count == preferred.shape[-1]:
        return np.full(preferred.shape[:2], np.inf)
    order = np.argsort(-preferred, axis=-1, kind="stable")[..., count - 1 : count + 1]
    scores = np.take_along_axis(preferred, order, axis=-1).astype(np.float64)
    return np.asarray((scores[..., 0] - scores[..., 1]) / gap_scale(squares, order))


def swapped(preferred: Array, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """One layer's routes [K] with the last chosen expert changed for the first unchosen, by the scores [N]."""
    outside = np.setdiff1d(np.arange(len(preferred)), chosen)
    other = chosen.copy()
    other[np.argmin(preferred[chosen])] = outside[np.argmax(preferred[outside])]
    return other
