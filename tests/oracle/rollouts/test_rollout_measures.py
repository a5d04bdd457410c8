"""The measures against the code of the projects that define them, and what they are of simple numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.oracle.rollouts.measures import MEASURES, importance_ratios, measures

# Made by fixtures/rollouts/measures_of.py, which calls verl's functions, and those of ms-swift, NeMo RL, prime-rl and
# slime: one batch, with a token beyond every clamp.
MEASURED: dict[str, Any] = json.loads(
    Path(__file__).parents[3].joinpath("fixtures", "rollouts", "measures.json").read_text(encoding="utf-8")
)
DIVISOR = 1e-8  # verl and NeMo RL add it to the count of tokens, at least 1


def test_every_measure_is_that_of_its_project() -> None:
    ours = measures(MEASURED["sampler"], MEASURED["trainer"], MEASURED["lengths"])
    for name, value in MEASURED["measures"].items():
        scale = abs(value) + 1.0 if name.startswith("rollout_corr/chi2") else abs(value)
        log_ppl = "log_ppl" in name or name.endswith("_ppl")
        tolerance = (
            (3.0 * DIVISOR if log_ppl else DIVISOR) * scale if "rollout_correction" not in name else 1e-14 * scale
        )
        assert abs(ours[name] - value) <= tolerance, name


def test_all_measures_but_trl_s_and_the_shares_are_among_them() -> None:
    """TRL's are compared with its own log in test_rollout_converters.py."""
    others = set(MEASURES) - set(MEASURED["measures"])
    assert all(name.startswith(("sampling/", "share of ratios")) for name in others)
    assert len(MEASURED["measures"]) == 36 and len(others) == 7


def test_the_simple_case() -> None:
    """One token of probability 1/2 by the sampler and 1/4 by the trainer, one of 1/2 by both, in two answers."""
    half, quarter = math.log(0.5), math.log(0.25)
    figures = measures([half, half], [quarter, half], [1, 1])
    assert figures["rollout_corr/kl"] == pytest.approx(math.log(2) / 2)
    assert figures["rollout_corr/k3_kl"] == pytest.approx((0.5 + math.log(2) - 1) / 2)
    assert figures["rollout_corr/training_ppl"] == pytest.approx(3.0)
    assert figures["rollout_corr/rollout_ppl"] == pytest.approx(2.0)
    assert figures["rollout_corr/ppl_ratio"] == pytest.approx(1.5)
    assert figures["rollout_corr/chi2_token"] == pytest.approx(-3 / 8)
    assert figures["training/rollout_probs_diff_mean"] == pytest.approx(1 / 8)
    assert figures["token_mult_prob_error"] == pytest.approx(1.5)
    assert figures["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert figures["share of ratios outside [0.9, 1.1]"] == figures["share of ratios outside [0.8, 1.2]"] == 0.5
    assert math.isnan(figures["training/rollout_actor_probs_pearson_corr"])  # the sampler has one value only


def test_trl_s_ratio_is_of_whole_answers_and_0_above_3() -> None:
    sampler, trainer = np.zeros(4), np.log([2.0, 2.0, 0.25, 1.0])
    assert importance_ratios(sampler, trainer, [2, 2]).tolist() == pytest.approx([0.0, 0.25])


@pytest.mark.parametrize("lengths", [[], [1], [3], [2, 0], [1, 2]])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        measures([-1.0, -2.0], [-1.0, -2.0], lengths)


LOGPROBS = st.lists(st.tuples(*[st.floats(-50, 0)] * 2), min_size=1, max_size=20)


@given(LOGPROBS, st.integers(1, 20))
def test_sides_that_agree_differ_by_nothing(pairs: list[tuple[float, float]], first: int) -> None:
    values = [sampler for sampler, _ in pairs]
    lengths = [len(values)] if first >= len(values) else [first, len(values) - first]
    figures = measures(values, values, lengths)
    no_difference = {"sampling/importance_sampling_ratio", "ppl_ratio", "token_mult_prob_error"}
    for name, value in figures.items():
        if name.endswith(("training_ppl", "rollout_ppl", "log_ppl", "pearson_corr")):
            continue
        if name.endswith("_std") and len(values) == 1:
            assert math.isnan(value)
        else:
            expected = 1.0 if any(word in name for word in no_difference) else 0.0
            assert value == pytest.approx(expected, abs=1e-15), name


@given(LOGPROBS)
def test_k3_is_never_negative_and_shares_are_shares(pairs: list[tuple[float, float]]) -> None:
    sampler, trainer = zip(*pairs, strict=True)
    figures = measures(sampler, trainer, [len(pairs)])
    for name, value in figures.items():
        if name.endswith(("k3_kl", "gen_kl_error", "policy_kl_error", "mismatch_kl/all/mean")):
            assert value >= 0.0, name
        if name.startswith("share"):
            assert 0.0 <= value <= 1.0


def test_a_token_outside_the_trainer_s_kept_set_is_no_crash() -> None:
    figures = measures([-1.0, -2.0], [-1.0, -math.inf], [2])
    assert figures["rollout_corr/kl"] == math.inf
    assert figures["rollout_corr/chi2_token"] == pytest.approx(-0.5)
    assert figures["sampling/importance_sampling_ratio/mean"] == 0.0
    assert figures["share of ratios outside [0.8, 1.2]"] == 0.5
    assert math.isnan(measures([-math.inf], [-math.inf], [1])["rollout_corr/kl"])
