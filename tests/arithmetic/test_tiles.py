"""Products in tiles: every output of every row once, whatever the sizes, the threads and the order of sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lfm2np.arithmetic import exact
from lfm2np.arithmetic.products import fastest, product, tiles

SIZES = st.integers(1, 13)


@contextmanager
def small_tiles(in_place: bool, threads: int = 1) -> Iterator[None]:
    """Of 3 outputs, 2 rows and 4 or 5 inputs, so that a small product has several of each, and some that are less."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"OUTPUTS": 3, "ROWS": 2, "INPUTS": 4, "INPUTS_IN_PLACE": 5}.items():
            patch.setattr(tiles, name, value)
        for name, value in {"GROUPS": 2, "TILES": 2, "CALL": 3}.items():
            patch.setattr(tiles, name, value)
        patch.setattr(tiles, "multiplies_in_place", lambda: in_place)
        patch.setattr("lfm2np.arithmetic.pieces.THREADS", threads)
        patch.setattr("lfm2np.arithmetic.pieces.LEAST_PIECE", 1)
        yield


@given(
    seed=st.integers(0, 2**32),
    rows=SIZES,
    outputs=SIZES,
    inputs=SIZES,
    slices=st.integers(1, 3),
    biased=st.booleans(),
    in_place=st.booleans(),
    threads=st.sampled_from([1, 3]),
)
def test_each_output_is_the_sum_of_integers(
    seed: int, rows: int, outputs: int, inputs: int, slices: int, biased: bool, in_place: bool, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    x, weights = rng.integers(-999, 999, (rows, inputs)), rng.integers(-999, 999, (slices, outputs, inputs))
    bias = rng.integers(-999, 999, outputs)
    expected = sum(x @ weight.T for weight in weights) + (bias if biased else 0)  # in integers
    result = np.full((rows + 2, outputs + 2), np.nan, np.float32)
    wide = np.full((slices * outputs, inputs + 3), np.nan)
    wide[:, 1:-2] = weights.reshape(-1, inputs)
    with small_tiles(in_place, threads):
        optional_bias = bias.astype(np.float32) if biased else None
        tiles.by_tiles(x.astype(np.float64), wide[:, 1:-2], result[1:-1, 1:-1], slices, optional_bias)
    assert np.array_equal(result[1:-1, 1:-1], expected.astype(np.float32))
    result[1:-1, 1:-1] = np.nan
    assert np.isnan(result).all(), "nothing beside it is written"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 257, 300])
@pytest.mark.parametrize("shape", [(1, 1), (47, 300), (100, 1152), (500, 2305)])
def test_tiles_of_their_real_size_do_too(
    monkeypatch: pytest.MonkeyPatch, rows: int, shape: tuple[int, int], in_place: bool
) -> None:
    monkeypatch.setattr(tiles, "multiplies_in_place", lambda: in_place)
    rng = np.random.default_rng(rows)
    x, weights = rng.integers(-999, 999, (rows, shape[1])), rng.integers(-999, 999, shape)
    result = np.empty((rows, shape[0]))
    tiles.by_tiles(x.astype(np.float64), weights.astype(np.float64), result)
    assert np.array_equal(result, x @ weights.T)


def test_no_tile_has_more_multiplications_than_blas_leaves_to_its_caller() -> None:
    """2**18 with any of OpenBLAS's kernels; 10**6 where it multiplies in place."""
    assert tiles.OUTPUTS * tiles.ROWS * tiles.INPUTS <= 2**18
    assert tiles.OUTPUTS * tiles.ROWS * tiles.INPUTS_IN_PLACE <= 10**6
    for in_place, most in ((False, tiles.INPUTS), (True, tiles.INPUTS_IN_PLACE)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "multiplies_in_place", lambda in_place=in_place: in_place)
            *_, widest, rows = tiles.in_groups(np.zeros((32, 5 * most - 3))).shape
        assert (widest, rows) == (most, tiles.ROWS)


def test_a_sum_of_zeros_is_zero_even_if_blas_says_minus_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "products_of_blocks", lambda tiles, groups: iter([np.full((1, 1, 3, 2), -0.0)] * 2))
    result = np.empty((2, 3), np.float32)
    tiles.by_tiles(np.zeros((2, 4)), np.zeros((3, 4)), result, bias=np.full(3, -0.0, np.float32))
    assert not np.signbit(result).any()


@given(seed=st.integers(0, 2**32), rows=SIZES, in_place=st.booleans(), slices=st.integers(1, 2), biased=st.booleans())
def test_both_ways_of_an_exact_product_have_the_same_bits(
    seed: int, rows: int, in_place: bool, slices: int, biased: bool
) -> None:
    """Numbers as `exact` has them: their sums do not fit into float32, and those of two slices not into float64."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(7, 11)).astype(np.float32)
    if slices == 1:
        weight = (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    weight[rng.random(weight.shape) < 0.3] = 0.0
    x = rng.normal(size=(rows, 11)).astype(np.float32) * 2.0 ** rng.integers(-9, 9, (rows, 1))
    x[rng.random(rows) < 0.2] = -0.0
    bias = rng.normal(size=7).astype(np.float32) if biased else None
    matrix = exact.prepare_matrix(weight, "w")
    assert matrix.grid is not None and matrix.grid.slices == slices and isinstance(matrix.values, np.ndarray)
    on_grid = exact.on_matrix_grid(x.astype(np.float32), matrix.grid)
    results = np.empty((2, rows, 7), np.float32)
    with small_tiles(in_place):
        tiles.by_tiles(on_grid, matrix.values, results[0], slices, bias)
    exact.by_whole_products(on_grid, matrix.values, results[1], slices, bias)
    assert results[0].tobytes() == results[1].tobytes()


def test_a_product_that_is_large_enough_takes_each_way_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def noting(name: str, way: Any) -> Any:
        def note(*arguments: Any) -> None:
            taken.append(name)
            way(*arguments)

        return note

    monkeypatch.setattr(exact, "by_tiles", noting("tiles", exact.by_tiles))
    monkeypatch.setattr(exact, "by_whole_products", noting("whole", exact.by_whole_products))
    monkeypatch.setattr(fastest, "found", {})
    monkeypatch.setattr(fastest, "MEASURED", True)
    monkeypatch.setattr(fastest, "HOPELESS", 10.0**9)
    rng = np.random.default_rng(1)
    matrix = exact.prepare_matrix(rng.normal(size=(512, 512)).astype(np.float32), "w")
    x = rng.normal(size=(40, 512)).astype(np.float32)
    outputs = {exact.linear(x, matrix).tobytes() for _ in range(2 * fastest.TRIES + 1)}
    assert len(outputs) == 1
    assert sorted(taken[:-1]) == ["tiles"] * fastest.TRIES + ["whole"] * fastest.TRIES
    assert outputs == {b"".join(exact.linear(row[None], matrix).tobytes() for row in x)}
    assert len(taken) == 2 * fastest.TRIES + 1 + len(x), "a single row has one way"
    assert set(taken[-len(x) :]) == {"whole"}


@pytest.mark.parametrize("in_place", [False, True])
def test_where_nothing_is_measured_the_rule_decides(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    monkeypatch.setattr(fastest, "MEASURED", False)
    monkeypatch.setattr(product, "multiplies_in_place", lambda: in_place)
    asked: list[str] = []
    for name in ("by_tiles", "by_whole_products"):
        monkeypatch.setattr(exact, name, lambda *_, name=name: asked.append(name))
    exact.linear(np.ones((9, 1024), np.float32), exact.prepare_matrix(np.ones((1024, 1024), np.float32), "w"))
    assert asked == ["by_tiles" if in_place else "by_whole_products"]


def test_of_large_inputs_no_copy_is_made_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "found", {})
    monkeypatch.setattr(fastest, "MEASURED", True)
    monkeypatch.setattr(exact, "MOST_BYTES", 8 * 9 * 512)
    matrix = exact.prepare_matrix(np.ones((512, 512), np.float32), "w")
    for rows in (10, 9):
        assert not fastest.found
        exact.linear(np.ones((rows, 512), np.float32), matrix)
    assert fastest.found


@pytest.mark.rounding
def test_where_blas_multiplies_in_place_ordinary_products_are_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    weights, x = rng.normal(size=(2049, 513)).astype(np.float32), rng.normal(size=(5, 513)).astype(np.float32)
    asked: list[NDArray[Any]] = []

    def by_tiles(x: NDArray[Any], weights: NDArray[Any], output: NDArray[Any]) -> None:
        asked.append(x)
        tiles.by_tiles(x, weights, output)

    monkeypatch.setattr(product, "by_tiles", by_tiles)
    for in_place in (False, True):
        monkeypatch.setattr(product, "multiplies_in_place", lambda in_place=in_place: in_place)
        assert np.allclose(product.product(x, weights), x @ weights.T, rtol=0, atol=1e-3)
        assert len(asked) == in_place
    for few, small in ((x[:2], weights), (x, weights[:2000])):
        product.product(few, small)
    assert len(asked) == 1, "not of two rows, nor of weights that stay in the cache"
    product.product(np.ones((2045, 513), np.float32), weights)
    assert len(asked) == 1, "nor of rows that do not"
