"""The exactness of exact.py against Python's integers, and its independence of every order."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operands import (
    FORMS,
    KINDS,
    LARGEST_WIDTH,
    LONGEST_CONTEXT,
    adversarial,
    expected_products,
    integer_dot,
    kinds,
    rounded_operands,
    seeds,
    stored_as,
)

from lfm2np.arithmetic import exact, grids
from lfm2np.arithmetic.ieee import FLOAT32, round_to_bfloat16
from lfm2np.arithmetic.weight_grids import LOW_WEIGHT_BITS, WEIGHT_BITS
from lfm2np.truth import integers
from lfm2np.truth.config_values import SIZES


@pytest.mark.slow
@given(seeds, kinds, kinds, st.sampled_from(FORMS), st.integers(1, 5), st.integers(1, 9), st.integers(1, 200))
def test_a_product_equals_python_integers_on_the_same_grid(seed, x_kind, w_kind, form, tokens, outputs, inputs):
    """In `exact` and in `integers`; of one, two and three slices, each summed exactly, added one after another."""
    rng = np.random.default_rng(seed)
    require_pythons(adversarial(rng, (tokens, inputs), x_kind), stored_as(rng, (outputs, inputs), w_kind, form))


@pytest.mark.parametrize("x_kind", KINDS)
@pytest.mark.parametrize(("w_kind", "form"), [("normal", "bfloat16"), ("outlier", "float32")])
def test_the_largest_width_of_the_family_is_exact(x_kind: str, w_kind: str, form: str):
    rng = np.random.default_rng(1)
    require_pythons(adversarial(rng, (1, LARGEST_WIDTH), x_kind), stored_as(rng, (2, LARGEST_WIDTH), w_kind, form))


def require_pythons(x: np.ndarray, weight: np.ndarray) -> None:
    matrix = exact.prepare_matrix(weight, "w")
    expected = expected_products(x, matrix).tobytes()
    with np.errstate(over="ignore"):
        assert exact.linear(x, matrix).tobytes() == expected
        assert integers.linear(x, integers.prepare_matrix(weight, "w")).tobytes() == expected


@pytest.mark.slow
@given(seeds, kinds, kinds, st.integers(1, 300))
def test_the_bound_that_makes_a_product_exact_holds_for_any_input(seed, x_kind, w_kind, inputs):
    """In units of both grids every term is an integer, and their absolute values sum to at most 2**53."""
    rng = np.random.default_rng(seed)
    weight, x = adversarial(rng, (3, inputs), w_kind), adversarial(rng, (2, inputs), x_kind)
    matrix = exact.prepare_matrix(weight, "w")
    grid = matrix.grid
    assert grid is not None
    assert grid.row_sum_bits + grid.activation_bits <= 53
    weight_exponents = grids.exponent_of(np.ldexp(weight.astype(np.float64), -grid.columns))[:, 0]
    x_exponents = grids.exponent_of(np.ldexp(x.astype(np.float64), grid.columns))[:, 0]
    weight_units = [e - WEIGHT_BITS - s * LOW_WEIGHT_BITS for s in range(grid.slices) for e in weight_exponents]
    for row, weight_unit in zip(matrix.values, weight_units, strict=True):
        for operand, exponent in zip(rounded_operands(x, matrix), x_exponents, strict=True):
            unit = Fraction(2) ** int(weight_unit + exponent - grid.activation_bits)
            terms = [Fraction(float(a)) * Fraction(float(w)) / unit for a, w in zip(operand, row, strict=True)]
            assert all(term.denominator == 1 for term in terms)
            assert sum(map(abs, terms)) <= 2**53


def test_float32_weights_keep_36_bits_and_shorter_ones_take_one_slice():
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(8, 700)).astype(np.float32)
    matrix = exact.prepare_matrix(weight, "w")
    assert matrix.grid is not None
    kept = np.ldexp(matrix.values[:8] + matrix.values[8:], matrix.grid.columns)
    assert (np.abs(kept - weight) <= 2.0**-36 * np.abs(weight).max(axis=1, keepdims=True)).all()
    for shorter in (round_to_bfloat16(weight), weight.astype(np.float16).astype(np.float32)):
        assert exact.prepare_matrix(shorter, "w").values.shape == (8, 700)


@pytest.mark.rounding
@pytest.mark.parametrize("width", [96, 1024, 4608])
@pytest.mark.parametrize("short", [True, False])
def test_a_product_is_within_four_units_of_float64_at_any_width(width: int, short: bool):
    """Units of float32, 2**-24, of the result's size; its own rounding is 0.4 of them, OpenBLAS in float32 2.7 to 5.2.

    Pinned: float32 weights once shared 53 bits with their inputs, and at width 768 were twice as far off as float32.
    """
    rng = np.random.default_rng(width)
    weight = (rng.normal(size=(64, width)) / width**0.5).astype(np.float32)
    weight = round_to_bfloat16(weight) if short else weight
    x = rng.normal(size=(40, width)).astype(np.float32)
    truth = x.astype(np.float64) @ weight.astype(np.float64).T
    error = exact.linear(x, exact.prepare_matrix(weight, "w")) - truth
    assert np.sqrt(np.mean(error**2) / np.mean(truth**2)) <= 4 * 2.0**-24  # measured: 0.4 to 3.5


@given(seeds, kinds, st.integers(2, 400), st.integers(1, 6))
def test_a_product_does_not_depend_on_the_order_of_its_terms(seed, kind, inputs, tokens):
    """Nor a row of it on its neighbours."""
    rng = np.random.default_rng(seed)
    weight = adversarial(rng, (7, inputs), "normal")
    x = adversarial(rng, (tokens, inputs), kind)
    order = rng.permutation(inputs)
    with np.errstate(over="ignore"):
        straight = exact.linear(x, exact.prepare_matrix(weight, "w"))
        shuffled = exact.prepare_matrix(weight[:, order], "w")
        assert straight.tobytes() == exact.linear(x[:, order], shuffled).tobytes()
        assert straight[-1:].tobytes() == exact.linear(x[-1:, order], shuffled).tobytes()


@pytest.mark.rounding
def test_the_plain_float32_product_depends_on_the_order_of_its_terms():
    """The control, on every BLAS. (A row of netlib's does not depend on its neighbours, nor need another's.)"""
    rng = np.random.default_rng(3)
    weight, x = rng.normal(size=(512, 1024)).astype(np.float32), rng.normal(size=(16, 1024)).astype(np.float32)
    order = rng.permutation(1024)
    straight = FLOAT32.linear(x, FLOAT32.prepare_matrix(weight, "w"))
    shuffled = FLOAT32.linear(x[:, order], FLOAT32.prepare_matrix(weight[:, order], "w"))
    assert straight.tobytes() != shuffled.tobytes()


def test_inputs_finer_than_proved_are_not_summed_exactly():
    """The control of the bound: with eight bits more, the same product is off."""
    rng = np.random.default_rng(0)
    weight, x = (rng.uniform(1.9, 2.0, (1, LARGEST_WIDTH)).astype(np.float32) for _ in range(2))
    matrix = exact.prepare_matrix(weight, "w")
    assert matrix.grid is not None
    fine = grids.round_to_grid(x.astype(np.float64) * 1.1, matrix.grid.activation_bits + 8)
    assert Fraction(float((fine @ matrix.values.T)[0, 0])) != integer_dot(fine[0], matrix.values[0])


@pytest.mark.slow
@given(seeds, kinds, st.integers(1, 500))
def test_an_exact_sum_is_right_to_2_to_the_minus_52_and_ignores_order(seed, kind, terms):
    rng = np.random.default_rng(seed)
    x = np.abs(adversarial(rng, (2, terms), kind)).astype(np.float64)
    x *= x
    total = grids.exact_sum(x)
    assert total.tobytes() == grids.exact_sum(x[:, rng.permutation(terms)]).tobytes() == integers.exact_sum(x).tobytes()
    for row, value in zip(x, total, strict=True):
        truth = sum((Fraction(float(v)) for v in row), Fraction(0))
        assert abs(Fraction(float(value)) - truth) <= truth * Fraction(1, 2**52)


def test_the_longest_sums_are_exact_and_longer_ones_are_refused():
    rng = np.random.default_rng(5)
    x = rng.uniform(0.9, 1.0, (1, grids.TERMS))
    for terms, bound in ((grids.EXACT_TERMS, Fraction(1, 2**52)), (grids.TERMS, Fraction(1, 2**51))):
        truth = Fraction(sum(map(int, x[0, :terms] * 2.0**53)), 2**53)  # each is a multiple of 2**-53
        assert abs(Fraction(float(grids.exact_sum(x[:, :terms])[0])) - truth) <= truth * bound
        assert grids.exact_sum(x[:, :terms]).tobytes() == integers.exact_sum(x[:, :terms]).tobytes()
    for part in (np.floor(x * 2.0**grids.TERM_BITS), np.rint(x * 2.0**grids.TERM_BITS)):
        exact_part = part[:, : grids.EXACT_TERMS]
        assert int(exact_part.sum()) == sum(int(v) for v in exact_part[0]), "the high parts of so many terms are exact"


@pytest.mark.parametrize("largest", [2**36, 2**36 - 1, -(2**36), 2**20])
def test_more_units_than_are_summed_exactly_are_summed_to_the_nearest_float_in_any_order(largest: int):
    """Python's integers; the control is a plain sum, which loses terms."""
    rng = np.random.default_rng(6)
    units = np.rint(largest * rng.uniform(0.75, 1.0, (1, grids.TERMS)))
    units[0, ::3] = largest
    truth = float(sum(map(int, units[0])))
    in_turn = np.asfortranarray(np.repeat(units, 2, 0))  # NumPy adds its columns one after another, a row in pairs
    assert grids.sum_units(units)[0, 0] == grids.sum_units(in_turn)[0, 0] == truth
    assert grids.sum_units(units[:, rng.permutation(grids.TERMS)])[0, 0] == truth
    many = np.asfortranarray([[2.0**36] * grids.EXACT_TERMS + [1.0] * grids.EXACT_TERMS] * 2)
    assert many.sum(-1)[0] == 2.0**53, "the control: a sum that loses terms"
    assert grids.sum_units(many)[0, 0] == 2.0**53 + 2**17


def test_the_constants_keep_the_bounds_that_the_docstrings_claim():
    assert grids.EXACT_TERMS << grids.TERM_BITS == 1 << grids.SUM_BITS
    assert grids.TERMS << (grids.TERM_BITS - 1) == 1 << grids.SUM_BITS
    assert ((1 << integers.SHARE_BITS) + grids.TERMS) << integers.VALUE_BITS < 1 << grids.SUM_BITS
    assert grids.TERMS << (integers.LOW_SHARE_BITS - 1) << integers.VALUE_BITS <= 1 << grids.SUM_BITS
    assert grids.TERMS == SIZES["max_position_embeddings"][1] >= LONGEST_CONTEXT


def test_the_newest_tap_is_the_last():
    taps = np.array([[1.0, 10.0, 100.0]], np.float32)
    history = np.array([[1.0], [2.0]], np.float32)
    assert exact.convolve(history, np.array([[3.0], [4.0]], np.float32), taps).ravel().tolist() == [321.0, 432.0]


def test_log_softmax_sums_to_one_and_holds_tiny_probabilities():
    logits = np.concatenate([[30.0], np.zeros(65_535)]).astype(np.float32)
    logprobs = exact.log_softmax(logits)
    assert abs(np.exp(logprobs).sum() - 1.0) < 1e-12
    truth = -np.log1p(65_535 * np.exp(-30.0))
    assert abs(logprobs[0] - truth) < 1e-18 + 1e-7 * abs(truth)
