"""The weights of a checkpoint in the form that an arithmetic wants: truth/weights.py says what they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.stored import StoredTensor, require_finite, require_whole, widen
from lfm2np.truth.config import CONV, SLIDING, ModelConfig
from lfm2np.truth.integers import Weights, attention_scale
from lfm2np.truth.layers import expert_parts, matrix_parts
from lfm2np.truth.weights import (
    EMBEDDING,
    FINAL_NORM,
    AttentionWeights,
    FeedForwardWeights,
    LayerWeights,
    MixtureWeights,
    ModelWeights,
    ShortConvWeights,
    tensors_of,
)
from lfm2np.values import Progress

if TYPE_CHECKING:  # each arithmetic brings its own; none is loaded for this file's sake
    from lfm2np.arithmetic import Numerics
    from lfm2np.arithmetic.matrix import Matrix

Float32 = NDArray[np.float32]
ROWS = 256  # widened together
Prepare = Callable[[tuple[str, ...]], "Matrix"]


def widened(tensors: Mapping[str, StoredTensor], name: str) -> Weights:
    """One tensor as float32, or as float64 if it is quantised; CheckpointError for a value that is not finite."""
    require_finite(tensors[name])
    return widen(tensors[name].values, tensors[name].dtype)


def vector(tensors: Mapping[str, StoredTensor], name: str) -> Float32:
    """What is no matrix, which no checkpoint has quantised."""
    return np.asarray(widened(tensors, name), np.float32)


def joined(tensors: Mapping[str, StoredTensor], names: tuple[str, ...]) -> Weights:
    """The tensors of one Matrix below each other, all of them float64 if one is."""
    stored = stored_rows(tensors, names)
    weights: Weights = np.empty(stored.shape, stored.dtype)
    for first in range(0, len(weights), ROWS):
        weights[first : first + ROWS] = stored[first : first + ROWS]
    return weights


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The tensors of one Matrix below each other, as stored; a slice of their rows is widened when it is read."""

    tensors: tuple[StoredTensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(tensor.values) for tensor in self.tensors), self.tensors[0].shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float64 if any(tensor.is_quantised for tensor in self.tensors) else np.float32)

    def __getitem__(self, rows: slice) -> Weights:
        parts, first = [], 0
        for tensor in self.tensors:
            stored = tensor.values[max(0, rows.start - first) : max(0, rows.stop - first)]
            if len(stored):
                require_whole(tensor)
                parts.append(widen(stored, tensor.dtype))
            first += len(tensor.values)
        whole: Any = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.asarray(whole, self.dtype)


def stored_rows(tensors: Mapping[str, StoredTensor], names: tuple[str, ...]) -> StoredRows:
    """CheckpointError for a value that is not finite."""
    for name in names:
        require_finite(tensors[name])
    return StoredRows(tuple(tensors[name] for name in names))


def prepare_weights(
    tensors: Mapping[str, StoredTensor],
    config: ModelConfig,
    numerics: Numerics,
    progress: Progress | None = None,
    streamed: bool = False,
) -> ModelWeights:
    """Widens, checks and prepares all tensors; an expert is checked now, and prepared when it is first chosen.

    `progress(done, total)` counts matrices. `streamed` leaves them stored.
    Errors: CheckpointError for a value that is not finite, NumericsError where a product could not be exact.
    """
    prepare = partial(prepared, tensors, numerics, streamed)
    parts = list(matrix_parts(config, experts=False))
    values: dict[str, Any] = {}
    for names in parts:
        values[names[0]] = prepare(names)
        if progress:
            progress(len(values), len(parts))
    for name in tensors:
        if ".experts." in name:
            require_finite(tensors[name])
    # Norms, biases and taps: whatever is no matrix.
    values |= {name: vector(tensors, name) for name in tensors if len(tensors[name].shape) != 2}
    layers = tuple(layer_weights(index, config, tensors, values, prepare) for index in range(config.num_hidden_layers))
    require_finite(tensors[EMBEDDING])
    return ModelWeights(tensors[EMBEDDING], layers, values[FINAL_NORM], values[parts[-1][0]])


def prepared(tensors: Mapping[str, StoredTensor], numerics: Numerics, streamed: bool, names: tuple[str, ...]) -> Matrix:
    what = " + ".join(names)
    if streamed:
        return numerics.stream_matrix(stored_rows(tensors, names), what)
    return numerics.prepare_matrix(joined(tensors, names), what)


def layer_weights(
    index: int, config: ModelConfig, tensors: Mapping[str, StoredTensor], values: Mapping[str, Any], prepare: Prepare
) -> LayerWeights:
    """`values` holds matrices, by their first tensor, and vectors; `prepare` makes the matrices of experts."""
    prefix, kind = f"model.layers.{index}.", config.layer_types[index]
    number = config.layers_of(CONV).index(index) if kind == CONV else config.attention_layers.index(index)
    operator: ShortConvWeights | AttentionWeights
    if kind == CONV:
        of_kind = fields_of(ShortConvWeights, prefix, values)
        operator = ShortConvWeights(number=number, **of_kind | {"taps": of_kind["taps"][:, 0, :]})
    else:
        of_kind = fields_of(AttentionWeights, prefix, values)
        window = config.sliding_window if kind == SLIDING else None
        v_proj = widened(tensors, f"{prefix}self_attn.v_proj.weight")
        scale = attention_scale(of_kind["q_norm"], of_kind["k_norm"], v_proj, window)
        if config.attention_bias:
            names = tensors_of(AttentionWeights)["qkv_bias"]
            of_kind["qkv_bias"] = np.concatenate([values[prefix + name] for name in names])
        operator = AttentionWeights(number=number, scale=scale, kind=kind, **of_kind)
    feed_forward: FeedForwardWeights | MixtureWeights
    if config.is_sparse(index):
        of_kind = fields_of(MixtureWeights, f"{prefix}feed_forward.", values)
        feed_forward = MixtureWeights(expert=experts_of(prefix, prepare), **of_kind)
    else:
        feed_forward = FeedForwardWeights(**fields_of(FeedForwardWeights, f"{prefix}feed_forward.", values))
    return LayerWeights(operator=operator, feed_forward=feed_forward, **fields_of(LayerWeights, prefix, values))


def fields_of(kind: type, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a class of truth/weights.py is made of, None where the model has no such tensor."""
    return {name: values.get(prefix + parts[0]) for name, parts in tensors_of(kind).items()}


def experts_of(prefix: str, prepare: Prepare) -> Callable[[int], FeedForwardWeights]:
    @cache
    def expert(number: int) -> FeedForwardWeights:
        parts = (tuple(prefix + name for name in names) for names in expert_parts(number))
        return FeedForwardWeights(*map(prepare, parts))

    return expert
