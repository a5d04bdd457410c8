"""Drawn examples again, with experts in their models: what is drawn for dense ones stays as it was.

What a mixture of experts is apart from the model that it is put into: few experts, one or all of them for a token,
more than ten in all, each switch of the router, from the first layer on or later.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from lfm2np.conformance.strategies.models import TinyModel
from lfm2np.conformance.strategies.scenarios import Scenario

Mixture = tuple[Any, ...]
FIELDS = (
    *("experts", "experts_a_token", "expert_width", "dense_layers"),
    *("expert_bias", "normalised", "scaling", "fused"),
)
COUNTS = ((4, 2), (3, 1), (12, 3), (5, 3), (2, 2), (1, 1))  # experts, and how many of them for a token


def mixtures() -> st.SearchStrategy[Mixture]:
    """A value for each of FIELDS."""
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


def mixed(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(strategy, mixtures()).map(lambda pair: with_experts(*pair))


def with_experts(example: Any, mixture: Mixture) -> Any:
    """The example with this mixture in every drawn model, in its last layer at least."""
    if isinstance(example, tuple):
        return tuple(with_experts(part, mixture) for part in example)
    if isinstance(example, Scenario):
        return replace(example, model=with_experts(example.model, mixture))
    if isinstance(example, TinyModel):
        fields = dict(zip(FIELDS, mixture, strict=True))
        fields["dense_layers"] = min(fields["dense_layers"], len(example.layers) - 1)
        return replace(example, **fields)
    return example


def has_model(example: Any) -> bool:
    if isinstance(example, tuple):
        return any(map(has_model, example))
    return isinstance(example.model if isinstance(example, Scenario) else example, TinyModel)


def with_some_experts(example: Any) -> Any:
    """The same for a machine, which draws its own: a mixture that the model decides."""
    if not isinstance(example, TinyModel):
        return example
    bits = zlib.crc32(repr(example).encode())
    counts = COUNTS[bits % len(COUNTS)]
    first = (bits >> 8) % 3
    switches = [bool(bits >> place & 1) for place in (16, 17, 18, 19)]
    bias, normalised, scaled, fused = switches
    return with_experts(example, (*counts, 4, first, bias, normalised, 2.5 if scaled else 1.0, fused))
