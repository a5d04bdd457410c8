"""The ways to compute a product, and weights that stay as stored; of `exact`, tests/truth/test_integers.py has both."""

from __future__ import annotations

import numpy as np
import pytest
from threads import threads

from lfm2np.arithmetic import exact
from lfm2np.arithmetic.ieee import BFLOAT16, FLOAT32, FLOAT64, Ieee
from lfm2np.arithmetic.products import product as ways
from lfm2np.errors import NumericsError


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("rows", [0, 1, 2, ways.FEW, ways.FEW + 1, ways.MANY, ways.MANY + 1])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 3), (700, 40), (3, 2000)])
def test_every_way_gives_the_sum_of_integers(
    outputs: int, inputs: int, rows: int, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pieces of the weights are used, and some of a wider matrix's inputs, as emulated engines take them."""
    monkeypatch.setattr(ways, "WEIGHTS_AT_ONCE", 10)
    monkeypatch.setattr(ways, "OUTPUTS_AT_ONCE", 3)
    rng = np.random.default_rng(rows)
    x, weights = rng.integers(-60, 60, (rows, inputs)), rng.integers(-60, 60, (outputs, inputs + 2))
    operands = x.astype(dtype), weights.astype(dtype)[:, 1:-1]
    for way in (ways.product, ways.by_vectors, ways.turned_round):
        assert np.array_equal(way(*operands), x @ weights[:, 1:-1].T), way


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("inputs", [1, 40, 1000, 4608])
@pytest.mark.parametrize("count", [1, 2])
def test_tiles_are_all_used(rows: int, inputs: int, count: int, dtype: type) -> None:
    rng = np.random.default_rng(rows)
    x, weights = rng.integers(-9, 9, (rows, inputs)), rng.integers(-9, 9, (5 * ways.TILE, inputs + 2))
    with threads(count):
        output = ways.by_tiles(x.astype(dtype), weights.astype(dtype)[:, 1:-1])
    assert output.dtype == dtype and output.flags.c_contiguous
    assert np.array_equal(output, x @ weights[:, 1:-1].T)


@pytest.mark.rounding
@pytest.mark.parametrize("arithmetic", [FLOAT32, FLOAT64, BFLOAT16], ids=lambda arithmetic: arithmetic.name)
def test_weights_that_are_streamed_or_prepared_by_several_threads_are_those_of_one(arithmetic: Ieee) -> None:
    """Of an ordinary arithmetic; their products differ by rounding only."""
    rng = np.random.default_rng(5)
    weight, x = rng.normal(size=(37, 11)), arithmetic.embed(rng.normal(size=(9, 11)))
    alone = arithmetic.prepare_matrix(weight, "w")
    with pytest.MonkeyPatch.context() as patch, threads(3):
        patch.setattr("lfm2np.arithmetic.matrix.PREPARED", 22)  # two rows at a time
        patch.setattr("lfm2np.arithmetic.matrix.STREAMED", 44)  # four
        shared, streamed = arithmetic.prepare_matrix(weight, "w"), arithmetic.stream_matrix(weight, "w")
        rows = [part for _, part in streamed.pieces()]
        product = arithmetic.linear(x, streamed)
    assert len(rows) == 10 and (streamed.outputs, streamed.inputs) == (37, 11)
    assert isinstance(alone.values, np.ndarray) and isinstance(shared.values, np.ndarray)
    assert alone.values.tobytes() == shared.values.tobytes() == np.concatenate(rows).tobytes()
    assert np.allclose(product, arithmetic.linear(x, alone), rtol=2.0**-7 if arithmetic is BFLOAT16 else 0, atol=1e-5)
    with pytest.raises(NumericsError, match="a matrix with a grid"):
        arithmetic.linear(x, exact.prepare_matrix(weight, "w"))
