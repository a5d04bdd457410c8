"""The router and the mixture of `bfloat16` against transformers' in bfloat16 on a CPU, operation by operation.

`from_pretrained(dtype=bfloat16)` leaves `expert_bias` in float32, so what experts are chosen by is float32; all else is
rounded to bfloat16 after each operation. Outputs are added as grouped_mm and batched_mm add them, in float32 and
rounded once; "eager" rounds after each expert, in the order of their ids.
Of scores that tie, torch.topk takes any; we take the lowest ids. In bfloat16 scores tie often.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_bfloat16_operations import FINITE, normal, to_numpy, to_torch, units_apart
from transformers.models.lfm2_moe.configuration_lfm2_moe import Lfm2MoeConfig
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeSparseMoeBlock, Lfm2MoeTopKRouter

from lfm2np.arithmetic.ieee import BFLOAT16
from lfm2np.truth import reference
from lfm2np.truth.weights import FeedForwardWeights, MixtureWeights

pytestmark = pytest.mark.peers

Array = NDArray[Any]
TOKENS, WIDTH, EXPERTS, EACH, INNER = 400, 64, 32, 4, 48


def config(way: str = "grouped_mm", **changes: Any) -> Lfm2MoeConfig:
    settings = Lfm2MoeConfig(
        hidden_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=EACH,
        moe_intermediate_size=INNER,
        num_hidden_layers=1,
        layer_types=["conv"],
        **changes,
    )
    settings._experts_implementation = way
    return settings


def bias_of(is_used: bool) -> Array | None:
    return 0.2 * np.random.default_rng(9).standard_normal(EXPERTS).astype(np.float32) if is_used else None


def peer_router(settings: Lfm2MoeConfig, gate: Array) -> Lfm2MoeTopKRouter:
    router = Lfm2MoeTopKRouter(settings).bfloat16()
    router.weight.data = to_torch(gate)
    return router


def our_config(settings: Lfm2MoeConfig) -> Any:
    return SimpleNamespace(mixture=settings)  # all that `route` reads of it, under the same names


def test_sigmoid_of_every_finite_bfloat16_is_torchs_to_the_bit() -> None:
    with np.errstate(over="ignore"):
        ours = BFLOAT16.sigmoid(FINITE)
    assert FINITE[ours != to_numpy(torch.sigmoid(to_torch(FINITE)))].tolist() == []


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("normalised", [False, True])
def test_weights_of_chosen_scores_are_torchs_but_for_the_order_of_their_sum(normalised: bool, factor: float) -> None:
    """Scores down to 1e-9, where the 1e-6 beside their sum is most of it: PyTorch rounds it to bfloat16, too."""
    scores = BFLOAT16.sigmoid(np.concatenate([normal(1, 20_000, EACH), 4 * normal(2, 20_000, EACH) - 12]))
    peer = to_torch(scores)
    if normalised:
        peer = peer / (peer.sum(dim=-1, keepdim=True) + 1e-6)
    peer = peer * factor
    ours = BFLOAT16.routing_weights(scores, normalised, factor)
    assert units_apart(ours, to_numpy(peer)).max() <= 2.0
    assert (ours != to_numpy(peer)).mean() < 1e-3


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("is_biased", [False, True])
def test_the_router_is_transformers_wherever_no_scores_tie(is_biased: bool, normalised: bool, factor: float) -> None:
    settings = config(use_expert_bias=is_biased, norm_topk_prob=normalised, routed_scaling_factor=factor)
    x, gate, bias = normal(1, TOKENS, WIDTH), normal(2, EXPERTS, WIDTH), bias_of(is_biased)
    gate = gate / 8  # a power of two: still bfloat16
    given = None if bias is None else torch.from_numpy(bias)
    products, their_weights, their_experts = peer_router(settings, gate)(to_torch(x), given)
    weights: Any = SimpleNamespace(router=BFLOAT16.prepare_matrix(gate, "gate"), bias=bias)
    our_experts, our_weights = reference.route(weights, our_config(settings), BFLOAT16, x)
    scores = to_numpy(products.sigmoid())
    preferred = np.sort(scores if bias is None else scores + bias)[:, ::-1]
    apart = (np.diff(preferred[:, : EACH + 1]) < 0).all(-1)  # the first five differ: who is chosen, and in which order
    assert apart.mean() > (0.99 if is_biased else 0.4)
    same = (our_experts == their_experts.numpy()).all(-1)
    assert same[apart].mean() > 0.99, "a product whose sums round otherwise may pass another one"
    decided = same & apart
    assert units_apart(our_weights, to_numpy(their_weights))[decided].max() <= 2.0


@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm", "eager"])
def test_the_mixture_is_transformers_but_for_the_order_of_its_sums(way: str) -> None:
    """Measured: grouped_mm and batched_mm differ in 3 numbers of ten thousand, eager in 3 of ten."""
    x, gate, bias = normal(1, TOKENS, WIDTH), normal(2, EXPERTS, WIDTH) / 8, bias_of(True)
    assert bias is not None
    gate_up, down = normal(3, EXPERTS, 2 * INNER, WIDTH) / 8, normal(4, EXPERTS, WIDTH, INNER) / 8
    block = Lfm2MoeSparseMoeBlock(config(way)).bfloat16()
    block.gate.weight.data, block.expert_bias.data = to_torch(gate), torch.from_numpy(bias)
    block.experts.gate_up_proj.data, block.experts.down_proj.data = to_torch(gate_up), to_torch(down)
    with torch.no_grad():
        peer = to_numpy(block(to_torch(x)[None])[0])
        _, _, their_experts = block.gate(to_torch(x), block.expert_bias)

    def expert(number: int) -> FeedForwardWeights:
        return FeedForwardWeights(*(BFLOAT16.prepare_matrix(matrix[number], "w") for matrix in (gate_up, down)))

    weights = MixtureWeights(router=BFLOAT16.prepare_matrix(gate, "gate"), bias=bias, expert=expert)
    settings = our_config(config(way))
    ours = reference.mixture_of_experts(weights, settings, BFLOAT16, x)
    our_experts, _ = reference.route(weights, settings, BFLOAT16, x)
    same = (np.sort(our_experts) == np.sort(their_experts.numpy())).all(-1)
    assert same.mean() > 0.99
    size = np.abs(ours).max(-1, keepdims=True)  # a sum of four may be small: units at the size of its row
    assert (np.abs(ours - peer) / size)[same].max() <= (2.0**-6 if way == "eager" else 2.0**-7)
    differing = (ours != peer)[same].mean()
    assert differing < 0.02 if way != "eager" else 0.05 < differing < 0.6
