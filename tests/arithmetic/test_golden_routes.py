"""Which experts each arithmetic chooses, against those that transformers chose wholly in float64; needs no PyTorch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_prompts import TRAINED
from numpy.typing import NDArray
from safetensors import safe_open
from torture_table import MIXTURES

import lfm2np
from lfm2np.arithmetic import Numerics
from lfm2np.truth import reference

pytestmark = pytest.mark.slow

Array = NDArray[Any]
FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = (*MIXTURES, "moe")
DECIDED = 1e-6  # a choice counts where the last chosen score is farther than this from the first unchosen one


class NotingRoutes:
    """An arithmetic that also notes which experts each sparse layer chose."""

    def __init__(self, inner: Numerics) -> None:
        self.inner = inner
        self.chosen: list[Array] = []  # each [T, K], best first

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def top_k(self, preferred: Array, count: int) -> Array:
        self.chosen.append(self.inner.top_k(preferred, count))
        return self.chosen[-1]


@functools.cache
def golden(name: str) -> tuple[list[list[int]], Array, Array]:
    """Prompts; of all their positions below each other the experts [T, S, K], ascending, and margins [T, S]."""
    with safe_open(str(FIXTURES / "goldens" / f"{name}.safetensors"), framework="numpy") as file:
        count = sum(key.startswith("prompt_") for key in file.keys())  # noqa: SIM118 (not a mapping)
        read = {
            kind: [file.get_tensor(f"{kind}_{i}") for i in range(count)] for kind in ("prompt", "experts", "margins")
        }
    prompts = [array.tolist() for array in read["prompt"]]
    return prompts, np.concatenate(read["experts"]), np.concatenate(read["margins"])


def chosen(name: str, arithmetic: str) -> Array:
    """Our experts [T, S, K] of all prompts, best first."""
    model = lfm2np.load(FIXTURES / name if name in TRAINED else FIXTURES / "torture" / name, arithmetic)
    choices = []
    for ids in golden(name)[0]:
        noting: Any = NotingRoutes(model.numerics)
        reference.hidden_states(model.weights, model.config, noting, ids)
        choices.append(np.stack(noting.chosen, axis=1))
    return np.concatenate(choices)


@pytest.mark.rounding
@pytest.mark.parametrize("arithmetic", ["exact", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_the_experts_of_float64_are_chosen(name: str, arithmetic: str) -> None:
    _, experts, margins = golden(name)
    decided = margins > DECIDED
    assert decided.mean() > (0.5 if name == "moe_near_ties" else 0.99)
    assert np.sort(chosen(name, arithmetic))[decided].tolist() == experts[decided].tolist()


def test_near_ties_are_nearer_than_bfloat16_and_farther_than_float32() -> None:
    """A score of 0.5 has steps of 2**-9 in bfloat16 and of 2**-25 in float32."""
    _, _, margins = golden("moe_near_ties")
    near = (margins > 2.0**-20) & (margins < 2.0**-9)
    assert near.mean() > 0.2
