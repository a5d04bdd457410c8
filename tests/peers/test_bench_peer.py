"""transformers as a side of `lfm2np bench`: its filled cache is what a prefill leaves, and its steps are its own."""

from pathlib import Path

import pytest
import torch

from lfm2np.commands.bench.sides.cells import cell_named
from lfm2np.commands.bench.sides.side_process import SideProcess
from lfm2np.commands.bench.sides.transformers_side import TransformersSide

pytestmark = pytest.mark.peers

TORTURE = Path(__file__).parent.parent.parent / "fixtures" / "torture"
MODEL = TORTURE / "six_heads_two_kv"


@pytest.mark.parametrize("name", ["six_heads_two_kv", "moe_published"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_filled_cache_looks_like_that_of_a_prefill(dtype, name):
    side = TransformersSide(dtype)
    side.load(TORTURE / name, 1)
    filled = side.random_cache(cell_named("decode-3x17"))
    with torch.no_grad():
        real = side.model(torch.zeros((3, 17), dtype=torch.int64), use_cache=True).past_key_values
    for ours, theirs in zip(filled.layers, real.layers, strict=True):
        assert type(ours) is type(theirs)
        for name in ("keys", "values"):
            if getattr(theirs, name, None) is not None:
                assert getattr(ours, name).shape == getattr(theirs, name).shape
                assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        if hasattr(theirs, "conv_states"):
            assert ours.conv_states[0].shape == theirs.conv_states[0].shape
            assert ours.has_previous_state == theirs.has_previous_state
    side.step(torch.zeros((3, 1), dtype=torch.int64), filled)
    assert filled.get_seq_length() == 18


def test_the_dtype_is_that_of_the_weights():
    side = TransformersSide("float64")
    side.load(MODEL, 1)
    assert {weight.dtype for weight in side.model.parameters()} == {torch.float64}


def test_it_answers_as_a_side():
    with SideProcess("transformers-bfloat16", MODEL, 1) as side:
        assert set(side.ask("load")["versions"]) == {"torch", "transformers"}
        assert len(side.ask("time", cell="decode-2x9", steps=2)["steps"]) == 2
        assert len(side.ask("time", cell="prefill-9", steps=1)["steps"]) == 1
