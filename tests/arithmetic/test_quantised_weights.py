"""float64 weights, as quantised checkpoints have them: every bit is held, or it is told what is not."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operands import seeds

from lfm2np.arithmetic import exact
from lfm2np.arithmetic.ieee import BFLOAT16, FLOAT32, FLOAT64, round_to_bfloat16
from lfm2np.arithmetic.pieces import SMALL_PIECE
from lfm2np.arithmetic.weight_grids import (
    LOW_WEIGHT_BITS,
    MOST_SLICES,
    WEIGHT_BITS,
    column_exponents,
    left_over,
    prove_grid,
)


def weights(seed: int, outputs: int, inputs: int, bits: int) -> np.ndarray:
    """Multiples of 2**-24 with so many bits, of both signs, some zero."""
    random = np.random.default_rng(seed)
    units = random.integers(-(2**bits), 2**bits, (outputs, inputs)) * random.integers(0, 2, (outputs, inputs))
    return np.ldexp(units.astype(np.float64), -24)


def held(weight: np.ndarray) -> np.ndarray:
    """Whether the slices of the prepared weights add up to each weight, by fractions."""
    matrix = exact.prepare_matrix(weight, "w")
    assert matrix.grid is not None
    slices = matrix.values.reshape(matrix.grid.slices, -1).T.tolist()
    scaled = np.ldexp(weight, -matrix.grid.columns).ravel().tolist()
    sums = [sum(map(Fraction, parts)) == Fraction(value) for parts, value in zip(slices, scaled, strict=True)]
    return np.array(sums).reshape(weight.shape)


@pytest.mark.slow
@given(seeds, st.integers(1, 4), st.integers(1, 40), st.integers(1, 51))
def test_what_is_left_over_is_what_the_slices_miss(seed: int, outputs: int, inputs: int, bits: int):
    """For any number of slices: by fractions, as a share of the power of two of the row's largest."""
    weight = weights(seed, outputs, inputs, bits)
    columns = column_exponents(weight)
    scaled = np.ldexp(weight, -columns)
    for slices in range(1, MOST_SLICES + 1):
        lost = left_over(weight, columns, slices)
        step = Fraction(1, 2 ** (WEIGHT_BITS + LOW_WEIGHT_BITS * (slices - 1)))
        for row, missed in zip(scaled, lost, strict=True):
            if not row.any():
                assert not missed.any()
                continue
            top = Fraction(2) ** int(np.frexp(np.abs(row).max())[1])
            for value, residue in zip(row.tolist(), missed.tolist(), strict=True):
                share = Fraction(value) / top
                assert Fraction(residue) == share - round(share / step) * step


@pytest.mark.parametrize(("bits", "slices"), [(1, 1), (20, 1), (21, 2), (36, 2), (37, 3), (52, 3), (53, MOST_SLICES)])
def test_as_many_slices_as_bits(bits: int, slices: int):
    """20 bits of the first slice, 16 of each other; what is beyond the last is told."""
    weight = np.array([[1.0, 2.0 ** (1 - bits)], [1.0, 1.0]])
    grid = prove_grid(weight, "w")
    assert grid.slices == slices
    lost = 2.0**-53 if bits > 52 else 0.0
    assert left_over(weight, grid.columns, slices).tolist() == [[0.0, lost], [0.0, 0.0]]
    assert held(weight).tolist() == [[True, bits <= 52], [True, True]]


@given(seeds, st.integers(1, 30))
def test_float64_weights_that_are_float32_give_the_same_products(seed: int, inputs: int):
    """Those of a quantised file, and of a checkpoint that holds their values; 36 bits hold both."""
    weight = np.random.default_rng(seed).integers(-(2**12), 2**12, (7, inputs)).astype(np.float32)
    x = np.random.default_rng(seed).normal(size=(3, inputs)).astype(np.float32)
    narrow, wide = (
        exact.linear(x, exact.prepare_matrix(matrix, "w")) for matrix in (weight, weight.astype(np.float64))
    )
    assert narrow.tobytes() == wide.tobytes()


# --- arithmetics that round: once


def nearest_bfloat16(value: float) -> float:
    """By fractions, ties to even; of 8 bits, or of multiples of 2**-133."""
    exponent = max(int(np.frexp(value)[1]), -125) - 8
    return float(round(Fraction(value) / Fraction(2) ** exponent) * Fraction(2) ** exponent)


@given(st.floats(-(2.0**127), 2.0**127) | seeds.map(lambda seed: float(np.random.default_rng(seed).normal())))
def test_bfloat16_of_float64_is_rounded_once(value: float):
    rounded = round_to_bfloat16(np.array([value]))
    assert rounded.dtype == np.float32 and float(rounded[0]) == nearest_bfloat16(value)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("bit", [-30, -40, -52])
def test_what_float32_would_round_to_a_tie_is_none(bit: int, sign: float):
    """1 + 2**-8 is half way between two numbers of bfloat16; a little more or less is not, though float32 says so."""
    above, below = sign * (1.0 + 2.0**-8 + 2.0**bit), sign * (1.0 + 3 * 2.0**-8 - 2.0**bit)
    assert round_to_bfloat16(np.array([above, below])).tolist() == [sign * (1.0 + 2.0**-7)] * 2
    twice = round_to_bfloat16(np.array([above, below], np.float32)).tolist()
    assert twice == [sign, sign * (1.0 + 2.0**-6)], "the control: by way of float32 both are wrong"


def test_bfloat16_of_numbers_that_are_none():
    rounded = round_to_bfloat16(np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e300, -1e300, 1e-300]))
    assert str(rounded.tolist()) == "[inf, -inf, nan, 0.0, -0.0, inf, -inf, 0.0]"


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("place", [0, SMALL_PIECE - 1, SMALL_PIECE])
def test_what_is_no_number_stays_none_beside_numbers(bits: int, place: int):
    """Whatever its bits: to add to those of some makes an infinity of them, or 0."""
    x = np.full(SMALL_PIECE + 5, 1.0 + 2.0**-9, np.float32)
    x.view("=u4")[place] = bits
    rounded = round_to_bfloat16(x)
    assert np.isnan(rounded[place]) and np.isnan(rounded).sum() == 1
    assert (np.delete(rounded, place) == 1.0).all()


def test_each_arithmetic_takes_the_weight_rounded_once_to_its_type():
    weight = np.array([[1.0 + 2.0**-8 + 2.0**-40, 1.0 + 2.0**-24 + 2.0**-50]])
    expected = {FLOAT32: weight.astype(np.float32), FLOAT64: weight, BFLOAT16: [[1.0 + 2.0**-7, 1.0]]}
    for arithmetic, rounded in expected.items():
        for actual in (arithmetic.prepare_matrix(weight, "w").values, arithmetic.embed(weight)):
            assert actual.dtype == np.dtype(arithmetic.dtype) and np.array_equal(actual, rounded), arithmetic.name
