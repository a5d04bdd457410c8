"""The weights of one model in the form that an arithmetic wants, named as the network uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.config import ModelConfig
from lfm2np.checkpoint.stored import StoredTensor, require_finite, require_whole, widen
from lfm2np.numerics.integers import AttentionScale, Weights, attention_scale
from lfm2np.progress import Progress

if TYPE_CHECKING:  # each arithmetic brings its own; none is loaded for this file's sake
    from lfm2np.numerics import Numerics
    from lfm2np.numerics.matrix import Matrix

Float32 = NDArray[np.float32]
ROWS = 256  # widened together
Matrices = Mapping[str, "Matrix"]  # by the name of the first tensor in each


@dataclass(frozen=True, eq=False)
class ShortConvWeights:
    """in_proj gives gate_in, gate_out and value side by side (the paper's B, C, x)."""

    in_proj: Matrix  # [3D, D]
    in_bias: Float32 | None  # [3D]
    taps: Float32  # [D, L], tap L-1 meets the newest token
    taps_bias: Float32 | None  # [D]
    out_proj: Matrix  # [D, D]
    out_bias: Float32 | None  # [D]


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    qkv_proj: Matrix  # [(H + 2G) * E, D]: queries, keys, values below each other
    q_norm: Float32  # [E]
    k_norm: Float32  # [E]
    scale: AttentionScale
    out_proj: Matrix  # [D, H * E]


@dataclass(frozen=True, eq=False)
class FeedForwardWeights:
    """A dense layer's, or one expert's."""

    gate_up_proj: Matrix  # [2F, D]: w1, then w3
    down_proj: Matrix  # [D, F]: w2


@dataclass(frozen=True, eq=False)
class MixtureWeights:
    """`expert(e)` prepares an expert's weights when they are first asked for, and keeps them."""

    router: Matrix  # [N, D], called gate in the checkpoint
    bias: Float32 | None  # [N], expert_bias
    expert: Callable[[int], FeedForwardWeights]


@dataclass(frozen=True, eq=False)
class LayerWeights:
    operator_norm: Float32  # [D]
    operator: ShortConvWeights | AttentionWeights
    ffn_norm: Float32  # [D]
    feed_forward: FeedForwardWeights | MixtureWeights


@dataclass(frozen=True, eq=False)
class ModelWeights:
    embedding: StoredTensor  # [V, D] as stored; rows are widened when they are looked up
    layers: tuple[LayerWeights, ...]
    final_norm: Float32  # [D], called embedding_norm in the checkpoint
    head: Matrix  # [V, D]


def matrix_parts(config: ModelConfig, experts: bool = True) -> Iterator[tuple[str, ...]]:
    """The tensors that make up each Matrix, in the network's order: those that share an input are one product.

    Without `experts` those of experts are left out.
    """
    for index, layer_type in enumerate(config.layer_types):
        prefix = f"model.layers.{index}."
        if layer_type == "conv":
            yield (prefix + "conv.in_proj.weight",)
            yield (prefix + "conv.out_proj.weight",)
        else:
            yield tuple(f"{prefix}self_attn.{part}_proj.weight" for part in "qkv")
            yield (prefix + "self_attn.out_proj.weight",)
        prefix += "feed_forward."
        if not config.is_sparse(index):
            yield from feed_forward_parts(prefix)
            continue
        yield (prefix + "gate.weight",)
        for expert in range(num_experts(config) if experts else 0):
            yield from feed_forward_parts(f"{prefix}experts.{expert}.")
    yield ("model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight",)


def feed_forward_parts(prefix: str) -> Iterator[tuple[str, ...]]:
    yield (prefix + "w1.weight", prefix + "w3.weight")
    yield (prefix + "w2.weight",)


def num_experts(config: ModelConfig) -> int:
    """Of each sparse layer; 0 where all are dense."""
    return 0 if config.mixture is None else config.mixture.num_experts


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
        return sum(len(one.values) for one in self.tensors), self.tensors[0].shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float64 if any(one.is_quantised for one in self.tensors) else np.float32)

    def __getitem__(self, rows: slice) -> Weights:
        parts, first = [], 0
        for one in self.tensors:
            own = one.values[max(0, rows.start - first) : max(0, rows.stop - first)]
            if len(own):
                require_whole(one)
                parts.append(widen(own, one.dtype))
            first += len(one.values)
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
    keep: Callable[[Callable[[], Matrices]], Matrices] | None = None,
) -> ModelWeights:
    """Widens, checks and prepares all tensors; an expert is checked now, and prepared when it is first chosen.

    `progress(done, total)` counts matrices. `streamed` leaves them stored. `keep` gets what prepares the matrices
    (those of experts are none), and gives them, prepared now or before.
    Errors: CheckpointError for a value that is not finite, NumericsError where a product could not be exact.
    """
    prepare = partial(prepared, tensors, numerics, streamed)
    parts = list(matrix_parts(config, experts=False))

    def make() -> Matrices:
        made: dict[str, Matrix] = {}
        for names in parts:
            made[names[0]] = prepare(names)
            if progress:
                progress(len(made), len(parts))
        return made

    matrices = keep(make) if keep else make()
    for name in tensors:
        if ".experts." in name:
            require_finite(tensors[name])
    # Norms, biases and taps: whatever is no matrix.
    vectors = {name: vector(tensors, name) for name in tensors if len(tensors[name].shape) != 2}
    layers = tuple(
        layer_weights(index, config, tensors, matrices, vectors, prepare) for index in range(config.num_hidden_layers)
    )
    embedding = tensors["model.embed_tokens.weight"]
    require_finite(embedding)
    return ModelWeights(embedding, layers, vectors["model.embedding_norm.weight"], matrices[parts[-1][0]])


def prepared(tensors: Mapping[str, StoredTensor], numerics: Numerics, streamed: bool, names: tuple[str, ...]) -> Matrix:
    what = " + ".join(names)
    if streamed:
        return numerics.stream_matrix(stored_rows(tensors, names), what)
    return numerics.prepare_matrix(joined(tensors, names), what)


def layer_weights(
    index: int,
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    matrices: Mapping[str, Matrix],
    vectors: Mapping[str, Float32],
    prepare: Callable[[tuple[str, ...]], Matrix],
) -> LayerWeights:
    prefix = f"model.layers.{index}."
    conv, attention = prefix + "conv.", prefix + "self_attn."
    operator: ShortConvWeights | AttentionWeights
    if config.layer_types[index] == "conv":
        operator = ShortConvWeights(
            in_proj=matrices[conv + "in_proj.weight"],
            in_bias=vectors.get(conv + "in_proj.bias"),
            taps=vectors[conv + "conv.weight"][:, 0, :],
            taps_bias=vectors.get(conv + "conv.bias"),
            out_proj=matrices[conv + "out_proj.weight"],
            out_bias=vectors.get(conv + "out_proj.bias"),
        )
    else:
        q_norm, k_norm = vectors[attention + "q_layernorm.weight"], vectors[attention + "k_layernorm.weight"]
        operator = AttentionWeights(
            qkv_proj=matrices[attention + "q_proj.weight"],
            q_norm=q_norm,
            k_norm=k_norm,
            scale=attention_scale(q_norm, k_norm, widened(tensors, attention + "v_proj.weight")),
            out_proj=matrices[attention + "out_proj.weight"],
        )
    return LayerWeights(
        operator_norm=vectors[prefix + "operator_norm.weight"],
        operator=operator,
        ffn_norm=vectors[prefix + "ffn_norm.weight"],
        feed_forward=feed_forward_weights(
            prefix + "feed_forward.", config.is_sparse(index), matrices, vectors, prepare
        ),
    )


def feed_forward_weights(
    prefix: str,
    is_sparse: bool,
    matrices: Mapping[str, Matrix],
    vectors: Mapping[str, Float32],
    prepare: Callable[[tuple[str, ...]], Matrix],
) -> FeedForwardWeights | MixtureWeights:
    if not is_sparse:
        return FeedForwardWeights(*(matrices[names[0]] for names in feed_forward_parts(prefix)))

    @cache
    def expert(number: int) -> FeedForwardWeights:
        return FeedForwardWeights(*map(prepare, feed_forward_parts(f"{prefix}experts.{number}.")))

    return MixtureWeights(matrices[prefix + "gate.weight"], vectors.get(prefix + "expert_bias"), expert)
