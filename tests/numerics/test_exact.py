"""The exactness of exact.py against Python's integers, and its independence of every order."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2np.errors import NumericsError
from lfm2np.numerics import exact
from lfm2np.numerics.ieee import FLOAT32, FLOAT64, round_to_bfloat16
from lfm2np.numerics.matrix import AttentionScale, Matrix

LARGEST_WIDTH = 11776
LONGEST_CONTEXT = 128_000


def float32_of(value: Fraction) -> np.float32:
    """Correct rounding of a fraction to float32, by integers only (ties to even)."""
    if value == 0:
        return np.float32(0.0)
    sign, value = (-1, -value) if value < 0 else (1, value)
    exponent = max(value.numerator.bit_length() - value.denominator.bit_length(), -126)
    while value < Fraction(2) ** exponent and exponent > -126:
        exponent -= 1
    if value >= Fraction(2) ** (exponent + 1):
        exponent += 1
    units = value / Fraction(2) ** (exponent - 23)
    whole, rest = divmod(units.numerator, units.denominator)
    twice = 2 * rest - units.denominator
    whole += 1 if twice > 0 or (twice == 0 and whole % 2) else 0
    with np.errstate(over="ignore"):
        return np.float32(sign * float(Fraction(whole) * Fraction(2) ** (exponent - 23)))


def integer_dot(x: np.ndarray, w: np.ndarray) -> Fraction:
    """sum x*w of float64 vectors in arbitrary precision."""
    return sum((Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x, w, strict=True)), Fraction(0))


def adversarial(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """float32 operands of the magnitudes that break careless sums."""
    normal = rng.normal(size=shape)
    values = {
        "normal": normal,
        "wide": normal * np.exp2(rng.integers(-40, 40, shape)),
        "outlier": np.where(rng.random(shape) < 0.02, normal * 2.0**12, normal),
        "constant": np.full(shape, 1.9999999),
        "alternating": np.where(np.indices(shape).sum(0) % 2 == 0, 1.9999999, -1.9999998),
        "zeros": np.where(rng.random(shape) < 0.9, 0.0, normal),
        "negative zeros": np.full(shape, -0.0),
        "subnormal": normal * 2.0**-140,
        "huge": normal * 2.0**60,
    }[kind]
    return values.astype(np.float32)


KINDS = ("normal", "wide", "outlier", "constant", "alternating", "zeros", "negative zeros", "subnormal", "huge")
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**32 - 1)


def rounded_operands(x: np.ndarray, matrix: Matrix) -> np.ndarray:
    assert matrix.grid is not None
    return exact.round_to_grid(np.ldexp(x.astype(np.float64), matrix.grid.columns), matrix.grid.activation_bits)


@given(seeds, kinds, kinds, st.integers(1, 5), st.integers(1, 9), st.integers(1, 200), st.booleans())
def test_a_product_equals_python_integers_on_the_same_grid(seed, x_kind, w_kind, tokens, outputs, inputs, short):
    rng = np.random.default_rng(seed)
    weight = adversarial(rng, (outputs, inputs), w_kind)
    matrix = exact.prepare_matrix(round_to_bfloat16(weight) if short else weight, "w")
    x = adversarial(rng, (tokens, inputs), x_kind)
    with np.errstate(over="ignore"):
        result = exact.linear(x, matrix)
    operands = rounded_operands(x, matrix)
    for t in range(tokens):
        for o in range(outputs):
            expected = float32_of(integer_dot(operands[t], matrix.values[o]))
            assert result[t, o].tobytes() == expected.tobytes()


@pytest.mark.parametrize("x_kind", KINDS)
@pytest.mark.parametrize("w_kind", ["normal", "constant", "outlier"])
def test_the_largest_width_of_the_family_is_exact(x_kind: str, w_kind: str):
    rng = np.random.default_rng(1)
    matrix = exact.prepare_matrix(round_to_bfloat16(adversarial(rng, (2, LARGEST_WIDTH), w_kind)), "w")
    x = adversarial(rng, (1, LARGEST_WIDTH), x_kind)
    with np.errstate(over="ignore"):
        result = exact.linear(x, matrix)[0]
    operands = rounded_operands(x, matrix)[0]
    expected = [float32_of(integer_dot(operands, row)) for row in matrix.values]
    assert result.tobytes() == np.array(expected, np.float32).tobytes()


@given(seeds, kinds, kinds, st.integers(1, 300))
def test_the_bound_that_makes_a_product_exact_holds_for_any_input(seed, x_kind, w_kind, inputs):
    """In units of both grids every term is an integer, and their absolute values sum to at most 2**53."""
    rng = np.random.default_rng(seed)
    weight, x = adversarial(rng, (3, inputs), w_kind), adversarial(rng, (2, inputs), x_kind)
    matrix = exact.prepare_matrix(weight, "w")
    grid = matrix.grid
    assert grid is not None
    assert grid.row_sum_bits + grid.activation_bits <= 53
    weight_exponents = exact.exponent_of(np.ldexp(weight.astype(np.float64), -grid.columns))[:, 0]
    x_exponents = exact.exponent_of(np.ldexp(x.astype(np.float64), grid.columns))[:, 0]
    for row, row_exponent in zip(matrix.values, weight_exponents, strict=True):
        for operand, exponent in zip(rounded_operands(x, matrix), x_exponents, strict=True):
            unit = Fraction(2) ** int(row_exponent - grid.weight_bits + exponent - grid.activation_bits)
            terms = [Fraction(float(a)) * Fraction(float(w)) / unit for a, w in zip(operand, row, strict=True)]
            assert all(term.denominator == 1 for term in terms)
            assert sum(map(abs, terms)) <= 2**53


@given(seeds, kinds, st.integers(2, 400), st.integers(1, 6))
def test_a_product_does_not_depend_on_the_order_of_its_terms(seed, kind, inputs, tokens):
    rng = np.random.default_rng(seed)
    weight = adversarial(rng, (7, inputs), "normal")
    x = adversarial(rng, (tokens, inputs), kind)
    order = rng.permutation(inputs)
    with np.errstate(over="ignore"):
        straight = exact.linear(x, exact.prepare_matrix(weight, "w"))
        shuffled = exact.linear(x[:, order], exact.prepare_matrix(weight[:, order], "w"))
    assert straight.tobytes() == shuffled.tobytes()


@given(seeds, kinds, st.integers(1, 70), st.integers(2, 9))
def test_a_row_of_a_product_does_not_depend_on_its_neighbours(seed, kind, inputs, tokens):
    rng = np.random.default_rng(seed)
    matrix = exact.prepare_matrix(adversarial(rng, (33, inputs), "normal"), "w")
    x = adversarial(rng, (tokens, inputs), kind)
    with np.errstate(over="ignore"):
        together = exact.linear(x, matrix)
        alone = np.concatenate([exact.linear(row[None], matrix) for row in x])
    assert together.tobytes() == alone.tobytes()


def test_the_plain_float32_product_fails_the_same_check():
    """The control: with BLAS in float32 one row alone differs from the same row in a batch."""
    rng = np.random.default_rng(3)
    matrix = FLOAT32.prepare_matrix(rng.normal(size=(512, 1024)).astype(np.float32), "w")
    x = rng.normal(size=(16, 1024)).astype(np.float32)
    alone = np.concatenate([FLOAT32.linear(row[None], matrix) for row in x])
    assert FLOAT32.linear(x, matrix).tobytes() != alone.tobytes()


class StartsWithTheFirstProduct(np.ndarray):
    """A legitimate BLAS: it adds nothing to the first product, so a sum of -0 stays -0."""

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        plain = np.asarray(self)
        first, rest = x[..., :1] * plain[..., :1, :], x[..., 1:] @ plain[..., 1:, :]
        return np.where(rest == 0.0, first, first + rest)


def test_a_zero_sum_is_plus_zero_whatever_the_blas_makes_of_it():
    matrix = exact.prepare_matrix(np.full((5, 3), -1.0, np.float32), "w")
    sly = Matrix(matrix.values.view(StartsWithTheFirstProduct), matrix.grid)
    zeros = np.zeros((2, 3), np.float32)
    assert np.signbit(zeros @ sly.values.T).all(), "the control: this BLAS gives -0"
    assert not np.signbit(exact.linear(zeros, sly)).any()
    assert not np.signbit(exact.linear(zeros, matrix)).any()


def test_attention_to_zeros_is_plus_zero_whatever_the_blas_makes_of_it(monkeypatch: pytest.MonkeyPatch):
    value_units = exact.value_units

    def sly(values: np.ndarray, scale: AttentionScale) -> tuple[np.ndarray, np.ndarray]:
        units, exponents = value_units(values, scale)
        assert np.signbit(units).all(), "the control: these zeros are negative"
        return units.view(StartsWithTheFirstProduct), exponents

    monkeypatch.setattr(exact, "value_units", sly)
    ones = np.ones((3, 1, 2), np.float32)
    result = exact.attend(ones, ones, np.full((3, 1, 2), -0.0, np.float32), no_scale(1, 2))
    assert not result.any()
    assert not np.signbit(result).any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_attention_names_the_first_operand_that_is_not_finite(operand: int, bad: float):
    """A hidden infinity would make rows before it NaN, which a chunk that ends before it could not see."""
    operands = [np.ones((6, 2, 4), np.float32) for _ in range(3)]
    operands[operand][4, 1, 3] = bad
    name = ("queries", "keys", "values")[operand]
    with pytest.raises(NumericsError, match=rf"{name}\[4, 1, 3\] is {bad}, expected finite"):
        exact.attend(*operands, no_scale(2, 4))
    assert np.isfinite(exact.attend(*(x[:4] for x in operands), no_scale(2, 4))).all()


def test_weights_whose_rows_leave_too_few_bits_are_refused():
    weight = np.ones((1, 2**19), np.float32)
    with pytest.raises(NumericsError, match=r"huge\.weight: rows of 524288 weights sum to 2\*\*38 units .* least 16"):
        exact.prepare_matrix(weight, "huge.weight")


def test_a_matrix_of_another_arithmetic_is_refused():
    matrix = FLOAT64.prepare_matrix(np.ones((2, 2), np.float32), "w")
    with pytest.raises(NumericsError, match="without a grid"):
        exact.linear(np.ones((1, 2), np.float32), matrix)


def test_inputs_finer_than_proved_are_not_summed_exactly():
    """The control of the bound: with eight bits more, the same product is off."""
    rng = np.random.default_rng(0)
    weight, x = (rng.uniform(1.9, 2.0, (1, LARGEST_WIDTH)).astype(np.float32) for _ in range(2))
    matrix = exact.prepare_matrix(weight, "w")
    assert matrix.grid is not None
    fine = exact.round_to_grid(x.astype(np.float64) * 1.1, matrix.grid.activation_bits + 8)
    assert Fraction(float((fine @ matrix.values.T)[0, 0])) != integer_dot(fine[0], matrix.values[0])


@given(seeds, kinds, st.integers(1, 500))
def test_an_exact_sum_is_right_to_2_to_the_minus_52_and_ignores_order(seed, kind, terms):
    rng = np.random.default_rng(seed)
    x = np.abs(adversarial(rng, (2, terms), kind)).astype(np.float64)
    x *= x
    total = exact.exact_sum(x)
    assert total.tobytes() == exact.exact_sum(x[:, rng.permutation(terms)]).tobytes()
    for row, value in zip(x, total, strict=True):
        truth = sum((Fraction(float(v)) for v in row), Fraction(0))
        assert abs(Fraction(float(value)) - truth) <= truth * Fraction(1, 2**52)


def test_the_longest_sums_are_exact_and_longer_ones_are_refused():
    rng = np.random.default_rng(5)
    x = rng.uniform(0.9, 1.0, (1, exact.TERMS))
    truth = sum((Fraction(float(v)) for v in x[0]), Fraction(0))
    assert abs(Fraction(float(exact.exact_sum(x)[0])) - truth) <= truth * Fraction(1, 2**52)
    for part in (np.floor(x * 2.0**exact.TERM_BITS), np.rint(x * 2.0**exact.TERM_BITS)):
        assert int(part.sum()) == sum(int(v) for v in part[0]), "the high parts of the longest sum are exact"
    with pytest.raises(NumericsError, match="sum of 131073 terms"):
        exact.exact_sum(np.ones((1, exact.TERMS + 1)))


def no_scale(groups: int, head_dim: int) -> AttentionScale:
    return AttentionScale(np.zeros(head_dim, np.int32), np.zeros((groups, head_dim), np.int32))


def test_attention_over_the_longest_context_ignores_the_order_of_its_past():
    """The newest position sees all others, so permuting keys and values together must not change a bit."""
    rng = np.random.default_rng(7)
    keys = rng.normal(size=(LONGEST_CONTEXT, 1, 8)).astype(np.float32)
    values = adversarial(rng, (LONGEST_CONTEXT, 1, 8), "wide")
    query = (3 * rng.normal(size=(1, 2, 8))).astype(np.float32)
    order = rng.permutation(LONGEST_CONTEXT)
    straight = exact.attend(query, keys, values, no_scale(1, 8))
    assert straight.tobytes() == exact.attend(query, keys[order], values[order], no_scale(1, 8)).tobytes()
    assert np.isfinite(straight).all()


@given(seeds, kinds, kinds, st.sampled_from([1, 2, 6, 10, 64, 80, 128, 256]))
def test_attention_scores_equal_python_integers_on_the_same_grid(seed, q_kind, k_kind, head_dim):
    rng = np.random.default_rng(seed)
    queries, keys = adversarial(rng, (2, 2, head_dim), q_kind), adversarial(rng, (3, 1, head_dim), k_kind)
    scale = AttentionScale(rng.integers(-9, 9, head_dim).astype(np.int32), np.zeros((1, head_dim), np.int32))
    grid_queries, grid_keys = exact.query_key_grids(queries, keys, scale)
    scores = grid_queries @ grid_keys
    for head in range(2):
        for t in range(2):
            for c in range(3):
                truth = integer_dot(grid_queries[0, head, t], grid_keys[0, 0, :, c])
                assert Fraction(float(scores[0, head, t, c])) == truth


@pytest.mark.parametrize("head_dim", [2, 6, 32, 64, 80, 96, 128, 256])
def test_the_largest_attention_scores_of_a_head_are_exact(head_dim: int):
    rng = np.random.default_rng(head_dim)
    queries, keys = (rng.uniform(1.9, 2.0, (9, 1, head_dim)).astype(np.float32) for _ in range(2))
    grid_queries, grid_keys = exact.query_key_grids(queries, keys, no_scale(1, head_dim))
    scores = (grid_queries @ grid_keys)[0, 0]
    for t in range(9):
        for c in range(9):
            assert Fraction(float(scores[t, c])) == integer_dot(grid_queries[0, 0, t], grid_keys[0, 0, :, c])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 30.0])
def test_weighted_values_over_the_longest_context_equal_python_integers(kind: str, sharpness: float):
    """Both products, for flat and for peaked attention; and their terms, in absolute value, stay below 2**53."""
    rng = np.random.default_rng(13)
    values = adversarial(rng, (exact.TERMS, 1, 2), kind)
    units, exponents = exact.value_units(values, no_scale(1, 2))
    assert np.abs(units).max() <= 2**24
    scores = sharpness * rng.normal(size=(1, 1, 1, exact.TERMS))
    high, low, _ = exact.share_units(exact.elementary.exp(scores - scores.max()), exponents)
    for shares in (high, low):
        for channel in range(2):
            terms = [int(a) * int(u) for a, u in zip(shares.ravel(), units[0, 0, :, channel], strict=True)]
            assert sum(map(abs, terms)) < 2**53
            assert Fraction(float((shares @ units)[0, 0, 0, channel])) == sum(terms)
    assert sum(int(share) for share in high.ravel()) <= 2**28 + exact.TERMS


def test_the_constants_keep_the_bounds_that_the_docstrings_claim():
    assert exact.TERMS << exact.TERM_BITS == 1 << exact.SUM_BITS
    assert ((1 << exact.SHARE_BITS) + exact.TERMS) << exact.VALUE_BITS < 1 << exact.SUM_BITS
    assert exact.TERMS << (exact.LOW_SHARE_BITS - 1) << exact.VALUE_BITS < 1 << exact.SUM_BITS
    assert LONGEST_CONTEXT < exact.TERMS


@settings(max_examples=40)
@given(seeds, kinds, st.integers(1, 400), st.integers(1, 400))
def test_terms_of_zero_change_no_bit_of_a_sum(seed, kind, terms, more):
    rng = np.random.default_rng(seed)
    x = np.abs(adversarial(rng, (2, terms), kind)).astype(np.float64)
    padded = np.concatenate([x, np.zeros((2, more))], axis=1)[:, rng.permutation(terms + more)]
    assert exact.exact_sum(padded).tobytes() == exact.exact_sum(x).tobytes()
    if x.any(axis=1).all():
        assert exact.sum_exponent(padded).tolist() == exact.sum_exponent(x).tolist()
        assert (2.0 ** exact.sum_exponent(x)[:, 0] > x.sum(axis=1) * (1 - 2.0**-18)).all()


@settings(max_examples=60)
@given(seeds, kinds, st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 6, 8, 64]), st.integers(1, 40))
def test_attention_in_chunks_equals_attention_in_one_piece(seed, kind, groups, ratio, head_dim, context):
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(context, groups * ratio, head_dim)).astype(np.float32)
    keys = rng.normal(size=(context, groups, head_dim)).astype(np.float32)
    values = adversarial(rng, (context, groups, head_dim), kind)
    scale = no_scale(groups, head_dim)
    whole = exact.attend(queries, keys, values, scale)
    cuts = sorted({0, context, *rng.integers(0, context + 1, 3).tolist()})
    chunks = [exact.attend(queries[a:b], keys[:b], values[:b], scale) for a, b in itertools.pairwise(cuts)]
    assert whole.tobytes() == np.concatenate(chunks).tobytes()


@settings(max_examples=60)
@given(seeds, st.sampled_from(["normal", "outlier", "constant", "zeros"]), st.integers(1, 60))
def test_attention_is_as_close_to_float64_as_its_grids_promise(seed, kind, context):
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(context, 4, 16)).astype(np.float32)
    keys = rng.normal(size=(context, 2, 16)).astype(np.float32)
    values = adversarial(rng, (context, 2, 16), kind)
    scale = no_scale(2, 16)
    truth = FLOAT64.attend(*(a.astype(np.float64) for a in (queries, keys, values)), scale)
    error = np.abs(exact.attend(queries, keys, values, scale) - truth)
    assert error.max() <= 2.0**-20 * max(np.abs(values).max(), 1e-30)


def test_the_scale_of_an_attention_layer_changes_nothing_but_rounding():
    rng = np.random.default_rng(11)
    q_norm = (rng.normal(size=8) * np.exp2(rng.integers(-6, 6, 8))).astype(np.float32)
    k_norm = (rng.normal(size=8) * np.exp2(rng.integers(-6, 6, 8))).astype(np.float32)
    v_proj = (rng.normal(size=(16, 5)) * np.exp2(rng.integers(-8, 8, (16, 1)))).astype(np.float32)
    v_proj[3] = 0.0
    scale = exact.attention_scale(q_norm, k_norm, v_proj)
    assert (scale.keys[:4] == scale.keys[4:]).all(), "a rotated pair shares its scale"
    queries, keys = (rng.normal(size=(9, g, 8)).astype(np.float32) for g in (4, 2))
    values = (rng.normal(size=(9, 5)) @ v_proj.T).reshape(9, 2, 8).astype(np.float32)
    truth = FLOAT64.attend(*(a.astype(np.float64) for a in (queries, keys, values)), scale)
    error = np.abs(exact.attend(queries, keys, values, scale) - truth)
    assert (error <= 2.0**-20 * np.abs(values).max(axis=0).repeat(2, axis=0)).all()


@given(seeds, kinds, st.integers(1, 7), st.integers(1, 12))
def test_convolution_in_chunks_equals_convolution_in_one_piece(seed, kind, length, tokens):
    rng = np.random.default_rng(seed)
    u = adversarial(rng, (tokens, 5), kind)
    taps = rng.normal(size=(5, length)).astype(np.float32)
    bias = rng.normal(size=5).astype(np.float32)
    history = np.zeros((length - 1, 5), np.float32)
    with np.errstate(over="ignore"):
        whole = exact.convolve(history, u, taps, bias)
        rows = []
        for row in u:
            rows.append(exact.convolve(history, row[None], taps, bias))
            history = np.concatenate([history, row[None]])[1:] if length > 1 else history
    assert whole.tobytes() == np.concatenate(rows).tobytes()


@given(seeds, st.sampled_from(["normal", "wide", "outlier"]), st.integers(1, 7))
def test_a_convolution_is_the_true_sum_rounded_to_float32(seed, kind, length):
    """Against fractions: float64 keeps every product, so only cancellation beyond 2**-50 could show."""
    rng = np.random.default_rng(seed)
    window, taps = adversarial(rng, (length, 3), kind), adversarial(rng, (3, length), "normal")
    result = exact.convolve(window[:-1], window[-1:], taps)[0]
    for channel in range(3):
        terms = [
            Fraction(float(u)) * Fraction(float(w)) for u, w in zip(window[:, channel], taps[channel], strict=True)
        ]
        truth, size = sum(terms, Fraction(0)), sum(map(abs, terms), Fraction(0))
        assert abs(Fraction(float(result[channel])) - truth) <= abs(truth) / 2**24 + size / 2**50 + Fraction(1, 2**149)


def test_the_newest_tap_is_the_last():
    taps = np.array([[1.0, 10.0, 100.0]], np.float32)
    history = np.array([[1.0], [2.0]], np.float32)
    assert exact.convolve(history, np.array([[3.0], [4.0]], np.float32), taps).ravel().tolist() == [321.0, 432.0]


@given(seeds, kinds, st.integers(1, 90))
def test_a_norm_does_not_depend_on_the_order_of_its_channels(seed, kind, width):
    rng = np.random.default_rng(seed)
    x, weight = adversarial(rng, (3, width), kind), rng.normal(size=width).astype(np.float32)
    order = rng.permutation(width)
    straight = exact.rms_norm(x, weight, 1e-5)
    assert straight[:, order].tobytes() == exact.rms_norm(x[:, order], weight[order], 1e-5).tobytes()


@given(st.lists(st.floats(-104, 104, width=32), min_size=1, max_size=30))
def test_swiglu_is_float64s_rounded_once(gates):
    gate = np.array(gates, np.float32)
    up = np.ones_like(gate)
    truth = FLOAT64.swiglu(gate.astype(np.float64), up.astype(np.float64))
    assert np.abs(exact.swiglu(gate, up) - truth).max() <= np.spacing(np.abs(truth).max().astype(np.float32))


def test_log_softmax_sums_to_one_and_holds_tiny_probabilities():
    logits = np.concatenate([[30.0], np.zeros(65_535)]).astype(np.float32)
    logprobs = exact.log_softmax(logits)
    assert abs(np.exp(logprobs).sum() - 1.0) < 1e-12
    truth = -np.log1p(65_535 * np.exp(-30.0))
    assert abs(logprobs[0] - truth) < 1e-18 + 1e-7 * abs(truth)
