"""The weights of experts: prepared when they are first chosen, and no others; streamed ones have the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torture_table import MIXTURES

import lfm2np
from lfm2np.arithmetic import NAMES, numerics_named
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.truth import reference
from lfm2np.truth.layers import matrix_parts
from lfm2np.truth.weights import MixtureWeights

TORTURE = Path(__file__).parents[2] / "fixtures" / "torture"
NAME = "moe_minimal_config"  # 32 experts, four a token: a short prompt leaves many alone


class Preparing:
    """An arithmetic that notes what it prepares, and which experts are chosen."""

    def __init__(self) -> None:
        self.inner = numerics_named("exact")
        self.prepared: list[str] = []
        self.streamed: list[str] = []
        self.chosen: list[set[int]] = []  # by sparse layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def prepare_matrix(self, weight: Any, what: str) -> Any:
        self.prepared.append(what)
        return self.inner.prepare_matrix(weight, what)

    def stream_matrix(self, weight: Any, what: str) -> Any:
        self.streamed.append(what)
        return self.inner.stream_matrix(weight, what)

    def top_k(self, preferred: Any, count: int) -> Any:
        experts = self.inner.top_k(preferred, count)
        self.chosen.append(set(experts.ravel().tolist()))
        return experts


def named(layer: int, experts: Iterable[int]) -> set[str]:
    prefixes = [f"model.layers.{layer}.feed_forward.experts.{expert}." for expert in experts]
    return {text for prefix in prefixes for text in (f"{prefix}w1.weight + {prefix}w3.weight", f"{prefix}w2.weight")}


@pytest.mark.parametrize("streamed", [False, True])
def test_the_experts_that_a_prompt_chooses_are_prepared_once_and_no_others(streamed: bool) -> None:
    config, numerics = load_config(TORTURE / NAME), Preparing()
    tensors = open_checkpoint(TORTURE / NAME, config)
    weights = prepare_weights(tensors, config, numerics, streamed=streamed)
    done = numerics.streamed if streamed else numerics.prepared
    assert done == [" + ".join(names) for names in matrix_parts(config, experts=False)]
    done.clear()
    reference.hidden_states(weights, config, numerics, [5, 9])
    (first,) = numerics.chosen
    assert len(first) <= 8 and sorted(done) == sorted(named(2, first))
    reference.hidden_states(weights, config, numerics, [5, 9])
    assert len(done) == len(named(2, first)), "nothing is prepared twice"
    reference.hidden_states(weights, config, numerics, list(range(40)))
    assert sorted(done) == sorted(named(2, first | numerics.chosen[-1]))


@pytest.mark.slow
@pytest.mark.rounding
@pytest.mark.parametrize("arithmetic", NAMES)
@pytest.mark.parametrize("name", MIXTURES)
def test_streamed_weights_change_no_bit(name: str, arithmetic: str) -> None:
    ids = np.random.default_rng(1).integers(0, load_config(TORTURE / name).vocab_size, 30).tolist()
    resident, streamed = (lfm2np.load(TORTURE / name, arithmetic, weights=way) for way in ("resident", "streamed"))
    assert resident.logits(ids).tobytes() == streamed.logits(ids).tobytes()


@pytest.mark.slow
def test_which_experts_were_prepared_before_changes_no_bit() -> None:
    """A model that has answered other requests, and one that has not."""
    fresh, used = lfm2np.load(TORTURE / NAME), lfm2np.load(TORTURE / NAME)
    for layer in used.weights.layers:
        if isinstance(layer.feed_forward, MixtureWeights):
            for expert in reversed(range(32)):
                layer.feed_forward.expert(expert)
    assert fresh.digest() == used.digest()
