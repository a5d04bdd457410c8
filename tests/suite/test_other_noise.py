"""An engine whose noise is not the reference's has every property, as far as they say anything of its tokens."""

from dataclasses import replace
from pathlib import Path

import pytest

from lfm2np.suite import adapters
from lfm2np.suite.catalogue import ALL
from lfm2np.suite.runner import run_property


class OtherNoise(adapters.Own):
    """Draws its tokens with other noise than the reference's, and says so."""

    is_lfm2np = property()  # asked as a stranger
    lacks = frozenset({"reference-noise"})

    def __init__(self, model, sizes):
        super().__init__(adapters.load_once(Path(model)), sizes)

    def add(self, request):
        seed = request.params.seed
        super().add(replace(request, params=replace(request.params, seed=None if seed is None else 1000 + seed)))


@pytest.mark.slow
@pytest.mark.parametrize("prop", ALL, ids=lambda prop: prop.id)
def test_an_engine_with_noise_of_its_own_has_every_property(prop):
    result = run_property(prop, OtherNoise, "quick", shrink=False)
    assert result.status == "passed", result.message
