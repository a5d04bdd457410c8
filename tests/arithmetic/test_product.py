"""The ways to compute a product, and weights that stay as stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lfm2np.arithmetic import NAMES, exact, numerics_named
from lfm2np.arithmetic.ieee import FLOAT32
from lfm2np.arithmetic.matrix import Matrix, Weights
from lfm2np.arithmetic.products.product import FEW, MANY, TILE, by_tiles, by_vectors, product, turned_round

KINDS = ("bfloat16", "float32", "quantised")
ROWS = sorted({0, 1, 2, FEW, FEW + 1, MANY, MANY + 1})


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (700, 40), (3, 2000)])
def test_every_way_gives_the_sum_of_integers(rows: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(rows)
    weights = rng.integers(-1000, 1000, shape)
    x = rng.integers(-1000, 1000, (rows, shape[1]))
    expected = x @ weights.T  # in integers
    for dtype in (np.float64, np.float32):
        assert np.array_equal(product(x.astype(dtype), (weights // 64).astype(dtype)), x @ (weights // 64).T)
    assert np.array_equal(product(x.astype(np.float64), weights.astype(np.float64)), expected)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("inputs", [1, 40, 1000, 4608])
@pytest.mark.parametrize("threads", [1, 2])
def test_tiles_are_all_used(rows: int, inputs: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfm2np.arithmetic.pieces.THREADS", threads)
    rng = np.random.default_rng(rows)
    x, weights = rng.integers(-9, 9, (rows, inputs)), rng.integers(-9, 9, (5 * TILE, inputs + 2))
    for dtype in (np.float64, np.float32):  # some of a wider matrix's inputs, too, as emulated engines take them
        output = by_tiles(x.astype(dtype), weights.astype(dtype)[:, 1:-1])
        assert output.dtype == dtype and output.flags.c_contiguous
        assert np.array_equal(output, x @ weights[:, 1:-1].T)


@pytest.mark.parametrize("rows", [0, 1, 2, FEW])
@pytest.mark.parametrize("way", [by_vectors, turned_round])
def test_pieces_of_the_weights_are_all_used(
    way: Callable[..., Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lfm2np.arithmetic.products.product.WEIGHTS_AT_ONCE", 10)
    monkeypatch.setattr("lfm2np.arithmetic.products.product.OUTPUTS_AT_ONCE", 3)
    rng = np.random.default_rng(3)
    weights, x = rng.integers(-9, 9, (23, 4)), rng.integers(-9, 9, (rows, 4))
    output = way(x.astype(np.float64), weights.astype(np.float64))
    assert np.array_equal(output, x @ weights.T)
    assert output.flags.c_contiguous


@given(st.integers(0, 2**32), st.sampled_from([1, 3, 40]), st.booleans(), st.booleans())
def test_streamed_weights_give_the_same_bits(seed: int, rows: int, short: bool, biased: bool) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(37, 11)).astype(np.float32)
    if short:
        weight = (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    x, bias = rng.normal(size=(rows, 11)).astype(np.float32), rng.normal(size=37).astype(np.float32)
    resident, streamed = exact.prepare_matrix(weight, "w"), exact.stream_matrix(weight, "w")
    assert (resident.outputs, resident.inputs) == (streamed.outputs, streamed.inputs) == (37, 11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lfm2np.arithmetic.matrix.STREAMED", 44)  # four rows at a time
        assert len(list(streamed.pieces())) == 10
        optional_bias = bias if biased else None
        assert exact.linear(x, streamed, optional_bias).tobytes() == exact.linear(x, resident, optional_bias).tobytes()


@pytest.mark.rounding
def test_streamed_weights_of_an_ordinary_arithmetic_differ_by_rounding_only() -> None:
    rng = np.random.default_rng(5)
    weight, x = rng.normal(size=(37, 11)).astype(np.float32), rng.normal(size=(9, 11)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lfm2np.arithmetic.matrix.STREAMED", 44)
        streamed = FLOAT32.linear(x, FLOAT32.stream_matrix(weight, "w"))
    assert np.allclose(streamed, FLOAT32.linear(x, FLOAT32.prepare_matrix(weight, "w")), rtol=0, atol=1e-5)


def weights_of(kind: str, weight: NDArray[np.float64]) -> Weights:
    """All short, or all but a row, which decides for all how many slices there are."""
    long = weight[:1].copy()
    weight = (weight.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    if kind != "bfloat16":
        weight[-1:] = long
    return weight if kind == "quantised" else weight.astype(np.float32)


def proof(matrix: Matrix) -> tuple[object, ...]:
    grid = matrix.grid
    return () if grid is None else (grid.columns.tolist(), grid.slices, grid.row_sum_bits, grid.activation_bits)


@given(seed=st.integers(0, 2**32), shape=st.tuples(st.integers(1, 9), st.integers(1, 9)), kind=st.sampled_from(KINDS))
@pytest.mark.parametrize("numerics", NAMES)
def test_weights_prepared_by_several_threads_are_those_of_one(
    numerics: str, seed: int, shape: tuple[int, int], kind: str
) -> None:
    weight = weights_of(kind, np.random.default_rng(seed).normal(size=shape))
    arithmetic = numerics_named(numerics)
    alone = arithmetic.prepare_matrix(weight, "w")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("matrix", "weight_grids"):
            patch.setattr(f"lfm2np.arithmetic.{module}.PREPARED", 2 * shape[1])  # two rows at a time
        patch.setattr("lfm2np.arithmetic.pieces.THREADS", 3)
        patch.setattr("lfm2np.arithmetic.pieces.LEAST_PIECE", 1)
        shared = arithmetic.prepare_matrix(weight, "w")
        streamed = arithmetic.stream_matrix(weight, "w")
        rows = [part for _, part in streamed.pieces()]
    assert isinstance(alone.values, np.ndarray) and isinstance(shared.values, np.ndarray)
    assert alone.values.tobytes() == shared.values.tobytes() == np.concatenate(rows).tobytes()
    assert alone.values.dtype == shared.values.dtype == rows[0].dtype
    assert proof(alone) == proof(shared) == proof(streamed)
