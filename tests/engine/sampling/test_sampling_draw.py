"""Noise and draws: shares of the noise by fractions, draws by Pearson's test."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.engine.sampling.choice import choose, distribution, draw, request_seed, uniform
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError


@pytest.mark.parametrize("wrong", [-1, 2**64, True, 1.0])
def test_the_noise_takes_64_bit_words_only(wrong: Any):
    for place in range(4):
        with pytest.raises(RequestError):
            uniform(*[wrong if index == place else 0 for index in range(4)])


@given(st.lists(st.integers(0, 5) | st.integers(0, 2**45), min_size=1, max_size=8).filter(any), st.data())
def test_each_token_gets_the_noise_of_its_share(weights: list[int], data: st.DataObject):
    total = sum(weights)
    borders = [border for border in accumulate(weights[:-1], initial=0) if border < total]
    edge = data.draw(st.sampled_from(borders) | st.integers(0, total - 1))
    first = -(-(edge << 128) // total)  # the least noise that falls on `edge`
    noise = data.draw(st.sampled_from([first, max(first - 1, 0), 2**128 - 1, 0]) | st.integers(0, 2**128 - 1))
    token = draw(np.asarray(weights, np.int64), noise)
    below, above = sum(weights[:token]), sum(weights[: token + 1])
    assert Fraction(below, total) <= Fraction(noise, 2**128) < Fraction(above, total)


def p_value(counts: Sequence[int], probabilities: Sequence[Fraction]) -> float:
    """Pearson's test: how likely counts this far from the probabilities or farther are."""
    total = sum(counts)
    distance = sum(float((n - total * p) ** 2 / (total * p)) for n, p in zip(counts, probabilities, strict=True))
    return float(mpmath.gammainc((len(counts) - 1) / 2, distance / 2, regularized=True))


def test_draws_are_spread_as_the_distribution_says_over_positions_and_over_samples():
    """20,000 draws each. A sound sampler falls below 1e-6 once in a million seeds, one 20 % off in a token always."""
    row = np.asarray([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.0], np.float32)
    weights = distribution(row, SamplingParams(), [0], [], ())
    fair = [Fraction(int(w), int(weights.sum())) for w in weights]
    off = weights.copy()
    off[2] += off[2] // 5
    unfair = [Fraction(int(w), int(off.sum())) for w in off]
    for places in ([(0, position) for position in range(20_000)], [(sample, 7) for sample in range(20_000)]):
        drawn = [draw(weights, uniform(2024, *place)) for place in places]
        counts = np.bincount(drawn, minlength=len(row)).tolist()
        assert p_value(counts, fair) > 1e-6
        assert p_value(counts, unfair) < 1e-6, "the control: a distribution that is off is told apart"


def test_a_position_is_the_number_of_tokens_before_it():
    row, params = np.zeros(64, np.float32), SamplingParams()
    chosen = {choose(row, params, range(n), range(20 - n), (), 3, 1) for n in range(21)}
    assert len(chosen) == 1
    assert len({choose(row, params, [0] * n, [], (), 3, 1) for n in range(1, 40)}) > 10


def test_a_seed_of_zero_is_a_seed():
    assert request_seed(SamplingParams(seed=0), 1, "a") == 0
