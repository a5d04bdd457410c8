"""Networks that run over whole sequences: a checkpoint's, or the base with some tensors of another checkpoint.

T tokens of all sequences, D hidden, N layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.arithmetic.matrix import Matrix
from lfm2np.checkpoint.files import read_tensors
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.weights import layer_weights, prepared, vector
from lfm2np.engine import ragged
from lfm2np.engine.ragged import Run
from lfm2np.oracle.compare.pair import FINAL_NORM, Part, is_experts_output, with_head
from lfm2np.oracle.judging.routes import routed
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import matrix_parts, parameter_count
from lfm2np.truth.reference import Rotary, block, rotary_of
from lfm2np.truth.weights import EMBEDDING, HEAD, Embedding, FeedForwardWeights, LayerWeights, named_weights

Array = NDArray[Any]
MOST_LAYERS = 512  # with one tensor changed, that are cached
SMALL = 2**23  # weights of a model of which they are
Tensors = dict[str, StoredTensor]


@dataclass(frozen=True, eq=False)
class Network:
    """Each layer with the config of its weights."""

    embedding: Embedding
    layers: tuple[tuple[LayerWeights, ModelConfig], ...]
    final_norm: NDArray[np.float32]
    head: Matrix


@dataclass(frozen=True, eq=False)
class Pass:
    """Results of some sequences in one network."""

    stream: list[Array]  # the residual stream [T, D]: of the embedding, after each layer; of a later start only its own
    states: Array  # [T, D] after the last norm
    runs: list[Run]
    routes: NDArray[np.int64] | None  # [T, sparse layers, K], ascending: each token's experts, if there are any


def network_of(model: LoadedModel) -> Network:
    weights = model.weights
    layers = tuple((layer, model.config) for layer in weights.layers)
    return Network(weights.embedding, layers, weights.final_norm, weights.head)


def network_with(base: LoadedModel, other: LoadedModel, part: Part) -> Network:
    network, weights = network_of(base), other.weights
    if part.layer is not None:
        layers = list(network.layers)
        build = cached_layer if parameter_count(base.config) <= SMALL else build_layer  # for the next sequences
        layers[part.layer] = build(base, other, part)
        return replace(network, layers=tuple(layers))
    return replace(
        network,
        embedding=weights.embedding if EMBEDDING in part.tensors else network.embedding,
        final_norm=weights.final_norm if FINAL_NORM in part.tensors else network.final_norm,
        head=weights.head if HEAD in part.tensors else network.head,
    )


@lru_cache(maxsize=32)
def tensors_of(model: LoadedModel) -> Tensors:
    return with_head(read_tensors(model.path, model.config), model.config)


def build_layer(base: LoadedModel, other: LoadedModel, part: Part) -> tuple[LayerWeights, ModelConfig]:
    """The other's layer, if all of it is changed."""
    index = part.layer
    assert index is not None
    prefix = f"model.layers.{index}."
    base_tensors = tensors_of(base)
    names = [name for name in base_tensors if name.startswith(prefix)]
    if set(part.tensors) == set(names):
        return other.weights.layers[index], other.config
    config = base.config
    if config.mixture and other.config.mixture and any(map(is_experts_output, part.tensors)):
        factor = other.config.mixture.routed_scaling_factor
        config = replace(config, mixture=replace(config.mixture, routed_scaling_factor=factor))
    tensors = {**base_tensors, **{name: tensors_of(other)[name] for name in part.tensors}}
    prepare = partial(prepared, tensors, base.numerics, base.where_weights == "streamed")
    before = base.weights.layers[index]
    values: dict[str, Any] = {prefix + parts[0]: value for parts, value in named_weights(before)}
    for parts in matrix_parts(config, experts=False):
        if parts[0].startswith(prefix) and set(parts) & set(part.tensors):
            values[parts[0]] = prepare(parts)
    values |= {name: vector(tensors, name) for name in names if len(tensors[name].shape) != 2}
    layer = layer_weights(index, config, tensors, values, prepare)
    if not any(".experts." in name for name in part.tensors) and not isinstance(layer.feed_forward, FeedForwardWeights):
        assert not isinstance(before.feed_forward, FeedForwardWeights)
        layer = replace(layer, feed_forward=replace(layer.feed_forward, expert=before.feed_forward.expert))
    return layer, config


cached_layer = lru_cache(maxsize=MOST_LAYERS)(build_layer)


def laid_out(
    network: Network, sequences: Sequence[Sequence[int]]
) -> tuple[list[ragged.Run], NDArray[np.int64], Rotary]:
    """Their runs, the tokens [T] of all of them, and the angles of their positions."""
    runs, ids, positions = ragged.runs_of(sequences)
    layers, config = [layer for layer, _ in network.layers], network.layers[0][1]
    return runs, ids, rotary_of(layers, config, positions)


def run_whole(network: Network, numerics: Numerics, sequences: Sequence[Sequence[int]]) -> Pass:
    """All of the network; an overflow in attention is the error of its run only."""
    runs, ids, rotary = laid_out(network, sequences)
    wrapped, kept = routed(numerics)
    with np.errstate(all="ignore"):
        stream = [numerics.embed(network.embedding.rows(ids))]
        mixing = ragged.several(wrapped, runs)
        for layer, config in network.layers:
            stream.append(block(layer, config, wrapped, stream[-1], rotary, mixing))
        states = numerics.rms_norm(stream[-1], network.final_norm, network.layers[0][1].norm_eps)
    routes = np.sort(kept.chosen(), axis=-1) if network.layers[0][1].sparse_layers else None
    return Pass(stream, states, runs, routes)


def run_from(network: Network, numerics: Numerics, sequences: Sequence[Sequence[int]], part: Part, base: Pass) -> Array:
    """Final states [T, D] of a network that differs from the base in one part; earlier layers are the base's."""
    runs, ids, rotary = laid_out(network, sequences)
    for run, before in zip(runs, base.runs, strict=True):
        run.error = before.error
    with np.errstate(all="ignore"):
        if EMBEDDING in part.tensors:
            x, first = numerics.embed(network.embedding.rows(ids)), 0
        else:
            first = len(network.layers) if part.layer is None else part.layer
            x = base.stream[first]
        mixing = ragged.several(numerics, runs)
        for layer, config in network.layers[first:]:
            x = block(layer, config, numerics, x, rotary, mixing)
        states = numerics.rms_norm(x, network.final_norm, network.layers[0][1].norm_eps)
    for run, before in zip(runs, base.runs, strict=True):
        if run.error and not before.error:
            states[run.rows] = np.nan  # shows where the logits are looked at
    return np.asarray(states)
