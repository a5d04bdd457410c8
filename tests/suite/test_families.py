"""Mixtures of experts and LFM3 models that the suite draws: who meets them, and that everything in them counts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from internal_properties import second_implementation
from lfm2np.suite.strategies.families import (
    EXPERTS,
    FAMILIES,
    LFM3,
    has_model,
    of_family,
)

from lfm2np.errors import NumericsError
from lfm2np.suite import adapters, runner
from lfm2np.suite.catalogue import ALL, by_id
from lfm2np.suite.properties.property import Property
from lfm2np.suite.runner import Terms, run_property
from lfm2np.suite.strategies.scenarios import Scenario, models
from lfm2np.suite.strategies.tiny_models import Checkpoint, TinyModel, checkpoint, config_of, loaded
from lfm2np.truth.reference import route

IDS = [(7 * i * i + 3 * i + 1) % 24 for i in range(20)]
PLAIN = TinyModel(layers="cA", experts=4)


def models_in(example: Any) -> list[TinyModel]:
    if isinstance(example, TinyModel):
        return [example]
    if isinstance(example, Scenario):
        return models_in(example.model)
    return [model for each in example for model in models_in(each)] if isinstance(example, tuple) else []


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few examples as a profile may have: families then get the fewest that they ever do."""
    monkeypatch.setitem(runner.EXAMPLES, "quick", 2)


def drawn(prop: Property, terms: Terms | None = None) -> list[list[TinyModel]]:
    """The models of each example under `quick`, which are not tried."""
    drawn_models: list[list[TinyModel]] = []
    noting = replace(prop, check=lambda factory, example: drawn_models.append(models_in(example)))
    unasked = replace(noting, weight=min(prop.weight, 1.0))
    assert run_property(unasked, adapters.own, "quick", terms=terms).status == "passed"
    return drawn_models


def family_of(models: list[TinyModel]) -> int:
    return max(2 if model.lfm3 else 1 if model.experts else 0 for model in models)


@pytest.mark.parametrize("prop", ALL, ids=lambda case: case.id)
def test_whoever_draws_models_meets_those_of_each_family_after_dense_ones(prop: Property, few: None):
    found = drawn(prop)
    if not any(found):
        return
    families = [family_of(each) for each in found if each]
    for family in (1, 2):
        assert families.count(family) >= (5 if prop.at_length else 2)
    assert families == sorted(families)  # what dense models are drawn does not hang on what follows them
    assert all(config_of(model).is_sparse(len(model.layers) - 1) for each in found for model in each if model.experts)


def test_without_families_the_same_dense_ones_are_drawn():
    prop = by_id("equals-reference")
    draws = drawn(prop)
    dense = [each for each in draws if family_of(each) == 0]
    assert drawn(prop, Terms(lacks=frozenset(family.word for family in FAMILIES))) == dense
    assert len(dense) < len(draws)


def test_a_given_checkpoint_stays_what_it_is(few: None):
    prop = by_id("equals-reference")
    given_one = Terms(model=Checkpoint(str(checkpoint(TinyModel()))))
    assert len(drawn(prop, given_one)) == sum(family_of(each) == 0 for each in drawn(prop))


@given(models(), EXPERTS.draw(), LFM3.draw())
def test_every_model_of_a_family_is_a_checkpoint(model: TinyModel, experts: Any, windows: Any):
    sparse, windowed = of_family(EXPERTS, model, experts), of_family(LFM3, model, windows)
    assert config_of(sparse).mixture is not None
    assert config_of(windowed).model_type == "lfm3"
    assert of_family(EXPERTS, windowed, experts) == windowed
    for family in (sparse, windowed):
        assert has_model((1, (family,)))
        assert loaded(family).logits([3, 4]).shape == (2, 24)


def test_examples_without_a_model_have_none():
    assert not has_model((3, ("a",)))


def routes(tiny: TinyModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the last layer, with normed embeddings for its input: experts and weights [T, K], and the choice by scores."""
    model = loaded(tiny)
    weights = model.weights.layers[-1].feed_forward
    rows = model.numerics.embed(model.weights.embedding.values[IDS])
    x = model.numerics.rms_norm(rows, model.weights.layers[-1].ffn_norm, 1e-5)
    chosen, shares = route(weights, model.config, model.numerics, x)
    unbiased, _ = route(replace(weights, bias=None), model.config, model.numerics, x)
    return chosen, shares, unbiased


@pytest.mark.parametrize("seed", range(2))  # that are drawn
@pytest.mark.parametrize(("experts", "few"), [(4, 2), (3, 1), (12, 3), (5, 3)])
def test_tokens_go_different_ways(experts: int, few: int, seed: int):
    """Of 20 tokens: experts and weights differ, and the bias decides for some of them, not for all."""
    chosen, shares, unbiased = routes(TinyModel(experts=experts, experts_a_token=few, normalised=False, seed=seed))
    sets = {frozenset(row) for row in chosen.tolist()}
    assert len(sets) > 1
    assert len(np.unique(chosen)) > experts / 2
    assert shares.max() > 1.5 * shares.min()
    others = [set(value) != set(other) for value, other in zip(chosen.tolist(), unbiased.tolist(), strict=True)]
    assert 1 <= sum(others) < len(others)


@pytest.mark.parametrize(
    "change",
    [
        {"experts_a_token": 1},
        {"expert_bias": False},
        {"normalised": False},
        {"scaling": 2.5},
        {"dense_layers": 0},
        {"experts": 0},
    ],
    ids=str,
)
def test_every_switch_moves_the_logits(change: dict[str, Any]):
    """By tenths."""
    expected = loaded(PLAIN).logits(IDS)
    assert np.abs(loaded(replace(PLAIN, **change)).logits(IDS) - expected).max() > 0.1


def test_fused_tensors_are_the_same_model():
    assert loaded(replace(PLAIN, fused=True)).logits(IDS).tobytes() == loaded(PLAIN).logits(IDS).tobytes()
    names = {path.name for path in checkpoint(replace(PLAIN, fused=True)).iterdir()}
    assert names == {"config.json", "tiny.json", "model.safetensors"}


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_token_overflows_in_a_mixture_too(first: int):
    model = loaded(replace(PLAIN, overflows=True, tied=False, dense_layers=first))
    model.logits([3, 4, 5])
    with pytest.raises(NumericsError):
        model.logits([3, 4, 23])


def test_rows_from_a_near_choice_on_are_not_compared_with_float64(monkeypatch: pytest.MonkeyPatch):
    """Where rounding may send a token to another expert, float64 is no judge of it, nor of what comes after it."""
    tiny = TinyModel(layers="cA", experts=4, seed=3)
    rows, _ = second_implementation.plain_logits(tiny, tuple(IDS))
    assert len(rows) == len(IDS)
    monkeypatch.setattr(second_implementation, "LEAST_MARGIN", 0.05)
    fewer, _ = second_implementation.plain_logits(tiny, tuple(IDS))
    assert 0 < len(fewer) < len(rows)
    assert fewer == rows[: len(fewer)]


def test_a_mixture_is_judged_where_a_choice_is_sure():
    class Wrong(adapters.Own):
        def score(self, token_ids):
            return [score + 0.01 * (self.engine.model.config.mixture is not None) for score in super().score(token_ids)]

    def factory(model: str, sizes: dict[str, Any]) -> Any:
        return Wrong(adapters.own(model, sizes).engine.model, sizes)

    result = run_property(by_id("scores"), factory, "quick", shrink=False)
    assert result.status == "failed"
    assert "experts=" in result.message
