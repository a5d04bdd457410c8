"""The measures of simple numbers; those that TRL and verl logged: test_renamed_records.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.oracle.rollouts.measures import measures


def test_the_simple_case() -> None:
    """One token of probability 1/2 by the sampler and 1/4 by the trainer, one of 1/2 by both."""
    half, quarter = math.log(0.5), math.log(0.25)
    assert measures(np.array([half, half]), np.array([quarter, half])) == {
        "mean |difference|": pytest.approx(math.log(2) / 2),
        "max |difference|": pytest.approx(math.log(2)),
        "KL divergence (k3)": pytest.approx((0.5 + math.log(2) - 1) / 2),
        "mean ratio": pytest.approx(0.75),
        "effective sample size": pytest.approx(0.75**2 / 0.625),
        "ratios outside [0.8, 1.2]": 0.5,
    }


@given(st.lists(st.tuples(*[st.floats(-50, 0)] * 2), min_size=1, max_size=20))
def test_measures_have_their_ranges_and_sides_that_agree_differ_by_nothing(pairs: list[tuple[float, float]]) -> None:
    sampler, trainer = (np.array(side) for side in zip(*pairs, strict=True))
    figures = measures(sampler, trainer)
    assert figures["KL divergence (k3)"] >= 0.0 and 0.0 <= figures["ratios outside [0.8, 1.2]"] <= 1.0
    assert 0.0 <= figures["effective sample size"] <= 1.0 + 1e-12
    assert [*measures(sampler, sampler).values()] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def test_a_token_outside_the_trainer_s_kept_set_is_no_crash() -> None:
    figures = measures(np.array([-1.0, -2.0]), np.array([-1.0, -math.inf]))
    assert figures["KL divergence (k3)"] == math.inf
    assert (figures["mean ratio"], figures["ratios outside [0.8, 1.2]"]) == (0.5, 0.5)
