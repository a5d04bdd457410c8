"""Mixtures of experts and LFM3 models that the suite draws: everything in them counts."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from lfm2np.errors import NumericsError
from lfm2np.suite import adapters
from lfm2np.suite.catalogue import by_id
from lfm2np.suite.runner import run_property
from lfm2np.suite.strategies.scenarios import FAMILIES, models
from lfm2np.suite.strategies.tiny_models import TinyModel, config_of, loaded

pytestmark = pytest.mark.slow

PLAIN = TinyModel(layers="cA", experts=4)


def test_models_of_every_family_are_drawn_and_are_checkpoints():
    families = Counter()

    @settings(max_examples=60, derandomize=True, database=None, deadline=None)
    @given(models())
    def count(model: TinyModel) -> None:
        families["lfm3" if model.lfm3 else "mixture" if model.experts else "dense"] += 1
        config = config_of(model)
        assert (config.model_type == "lfm3", config.mixture is not None) == (model.lfm3, bool(model.experts))
        assert not model.experts or config.is_sparse(len(model.layers) - 1)
        assert loaded(model).logits([3, 4]).shape == (2, 24)

    count()
    assert min(families[name] for name in FAMILIES) > 4


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_token_overflows_in_a_mixture_too(first: int):
    model = loaded(replace(PLAIN, overflows=True, tied=False, dense_layers=first))
    model.logits([3, 4, 5])
    with pytest.raises(NumericsError):
        model.logits([3, 4, 23])


def test_a_mixture_is_judged_where_a_choice_is_sure():
    class Wrong(adapters.Own):
        def score(self, token_ids):
            return [score + 0.01 * (self.engine.model.config.mixture is not None) for score in super().score(token_ids)]

    def factory(model: str, sizes: dict[str, Any]) -> Any:
        return Wrong(adapters.own(model, sizes).engine.model, sizes)

    result = run_property(by_id("scores"), factory, "quick", shrink=False)
    assert result.status == "failed"
    assert "experts=" in result.message
