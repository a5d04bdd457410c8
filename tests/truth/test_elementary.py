"""Every stated bound of elementary.py against arbitrary-precision arithmetic (mpmath, 200 bits)."""

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.errors import NumericsError
from lfm2np.truth import elementary
from lfm2np.truth.rope import Rope, angles, inverse_frequencies

RNG = np.random.default_rng(20261120)
mpmath.mp.prec = 200


def relative_error(value: float, truth: mpmath.mpf) -> float:
    return float(abs((mpmath.mpf(float(value)) - truth) / truth))


def exp_arguments() -> np.ndarray:
    return np.concatenate(
        [
            np.linspace(-708.39, 709.78, 4001),
            RNG.normal(size=3000) * 8,
            -np.exp2(RNG.uniform(-60, 9, 1000)),
            np.array([0.0, -0.0, 5e-324, -5e-324, 2.0**-53, -(2.0**-53)]),
            (np.arange(-1000, 1000) + 0.5) * float(mpmath.log(2)) * 0.7,  # near the ends of the reduced range
        ]
    )


@pytest.mark.slow
def test_exp_is_within_2_to_the_minus_50_wherever_its_result_is_normal():
    x = exp_arguments()
    errors = [relative_error(y, mpmath.exp(mpmath.mpf(float(a)))) for a, y in zip(x, elementary.exp(x), strict=True)]
    assert max(errors) < 2.0**-50


def test_exp_underflows_gradually_and_then_to_zero():
    x = np.concatenate([np.linspace(-746, -708.4, 2000), [-745.1332191019411, -745.1332191019412]])
    for a, y in zip(x, elementary.exp(x), strict=True):
        assert abs(mpmath.mpf(float(y)) - mpmath.exp(mpmath.mpf(float(a)))) <= mpmath.mpf(2) ** -1074
    assert elementary.exp(np.array([-746.0, -1e300, -np.inf])).tolist() == [0.0, 0.0, 0.0]


def test_exp_of_either_zero_is_one_and_of_nan_is_nan_and_of_large_arguments_is_finite():
    one, also_one, nan, large, infinite = elementary.exp(np.array([0.0, -0.0, np.nan, 1e9, np.inf]))
    assert (one, also_one) == (1.0, 1.0)
    assert np.isnan(nan)
    assert np.isfinite([large, infinite]).all()


@pytest.mark.slow
@given(st.lists(st.floats(), max_size=30), st.integers(1, 12))
def test_exp_of_each_number_is_its_own_in_whatever_block_it_stands(x: list[float], block: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementary, "BLOCK", block)
        actual = elementary.exp(np.array(x))
    alone = [elementary.exp(np.array(value)) for value in x]
    assert all(value.shape == () for value in alone)
    assert np.array_equal(actual, np.array(alone), equal_nan=True)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (elementary.BLOCK + 1,), (3, elementary.BLOCK - 1)])
def test_exp_keeps_shapes_and_its_argument_and_takes_views(shape: tuple[int, ...]):
    x = 1000 * RNG.normal(size=shape)
    before = x.copy()
    actual = elementary.exp(x)
    assert actual.shape == shape and np.array_equal(x, before)
    assert np.array_equal(elementary.exp(x.T), actual.T)
    assert np.array_equal(elementary.exp(x.astype(np.float32)), elementary.exp(x.astype(np.float32).astype(np.float64)))
    if len(shape) == 2:
        assert np.array_equal(elementary.exp(x[:, ::2]), actual[:, ::2])


def log_arguments() -> np.ndarray:
    return np.concatenate(
        [
            np.exp2(RNG.uniform(-1022, 1023, 3000)),
            np.exp2(RNG.uniform(-2, 2, 3000)),
            1.0 + RNG.normal(size=2000) * 1e-9,
            1.0 + np.arange(1, 40) * 2.0**-52,
            np.arange(2.0, 2000.0),
            np.array([np.finfo(np.float64).tiny, np.finfo(np.float64).max, 0.5, 2.0, np.sqrt(0.5), np.sqrt(2.0)]),
        ]
    )


@pytest.mark.slow
def test_log_is_within_2_to_the_minus_49():
    x = log_arguments()
    x = x[x != 1.0]
    errors = [relative_error(y, mpmath.log(mpmath.mpf(float(a)))) for a, y in zip(x, elementary.log(x), strict=True)]
    assert max(errors) < 2.0**-49


def test_log_of_one_is_exactly_zero():
    assert elementary.log(np.array([1.0])).tolist() == [0.0]


def angle_arguments() -> np.ndarray:
    positions = np.concatenate([np.arange(0, 3000), RNG.integers(0, 128_001, 300), [127_999, 128_000, 2**20 - 1]])
    rotary = [angles(positions, 64, Rope(theta))[:, ::5].ravel() for theta in (1e4, 1e6, 5e6)]
    near_multiples = (np.arange(1, 3000) * float(mpmath.pi / 2)).astype(np.float32)
    tiny = np.array([0.0, 1e-45, 1e-38, 1e-10, 1e-4, 0.7853981, 0.78539819], np.float32)
    odd = np.arange(1, 2**20, 2) * (np.pi / 2)
    odd = odd[odd < 2**20]
    away = np.abs(odd.astype(np.float32) - odd)
    assert away.min() < 1e-7
    worst = [odd.astype(np.float32)[away.argmin()]]  # the worst cancellation of all float32 angles
    every = np.concatenate([rng[RNG.integers(0, rng.size, 3000)] for rng in rotary] + [near_multiples, tiny, worst])
    return np.concatenate([every, -every[::7]]).astype(np.float32)


@pytest.mark.slow
def test_cos_and_sin_are_within_2_to_the_minus_49_up_to_position_2_to_the_20():
    x = angle_arguments()
    cos, sin = elementary.cos_sin(x)
    for a, c, s in zip(x, cos, sin, strict=True):
        angle = mpmath.mpf(float(a))
        assert relative_error(c, mpmath.cos(angle)) < 2.0**-49
        assert a == 0.0 or relative_error(s, mpmath.sin(angle)) < 2.0**-49


def test_the_sine_of_zero_keeps_its_sign():
    cos, sin = elementary.cos_sin(np.array([0.0, -0.0], np.float32))
    assert cos.tolist() == [1.0, 1.0]
    assert np.signbit(sin).tolist() == [False, True]


@pytest.mark.parametrize("theta", [1e4, 1e6, 5e6, 123456.0])
@pytest.mark.parametrize("head_dim", [2, 6, 10, 64, 128])
def test_inverse_frequencies_are_the_float32_recipe_with_a_correctly_rounded_power(head_dim: int, theta: float):
    for i, value in enumerate(inverse_frequencies(head_dim, Rope(theta))):
        power = np.float32(2 * i) / np.float32(head_dim)
        scale = np.float32(mpmath.mpf(theta) ** mpmath.mpf(float(power)))
        assert value == np.float32(1.0) / scale


def test_positions_beyond_the_proved_range_are_refused():
    with pytest.raises(NumericsError, match="position 1048576: rotary angles are computed below"):
        angles(np.array([2**20]), 64, Rope(1e6))
