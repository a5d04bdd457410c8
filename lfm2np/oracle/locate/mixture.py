"""A mixture of experts as a list of operations, for `locate`: router, choice, weights, experts, their sum.

`gate` is the router's module in transformers; the other names are ours: `scores` (its sigmoid), `experts_chosen` (ids,
best first), `expert_weights`, `expert_outputs` (of each chosen expert, before its weight), `mixed` (their sum). Weights
and outputs are in the order of the dumped ids, whatever that is. Source: transformers 5.23, models/lfm2_moe,
Lfm2MoeTopKRouter, Lfm2MoeExperts and Lfm2MoeSparseMoeBlock.

A choice is `Measured` as places [T, N]: 0 for an expert that a token does not go to, else from 1 on, best first; its
spread is 1 where a near tie leaves that open, else 0 (see choices.py). What depends on an open choice has the
difference to the farthest possible expert as its spread, so that bounds hold for several at once. A dumped choice is
not open.

T tokens, N experts, K experts of a token, D hidden.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.weights import vector
from lfm2np.model.config import ModelConfig
from lfm2np.oracle.locate import choices, spread
from lfm2np.oracle.locate.operation import Operation, Oracle, at_precision, is_wanted, product, projection
from lfm2np.oracle.locate.spread import Measured, together

Array = NDArray[Any]
CHOSEN, WEIGHTS, OUTPUTS, MIXED = "experts_chosen", "expert_weights", "expert_outputs", "mixed"
PARTS = ("gate", "scores", CHOSEN, WEIGHTS, OUTPUTS, MIXED)


def mixture_operations(
    config: ModelConfig, index: int, norm: str, dumped: Container[str] | None
) -> Iterator[Operation]:
    """Of a sparse layer's feed-forward, which reads the tensor `norm`."""
    mixture = config.mixture
    assert mixture is not None
    mlp, experts, count = f"model.layers.{index}.feed_forward", mixture.num_experts, mixture.num_experts_per_tok
    gate, scores, chosen, weights, outputs, mixed = (f"{mlp}.{part}" for part in PARTS)
    squash = at_precision(spread.sigmoid)
    yield product(gate, "the router's product", index, (norm,), experts, partial(projection, gate), noun="expert")
    yield Operation(scores, "sigmoid of the router's product", index, (gate,), experts, squash, noun="expert")
    by_place = any(is_wanted(name, dumped) for name in (weights, outputs))
    choose, prefers = partial(choice, mlp, by_place), partial(preferred, mlp)
    words = "choice of experts by scores and bias" if mixture.use_expert_bias else "choice of experts by scores"
    yield Operation(chosen, words, index, (scores,), count, choose, noun="place", prefers=prefers)
    words = f"weights of the chosen experts{', of sum 1' if mixture.norm_topk_prob else ''}"
    yield Operation(weights, words, index, (scores, chosen), count, weights_of, noun="place", chosen=chosen)
    words, compute = "outputs of the chosen experts", partial(outputs_of, mlp)
    width, parts = count * config.hidden_size, tuple(f"place {place}" for place in range(count))
    first_expert = f"{mlp}.experts.0.w1"
    yield product(
        outputs, words, index, (norm, chosen), width, compute, parts=parts, chosen=chosen, weights=first_expert
    )
    words = "outputs of the chosen experts, weighted and added up"
    yield Operation(mixed, words, index, (outputs, weights), config.hidden_size, mixed_of, chosen=chosen)


def preferred(mlp: str, oracle: Oracle, scores: Measured) -> Measured:
    name = f"{mlp}.expert_bias"
    return spread.preferred(scores, vector(oracle.tensors, name) if oracle.mixture.use_expert_bias else None)


def choice(mlp: str, by_place: bool, oracle: Oracle, scores: Measured) -> Measured:
    """Scores [T, N] -> places [T, N]; `by_place`: the order of the chosen may be open, too."""
    return choices.places(preferred(mlp, oracle, scores), oracle.mixture.num_experts_per_tok, by_place)


def weights_of(oracle: Oracle, scores: Measured, chosen: Measured) -> Measured:
    """[T, K] from scores [T, N] and places [T, N]."""
    mixture = oracle.mixture
    ids = choices.ids(chosen, mixture.num_experts_per_tok)
    chosen_scores = Measured(*(np.take_along_axis(array, ids, axis=-1) for array in (scores.values, scores.spread)))
    apart = np.abs(chosen_scores.values[..., None] - scores.values[:, None]) * chosen.spread[:, None]  # [T, K, N]
    off = apart.max(axis=-1) * np.take_along_axis(chosen.spread, ids, axis=-1)
    chosen_scores = Measured(chosen_scores.values, together(chosen_scores.spread, off))
    return spread.routing_weights(
        chosen_scores, mixture.norm_topk_prob, mixture.routed_scaling_factor, oracle.precision
    )


def outputs_of(mlp: str, oracle: Oracle, x: Measured, chosen: Measured) -> Measured:
    """[T, K*D] from x [T, D] and places [T, N]."""
    ids = choices.ids(chosen, oracle.mixture.num_experts_per_tok)
    doubted = np.take_along_axis(chosen.spread, ids, axis=-1) > 0.0  # [T, K]
    outputs = Measured(*(np.zeros((*ids.shape, x.values.shape[1])) for _ in range(2)))  # [T, K, D]
    wanted = (chosen.values > 0.0) | (chosen.spread > 0.0)
    by_expert = {}
    for expert in np.flatnonzero(wanted.any(axis=0)):
        rows = np.flatnonzero(wanted[:, expert])
        by_expert[expert] = rows, gated(f"{mlp}.experts.{expert}", oracle, x[rows])
        expert_rows, places = np.nonzero(ids[rows] == expert)
        outputs.values[rows[expert_rows], places] = by_expert[expert][1].values[expert_rows]
        outputs.spread[rows[expert_rows], places] = by_expert[expert][1].spread[expert_rows]
    off = np.zeros_like(outputs.values)
    for expert, (rows, others) in by_expert.items():  # that a place in doubt may have
        rival = doubted[rows] & (chosen.spread[rows, expert] > 0.0)[:, None] & (ids[rows] != expert)
        expert_rows, places = np.nonzero(rival)
        far = np.abs(others.values[expert_rows] - outputs.values[rows[expert_rows], places])
        off[rows[expert_rows], places] = np.maximum(off[rows[expert_rows], places], far)
    return Measured(outputs.values, together(outputs.spread, off)).reshape(len(ids), -1)


def gated(expert: str, oracle: Oracle, x: Measured) -> Measured:
    """One expert, [t, D] -> [t, D]."""
    gate, up = (projection(f"{expert}.{part}", oracle, x) for part in ("w1", "w3"))
    return projection(f"{expert}.w2", oracle, spread.gated(gate, up, oracle.precision))


def mixed_of(oracle: Oracle, outputs: Measured, weights: Measured) -> Measured:
    tokens, count = weights.values.shape
    return spread.combine_experts(outputs.reshape(tokens, count, -1), weights, oracle.precision)
