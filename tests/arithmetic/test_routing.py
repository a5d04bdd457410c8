"""Every stated bound of routing.py against arbitrary precision; ties, order, and every row by itself."""

from __future__ import annotations

import functools
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from builders import MIXTURES, mixture
from hypothesis import given
from hypothesis import strategies as st
from operands import adversarial, kinds, seeds

import lfm2np
from lfm2np.arithmetic import exact, routing
from lfm2np.truth import integers, reference

mpmath.mp.prec = 200
LEAST = Fraction(routing.LEAST_SUM)  # the float64 nearest to 1e-6
SPECIALS = np.array([np.nan, np.inf, -np.inf], np.float32)


def scores_of(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Between 0 and 1, some so small that the 1e-6 beside their sum is felt, some 0."""
    values = rng.random(shape) * np.exp2(-rng.integers(0, 40, shape).astype(np.float64))
    return np.where(rng.random(shape) < 0.05, 0.0, values).astype(np.float32)


# --- sigmoid


def sigmoid_arguments() -> np.ndarray:
    rng = np.random.default_rng(1)
    spread = [np.linspace(-103.9, 20, 4001), 5 * rng.normal(size=3000), np.exp2(rng.uniform(-60, 6, 500))]
    every = np.concatenate([*spread, -spread[2], [0.0, -0.0, 88.0, 1e4, 3e38]])
    return every.astype(np.float32)


def test_a_sigmoid_is_the_true_one_rounded_once_but_for_2_to_the_minus_47() -> None:
    x = sigmoid_arguments()
    for argument, actual in zip(x, exact.sigmoid(x), strict=True):
        truth = 1 / (1 + mpmath.exp(-mpmath.mpf(float(argument))))
        rounding = max(truth * mpmath.mpf(2) ** -24, mpmath.mpf(2) ** -150)  # below 2**-126 steps are 2**-149
        assert abs(mpmath.mpf(float(actual)) - truth) <= rounding + truth * mpmath.mpf(2) ** -47, argument


def test_a_sigmoid_ends_at_nought_and_one_and_nan_stays() -> None:
    x = np.array([-np.inf, -3e38, -104.0, 17.5, np.inf, 0.0, -0.0, np.nan], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        actual = exact.sigmoid(x).tolist()
    assert actual[:7] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.5]
    assert np.isnan(actual[7])


# --- the choice


@given(seeds, st.integers(1, 40), st.integers(1, 4))
def test_the_best_are_those_of_a_brute_force_and_of_equal_ones_the_lowest(seed: int, experts: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    preferred = (rng.integers(0, levels + 1, (5, experts)) / 8).astype(np.float32)  # nearly all tie
    preferred[rng.random(preferred.shape) < 0.2] *= -0.0  # and -0 is 0
    count = int(rng.integers(1, experts + 1))
    brute = [sorted(range(experts), key=lambda expert: (-row[expert], expert))[:count] for row in preferred.tolist()]
    assert routing.top_k(preferred, count).tolist() == brute


def test_what_is_not_a_number_is_chosen_last() -> None:
    row = np.array([[np.nan, -np.inf, 1.0, np.nan, np.inf]], np.float32)
    assert routing.top_k(row, 5).tolist() == [[4, 2, 1, 0, 3]]


# --- weights


@given(seeds, st.integers(1, 12), st.booleans(), st.sampled_from([1.0, 2.5, 0.1, 1e6]))
def test_weights_are_the_true_ones_rounded_once_but_for_2_to_the_minus_50(
    seed: int, count: int, normalised: bool, factor: float
) -> None:
    scores = scores_of(np.random.default_rng(seed), (4, count))
    for row, weights in zip(scores, exact.routing_weights(scores, normalised, factor), strict=True):
        wide = [Fraction(float(score)) for score in row]
        divisor = sum(wide, LEAST) if normalised else Fraction(1)
        for score, weight in zip(wide, weights, strict=True):
            truth = score / divisor * Fraction(factor)
            slack = max(truth / 2**24, Fraction(1, 2**150)) + truth / 2**50
            assert abs(Fraction(float(weight)) - truth) <= slack


def test_a_mixture_is_added_best_expert_first() -> None:
    """1e16 + 1 - 1e16 is 0 in this order of float64."""
    outputs = np.array([[[1e16], [1.0], [-1e16]]], np.float32)
    for arithmetic in (exact, integers):
        assert arithmetic.combine_experts(outputs, np.ones((1, 3), np.float32)).tolist() == [[0.0]]
        assert arithmetic.combine_experts(outputs[:, [0, 2, 1]], np.ones((1, 3), np.float32)).tolist() == [[1.0]]


# --- whatever is computed together

TOKENS = 12
loaded = functools.cache(lambda name: lfm2np.load(mixture(name)))


@pytest.mark.slow
@given(
    name=st.sampled_from(sorted(MIXTURES)),
    seed=seeds,
    kind=kinds,
    groups=st.lists(st.integers(0, 3), min_size=TOKENS, max_size=TOKENS),
    spoilt=st.lists(st.integers(0, TOKENS - 1), max_size=2),
)
def test_a_row_of_a_mixture_has_the_same_bits_beside_whatever_rows(
    name: str, seed: int, kind: str, groups: list[int], spoilt: list[int]
) -> None:
    """Any grouping of a step's tokens, in any order; rows that are not finite spoil none but themselves."""
    rng, config = np.random.default_rng(seed), loaded(name).config
    weights = loaded(name).weights.layers[1].feed_forward
    x = adversarial(rng, (TOKENS, config.hidden_size), kind)
    for row in spoilt:
        x[row, rng.integers(config.hidden_size)] = rng.choice(SPECIALS)
    with np.errstate(all="ignore"):
        alone = [reference.mixture_of_experts(weights, config, exact, x[row : row + 1])[0] for row in range(TOKENS)]
        for group in set(groups):
            rows = rng.permutation([row for row in range(TOKENS) if groups[row] == group])
            together = reference.mixture_of_experts(weights, config, exact, x[rows])
            for row, actual in zip(rows, together, strict=True):
                assert row in spoilt or actual.tobytes() == alone[row].tobytes(), row
