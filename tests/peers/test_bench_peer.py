"""transformers as a side of fixtures/bench.py: its filled cache is what a prefill leaves."""

from pathlib import Path

import bench
import pytest
import torch

pytestmark = pytest.mark.peers

TORTURE = Path(__file__).parent.parent.parent / "fixtures" / "torture"


@pytest.mark.parametrize("name", ["six_heads_two_kv", "moe_published"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_filled_cache_looks_like_that_of_a_prefill(dtype, name, monkeypatch):
    monkeypatch.setenv(bench.THREADS[0], "1")
    side = bench.TransformersSide(f"transformers-{dtype}", TORTURE / name)
    assert {weight.dtype for weight in side.model.parameters()} == {getattr(torch, dtype)}
    filled = side.random_cache(bench.cell_named("decode-3x17"))
    with torch.no_grad():
        real = side.model(torch.zeros((3, 17), dtype=torch.int64), use_cache=True).past_key_values
    for ours, theirs in zip(filled.layers, real.layers, strict=True):
        assert type(ours) is type(theirs)
        for tensor in ("keys", "values"):
            if getattr(theirs, tensor, None) is not None:
                assert getattr(ours, tensor).shape == getattr(theirs, tensor).shape
        if hasattr(theirs, "conv_states"):
            assert ours.conv_states[0].shape == theirs.conv_states[0].shape
    assert filled.get_seq_length() == 17
    assert side.time(bench.cell_named("decode-3x17"), 1) > 0 and side.time(bench.cell_named("prefill-9"), 1) > 0
