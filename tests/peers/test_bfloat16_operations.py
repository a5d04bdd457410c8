"""Single operations of `bfloat16` against PyTorch's bfloat16 on a CPU, to the bit wherever PyTorch rounds once.

What cannot be equal: a sum in float32 depends on its order, and now and then the two orders fall on either side of a
rounding to bfloat16. Measured, with AVX-512 and without: norms differ in 6 numbers of a million, attention in 3 of a
thousand, products and convolutions in none.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers.models.lfm2.modeling_lfm2 import Lfm2RMSNorm, apply_rotary_pos_emb, eager_attention_forward

from lfm2np.arithmetic.ieee import BFLOAT16, round_to_bfloat16
from lfm2np.arithmetic.matrix import AttentionScale
from lfm2np.truth.rope import Rope, rotary_table

pytestmark = pytest.mark.peers

Array = NDArray[Any]
ALL = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
FINITE = ALL[np.isfinite(ALL)]
NO_SCALE = AttentionScale(np.zeros(0, np.int32), np.zeros((0, 0), np.int32))


def normal(seed: int, *shape: int) -> Array:
    """Standard normal numbers that are bfloat16."""
    return round_to_bfloat16(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32))


def to_torch(x: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16()


def to_numpy(x: torch.Tensor) -> Array:
    assert x.dtype == torch.bfloat16
    return x.detach().float().numpy()


def units_apart(ours: Array, peer: Array, slack: Array | float = 0.0) -> Array:
    """Distance in units in the last place of bfloat16, beyond an absolute `slack` for what a float32 sum may lose."""
    assert np.array_equal(ours, round_to_bfloat16(ours))
    unit = np.ldexp(1.0, np.frexp(np.maximum(np.abs(ours), np.abs(peer)))[1] - 8)
    return np.asarray(np.maximum(np.abs(ours.astype(np.float64) - peer) - slack, 0.0) / unit)


def test_rounding_is_torchs_for_ties_and_neighbours_of_every_bfloat16() -> None:
    bits = (np.arange(2**16, dtype=np.uint32) << 16)[:, None]
    offsets = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (bits + offsets).view(np.float32)
    x = x[np.isfinite(x)]
    assert np.array_equal(round_to_bfloat16(x), to_numpy(torch.from_numpy(x).bfloat16()))


@pytest.mark.parametrize("operation", ["add", "multiply"])
def test_sums_and_products_of_two_are_torchs_to_the_bit(operation: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.choice(FINITE, 200_000), rng.choice(FINITE, 200_000)
    x[:100_000], y[:100_000] = normal(1, 100_000), normal(2, 100_000)
    with np.errstate(over="ignore"):
        ours = getattr(BFLOAT16, operation)(x, y)
    peer = getattr(torch, operation)(to_torch(x), to_torch(y))
    assert np.array_equal(ours, to_numpy(peer))


def test_silu_of_every_finite_bfloat16_is_torchs_to_the_bit() -> None:
    """Then times a random number, which shows whether silu itself was rounded."""
    for up in (np.ones_like(FINITE), normal(1, len(FINITE))):
        with np.errstate(over="ignore"):
            ours = BFLOAT16.swiglu(FINITE, up)
        peer = to_numpy(functional.silu(to_torch(FINITE)) * to_torch(up))
        assert FINITE[ours != peer].tolist() == []


@pytest.mark.parametrize("width", [1, 7, 64, 1024])
def test_a_norm_is_transformers_but_for_the_order_of_its_sum(width: int) -> None:
    x, norm = 3 * normal(1, 4096, width), Lfm2RMSNorm(width, 1e-5).bfloat16()
    x = round_to_bfloat16(x)
    weight = normal(2, width)
    norm.weight.data = to_torch(weight)
    units = units_apart(BFLOAT16.rms_norm(x, weight, 1e-5), to_numpy(norm(to_torch(x))))
    assert units.max() <= 2.0  # one in the normalised number may become two in its product with the weight
    assert (units > 0).mean() < 1e-3


@pytest.mark.parametrize("width", [2, 10, 64])
def test_a_rotation_is_transformers_to_the_bit(width: int) -> None:
    x, positions = normal(1, 500, 3, width), np.arange(1000, 1500)
    cos, sin = rotary_table(positions, width, Rope(1e6))
    both = [to_torch(np.concatenate([table, table], axis=-1).astype(np.float32))[None] for table in (cos, sin)]
    by_head = to_torch(x).transpose(0, 1)[None]
    peer, _ = apply_rotary_pos_emb(by_head, by_head, *both)
    assert np.array_equal(BFLOAT16.rotate(x, cos, sin), to_numpy(peer[0].transpose(0, 1)))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [3, 64, 1000])
def test_a_linear_map_is_torchs_but_for_the_order_of_its_sums(width: int, biased: bool) -> None:
    x, weight, bias = normal(1, 33, width), normal(2, 129, width), normal(3, 129) if biased else None
    ours = BFLOAT16.linear(x, BFLOAT16.prepare_matrix(weight, "weight"), bias)
    peer = to_numpy(functional.linear(to_torch(x), to_torch(weight), None if bias is None else to_torch(bias)))
    slack = 2.0**-22 * (np.abs(x) @ np.abs(weight).T)
    units = units_apart(ours, peer, slack)
    assert units.max() <= 1.0
    assert (ours != peer).mean() < 0.01


@pytest.mark.parametrize("taps", [1, 2, 3, 7])
@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_is_torchs_but_for_the_order_of_its_sums(taps: int, biased: bool) -> None:
    history, u = normal(1, taps - 1, 64), normal(2, 200, 64)
    weight, bias = normal(3, 64, taps), normal(4, 64) if biased else None
    ours = BFLOAT16.convolve(history, u, weight, bias)
    window = to_torch(np.concatenate([history, u])).T[None]
    peer = functional.conv1d(window, to_torch(weight)[:, None], None if bias is None else to_torch(bias), groups=64)
    units = units_apart(ours, to_numpy(peer[0].T), 2.0**-20)
    assert units.max() <= 1.0
    assert (units > 0).mean() < 0.01


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (5, 1)])
def test_attention_is_transformers_eager_attention_but_for_the_order_of_its_sums(heads: int, groups: int) -> None:
    tokens, context, head_dim = 37, 50, 64
    queries, keys, values = (
        normal(i, n, h, head_dim) for i, n, h in ((1, tokens, heads), (2, context, groups), (3, context, groups))
    )
    mask = torch.full((tokens, context), -torch.inf).triu(context - tokens + 1).bfloat16()
    q, k, v = (to_torch(x).transpose(0, 1)[None] for x in (queries, keys, values))
    module: Any = SimpleNamespace(num_key_value_groups=heads // groups, training=False)
    peer = to_numpy(eager_attention_forward(module, q, k, v, mask, head_dim**-0.5)[0][0])
    ours = BFLOAT16.attend(queries, keys, values, NO_SCALE)
    assert np.array_equal(ours, round_to_bfloat16(ours))
    assert np.abs(ours - peer).max() <= 2.0**-8 * np.abs(values).max()  # a mean of values: a unit at their size
    assert (ours != peer).mean() < 0.05
