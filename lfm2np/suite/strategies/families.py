"""Drawn examples again, with models of another family in them: what is drawn for dense LFM2 models stays as it was.

Experts: few of them, one or all for a token, more than ten in all, each switch of the router, from the first layer on
or later. LFM3: attention in windows of any size, in some layers or in all, each switch of the network, any share of a
head rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from lfm2np.suite.strategies.scenarios import Scenario
from lfm2np.suite.strategies.tiny_models import TinyModel

Values = tuple[Any, ...]


@dataclass(frozen=True)
class Family:
    """What its models have beside a dense LFM2."""

    word: str  # of engine_protocol.FEATURES
    share: float  # of examples, to one with a dense LFM2
    fields: tuple[str, ...]  # of TinyModel
    draw: Callable[[], st.SearchStrategy[Values]]
    put: Callable[[TinyModel, Values], TinyModel]


def varied(family: Family, strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Its examples, with the family's models."""
    return st.tuples(strategy, family.draw()).map(lambda pair: of_family(family, *pair))


def of_family(family: Family, example: Any, values: Values) -> Any:
    return with_models(example, lambda model: family.put(model, values))


def with_models(example: Any, change: Callable[[TinyModel], TinyModel]) -> Any:
    """The example with every drawn model changed."""
    if isinstance(example, tuple):
        return tuple(with_models(part, change) for part in example)
    if isinstance(example, Scenario):
        return replace(example, model=with_models(example.model, change))
    return change(example) if isinstance(example, TinyModel) else example


def has_model(example: Any) -> bool:
    """Whether a drawn model stands in it."""
    if isinstance(example, tuple):
        return any(map(has_model, example))
    return isinstance(example.model if isinstance(example, Scenario) else example, TinyModel)


# --- experts

COUNTS = ((4, 2), (3, 1), (12, 3), (5, 3), (2, 2), (1, 1))  # experts, and how many of them for a token
OF_EXPERTS = (
    *("experts", "experts_a_token", "expert_width", "dense_layers"),
    *("expert_bias", "normalised", "scaling", "fused"),
)


def draw_experts() -> st.SearchStrategy[Values]:
    return st.builds(
        lambda counts, *others: (*counts, *others),
        st.sampled_from(COUNTS),
        st.sampled_from([4, 7]),
        st.sampled_from([1, 0, 2]),
        st.sampled_from([True, True, False]),
        st.booleans().map(lambda odd: not odd),
        st.sampled_from([1.0, 2.5]),
        st.booleans(),
    )


def with_experts(model: TinyModel, values: Values) -> TinyModel:
    """In its last layer at least. An LFM3 has none."""
    fields = dict(zip(OF_EXPERTS, values, strict=True))
    fields["dense_layers"] = min(fields["dense_layers"], len(model.layers) - 1)
    return model if model.lfm3 else replace(model, **fields)


# --- LFM3

WINDOWS = (3, 1, 2, 5, 17)
HEADS = (8, 4, 12)  # their sizes: half of the pairs of 4 are one, whose frequency no theta changes
ATTENTIONS = ("SA", "S", "AS", "A")  # what becomes of a layer with attention
OF_LFM3 = ("lfm3", "window", "sandwich", "gated", "attention_bias", "rotated", "local_theta", "head_dim")


def draw_lfm3() -> st.SearchStrategy[Values]:
    return st.tuples(
        st.sampled_from(ATTENTIONS),
        st.sampled_from(WINDOWS),
        st.sampled_from([True, True, False]),
        st.sampled_from([True, True, False]),
        st.booleans(),
        st.sampled_from([0.5, 1.0]),
        st.sampled_from([10.0, 1000.0]),
        st.sampled_from(HEADS),
    )


def as_lfm3(model: TinyModel, values: Values) -> TinyModel:
    attention, *others = values
    layers = model.layers.replace("A", attention)
    return replace(model, layers=layers, auto_adjust=False, **dict(zip(OF_LFM3, (True, *others), strict=True)))


EXPERTS = Family("mixture-of-experts", 0.4, OF_EXPERTS, draw_experts, with_experts)
LFM3 = Family("lfm3", 0.25, OF_LFM3, draw_lfm3, as_lfm3)
FAMILIES = (EXPERTS, LFM3)
