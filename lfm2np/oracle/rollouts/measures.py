"""How far two sides' log-probabilities lie apart: six measures that trainers log, or papers name.

`sampler` and `trainer` are float64 [N], nats of the sampled tokens; any two may be compared so, a side with the exact
values as well. With r = trainer - sampler, the importance ratio of a token is exp(r).

mean |difference|, max |difference|   TRL 1.16, GRPOTrainer: sampling/sampling_logp_difference/mean and /max
KL divergence (k3)                    mean of exp(r) - r - 1: Schulman, "Approximating KL divergence", 2020; verl 0.9,
                                      rollout_corr_helper.py: rollout_corr/k3_kl
mean ratio                            1 if both are distributions of the same tokens; verl: rollout_is_mean
effective sample size                 (sum of ratios)^2 / (N sum of their squares), a share of N: Kish, "Survey
                                      Sampling", 1965; verl: rollout_is_eff_sample_size
ratios outside [0.8, 1.2]             the share that PPO's clip at 0.2 cuts: Schulman et al., arXiv 1707.06347

Sums are rounded once (math.fsum); an infinite log-probability gives what IEEE arithmetic gives.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
LOW, HIGH = 0.8, 1.2


def measures(sampler: Float64, trainer: Float64) -> dict[str, float]:
    """By name. Both [N], N at least 1."""
    with np.errstate(over="ignore", invalid="ignore"):
        r = trainer - sampler
        ratios = np.exp(r)
        return {
            "mean |difference|": mean(np.abs(r)),
            "max |difference|": float(np.max(np.abs(r))),
            "KL divergence (k3)": mean(np.maximum(0.0, np.expm1(r) - r)),
            "mean ratio": mean(ratios),
            "effective sample size": mean(ratios) ** 2 / mean(ratios * ratios) if ratios.any() else 0.0,
            f"ratios outside [{LOW}, {HIGH}]": mean(np.where((ratios >= LOW) & (ratios <= HIGH), 0.0, 1.0)),
        }


def mean(values: NDArray[np.floating]) -> float:
    try:
        return math.fsum(values.tolist()) / len(values)
    except (OverflowError, ValueError):  # infinities of both signs, or too large a sum
        return float(np.mean(values))
