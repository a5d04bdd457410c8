"""KL divergence against arbitrary-precision arithmetic, down to where plain differences have no right digit."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.arithmetic import exact
from lfm2np.oracle.compare.divergence import beyond_linear, divergence, log_of_one_more


def by_mpmath(base: np.ndarray, other: np.ndarray) -> mpmath.mpf:
    """From the logits themselves."""
    with mpmath.workdps(60):
        a, b = ([mpmath.mpf(float(v)) for v in row] for row in (base, other))
        p, q = ([mpmath.exp(v) for v in row] for row in (a, b))
        sum_p, sum_q = mpmath.fsum(p), mpmath.fsum(q)
        return mpmath.fsum(v / sum_p * mpmath.log(v / sum_p / (w / sum_q)) for v, w in zip(p, q, strict=True))


def found(base: np.ndarray, other: np.ndarray) -> float:
    base, other = base[None].astype(np.float32), other[None].astype(np.float32)
    return float(divergence(base, exact.log_softmax(base), other)[0])


@pytest.mark.parametrize("size", [40.0, 3.0, 0.1, 1e-3, 1e-5])
@pytest.mark.parametrize("spread", [1.0, 8.0, 30.0])
def test_it_is_the_divergence_of_the_logits_at_any_size(size: float, spread: float):
    random = np.random.default_rng(3)
    base = (random.normal(0.0, spread, 300)).astype(np.float32)
    other = (base + random.normal(0.0, size, 300)).astype(np.float32)
    expected = by_mpmath(base, other)
    assert abs(found(base, other) / float(expected) - 1.0) < 1e-9


def test_one_rounding_of_a_logit_is_seen():
    """1e-15: where the plain sum of differences of log-probabilities is all rounding."""
    base = np.linspace(-3.0, 3.0, 50).astype(np.float32)
    other = base.copy()
    other[7] = np.nextafter(other[7], np.float32(9))
    expected = float(by_mpmath(base, other))
    assert 0.0 < expected < 1e-14
    assert abs(found(base, other) / expected - 1.0) < 1e-6
    probabilities = np.exp(exact.log_softmax(base[None])[0])
    plain = float(probabilities @ (exact.log_softmax(base[None])[0] - exact.log_softmax(other[None])[0]))
    assert abs(plain / expected - 1.0) > 1e-3  # the control


def test_the_same_logits_and_those_moved_together_have_none():
    base = np.linspace(-30.0, 9.0, 77).astype(np.float32)
    assert found(base, base) == 0.0
    assert found(base, base + np.float32(4.0)) < 1e-14


@pytest.mark.parametrize(
    ("base", "other"),
    [
        ([0.0, -1.0, 900.0], [1200.0, 3.0, 2.0]),
        ([0.0, 1.0, -900.0], [0.0, 2.0, -100.0]),
        ([0.0, 1.0, -100.0], [0.0, 2.0, -900.0]),
        ([0.0, -600.0], [0.0, 3.0]),
        ([0.0, 0.0, -600.0], [499.0, -499.0, 502.0]),
        ([3000.0, 0.0], [-3e30, 3e30]),
        ([3e38, -3e38], [-3e38, 3e38]),
    ],
)
def test_logits_beyond_the_reach_of_an_exponential(base: list[float], other: list[float]):
    one, two = np.array(base, np.float32), np.array(other, np.float32)
    assert abs(found(one, two) / float(by_mpmath(one, two)) - 1.0) < 1e-9


def test_what_is_smaller_than_a_sum_s_grid_is_nothing():
    for base, other in (([0.0, 684.0], [-685.0, 0.0]), ([0.0, 700.0], [1.0, 700.0]), ([0.0, 1400.0], [600.0, 1400.0])):
        assert found(np.array(base, np.float32), np.array(other, np.float32)) == 0.0


@pytest.mark.parametrize("far", [(-900.0, -100.0), (-100.0, -900.0)])
def test_a_token_far_away_takes_no_digit_from_the_others(far: tuple[float, float]):
    """Its share is 1e-44, and that of the others' one rounding 1e-15: a plain sum may be negative."""
    base = np.append(np.linspace(-3.0, 3.0, 50), far[0]).astype(np.float32)
    other = np.append(base[:50], np.float32(far[1]))
    other[7] = np.nextafter(other[7], np.float32(9))
    assert abs(found(base, other) / float(by_mpmath(base, other)) - 1.0) < 1e-6


@given(st.lists(st.tuples(st.floats(-2e3, 2e3, width=32), st.floats(-2e3, 2e3, width=32)), min_size=1, max_size=40))
def test_it_is_never_negative_and_depends_on_no_order(pairs: list[tuple[float, float]]):
    base, other = np.array(pairs, np.float32).T
    value = found(base, other)
    assert value >= 0.0 and np.isfinite(value)
    assert found(base[::-1].copy(), other[::-1].copy()) == value


def test_its_two_functions_keep_their_digits():
    with mpmath.workdps(60):
        for x in (*np.linspace(-3, 3, 61), 1e-8, -1e-8, 400.0, -400.0):
            expected = mpmath.exp(-mpmath.mpf(float(x))) - 1 + mpmath.mpf(float(x))
            ours = float(beyond_linear(np.array([x]))[0])
            assert abs(ours - expected) <= 1e-13 * expected, x
        for x in (0.0, 1e-300, 1e-18, 1e-9, 0.1, 0.39, 0.4, 0.41, 3.0, 1e200):
            expected = mpmath.log1p(mpmath.mpf(x))
            assert abs(float(log_of_one_more(np.array([x]))[0]) - expected) <= 1e-14 * expected
