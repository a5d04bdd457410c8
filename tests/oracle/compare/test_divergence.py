"""KL divergence against arbitrary-precision arithmetic."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.arithmetic import exact
from lfm2np.oracle.compare.positions import divergence


def by_mpmath(base: np.ndarray, other: np.ndarray) -> float:
    """From the logits themselves."""
    with mpmath.workdps(60):
        a, b = ([mpmath.mpf(float(v)) for v in row] for row in (base, other))
        p, q = ([mpmath.exp(v) for v in row] for row in (a, b))
        sum_p, sum_q = mpmath.fsum(p), mpmath.fsum(q)
        return float(mpmath.fsum(v / sum_p * mpmath.log(v / sum_p / (w / sum_q)) for v, w in zip(p, q, strict=True)))


def found(base: np.ndarray, other: np.ndarray) -> float:
    base, other = (exact.log_softmax(side[None].astype(np.float32)) for side in (base, other))
    return float(divergence(base, other)[0])


def drawn(spread: float, size: float) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    base = random.normal(0.0, spread, 300).astype(np.float32)
    return [base, (base + random.normal(0.0, size, 300)).astype(np.float32)]


@pytest.mark.parametrize(
    ("base", "other"),
    [
        *(drawn(spread, size) for spread in (1.0, 8.0, 30.0) for size in (40.0, 3.0, 0.1, 1e-3, 1e-5)),
        ([0.0, -1.0, 900.0], [1200.0, 3.0, 2.0]),  # beyond the reach of an exponential
        ([0.0, 1.0, -900.0], [0.0, 2.0, -100.0]),
        ([0.0, 0.0, -600.0], [499.0, -499.0, 502.0]),
        ([3000.0, 0.0], [-3e30, 3e30]),
        ([3e38, -3e38], [-3e38, 3e38]),
    ],
)
def test_it_is_the_divergence_of_the_logits(base: Any, other: Any):
    base, other = np.array(base, np.float32), np.array(other, np.float32)
    assert found(base, other) == pytest.approx(by_mpmath(base, other), rel=1e-12, abs=1e-14)


@given(st.lists(st.tuples(st.floats(-2e3, 2e3, width=32), st.floats(-2e3, 2e3, width=32)), min_size=1, max_size=40))
def test_it_is_never_negative_and_depends_on_no_order(pairs: list[tuple[float, float]]):
    base, other = np.array(pairs, np.float32).T
    value = found(base, other)
    assert value >= 0.0 and np.isfinite(value) and found(base, base) == 0.0
    assert found(base[::-1].copy(), other[::-1].copy()) == value
