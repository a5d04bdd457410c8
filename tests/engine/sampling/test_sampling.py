"""Sampling at its edges; against its definition, in fractions: internal_properties/sampling.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mpmath
import numpy as np
import plain
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.engine.sampling.choice import distribution, draw, integer_weights, process
from lfm2np.engine.sampling.params import SamplingParams

WORDS = st.integers(0, 2**64 - 1)


def only(row: Sequence[float], **values: Any) -> list[int]:
    """Ids that can be drawn."""
    weights = distribution(np.asarray(row, np.float32), SamplingParams(**values), [], [], ())
    return np.flatnonzero(weights).tolist()


def test_min_p_compares_with_the_likeliest_and_keeps_equality():
    assert only([2, 2, 1.999], min_p=1.0) == [0, 1]
    row = np.asarray([0.0, -1.0], np.float32)
    ratio = int(distribution(row, SamplingParams(), [], [], ())[1]) / 2**45
    assert only(row.tolist(), min_p=ratio) == [0, 1]
    assert only(row.tolist(), min_p=math.nextafter(ratio, 1)) == [0]


def test_the_profiles_differ_in_whether_min_p_comes_before_top_p():
    """log 5, log 3, log 1, log 1: min_p = 0.5 leaves 5 and 3 of ten; 5/8 >= 0.6 is enough, 5/10 is not."""
    row = np.log([5.0, 3.0, 1.0, 1.0]).tolist()
    assert only(row, min_p=0.5, top_p=0.6, profile="vllm") == [0]
    assert only(row, min_p=0.5, top_p=0.6, profile="transformers") == [0, 1]


@pytest.mark.parametrize("extreme", [5e-324, 1e-300, 1e300, 1.7e308])
def test_extreme_values_are_greedy_or_uniform_and_give_no_nan(extreme: float):
    row = np.asarray([-3e38, 1.0, 3e38, 3e38], np.float32)
    for profile in ("vllm", "transformers"):
        params = SamplingParams(temperature=extreme, profile=profile)
        expected = [0, 0, 2**45, 2**45] if extreme < 1.0 else [2**45] * 4
        assert distribution(row, params, [0], [], ()).tolist() == expected
    row = np.asarray([-3e38, -1.0, 0.0, 1.0, 3e38], np.float32)
    params = SamplingParams(repetition_penalty=extreme, logit_bias={0: -1.7e308, 4: 1.7e308}, frequency_penalty=2.0)
    assert not np.isnan(process(row, params, range(5), [0, 1, 1], ())).any()
    assert 2**45 <= distribution(row, params, range(5), [0, 1, 1], ()).sum() <= 5 * 2**45


@pytest.mark.slow
@given(st.lists(st.floats(-50, 0), min_size=1, max_size=20))
def test_weights_are_the_exponential_in_units_of_the_grid(values: list[float]):
    weights = integer_weights(np.asarray([0.0, *values]))
    assert weights[0] == 2**45
    with mpmath.workprec(200):
        for value, weight in zip(values, weights[1:], strict=True):
            assert abs(mpmath.exp(value) * 2**45 - int(weight)) <= 0.5 + 2.0**-5


def test_the_largest_vocabulary_is_summed_without_overflow():
    row = np.zeros(2**17, np.float32)
    weights = distribution(row, SamplingParams(top_p=0.75), [0], [], ())
    assert int(weights.sum()) == 3 * 2**60 and np.flatnonzero(weights)[-1] == 3 * 2**15 - 1
    assert draw(distribution(row, SamplingParams(), [0], [], ()), 2**128 - 1) == 2**17 - 1


# --- noise


@given(seed=WORDS, sample_index=WORDS, position=WORDS, purpose=WORDS)
def test_plain_noise_is_numpys_philox_block(seed: int, sample_index: int, position: int, purpose: int) -> None:
    """Which the properties compare ours with; in whole numbers, against NumPy's generator of the same name."""
    key, counter = (np.array(words, np.uint64) for words in ([seed, sample_index], [0, position, purpose, 0]))
    generator = np.random.Philox(key=key, counter=counter)  # counts up first
    words = [int(word) for word in generator.random_raw(4)]
    assert plain.noise_words(seed, sample_index, position, purpose) == tuple(words)
    assert plain.uniform_noise(seed, sample_index, position, purpose) == words[0] * 2**64 + words[1]


@given(st.lists(st.integers(0, 5) | st.integers(0, 2**45), min_size=1, max_size=8).filter(any), st.data())
def test_each_token_gets_the_noise_of_its_share(weights: list[int], data: st.DataObject) -> None:
    """To the last one: the least noise of a token's share, and the one before it."""
    total = sum(weights)
    edge = data.draw(st.sampled_from([each for each in accumulate(weights[:-1], initial=0) if each < total]))
    first = -(-(edge << 128) // total)
    for noise in (first, max(first - 1, 0)):
        token = draw(np.asarray(weights, np.int64), noise)
        below = sum(weights[:token])
        assert below * 2**128 <= noise * total < (below + weights[token]) * 2**128
