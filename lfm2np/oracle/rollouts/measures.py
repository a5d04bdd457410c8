"""How far two sides' log-probabilities lie apart, by the measures of the projects that train on rollouts.

Everywhere `sampler` and `trainer` are float64 [T], the log-probabilities in nats of the sampled tokens of all answers,
one answer after the other, and `lengths` says how many tokens each answer has: their sum is T, none is 0. Tokens that
were not sampled (masked) are not among them. Any two may be compared so: a side with the truth as well.

The formulas, clamps and reductions are those of the sources named in MEASURES; the projects compute them in float32,
here it is float64, and sums are rounded once (math.fsum). What they add to a divisor lest it be 0 (1e-8) is left out:
float32 drops it next to a count, too. A project's number is that of one batch, averaged over devices by their mean;
here all answers are one batch on one device. An infinite log-probability gives what IEEE arithmetic gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Measure = Callable[[Array, Array, Sequence[int]], float]
CLAMP = 20.0  # SAFETY_BOUND of verl and ms-swift, in nats
SWIFT_K3_CLAMP = 10.0
TRL_CLIP_MAX = 3.0  # default of GRPOConfig.vllm_importance_sampling_clip_max
Reduce = Callable[[Array], float]


def measures(sampler: ArrayLike, trainer: ArrayLike, lengths: Sequence[int]) -> dict[str, float]:
    """Every measure of the table, by name. ValueError for arrays and lengths that do not fit together."""
    a, b = np.asarray(sampler, np.float64), np.asarray(trainer, np.float64)
    if a.ndim != 1 or a.shape != b.shape or sum(lengths) != len(a) or min(lengths, default=0) < 1:
        raise ValueError(
            f"sampler {a.shape}, trainer {b.shape}, lengths {list(lengths)[:10]}: expected two arrays [T] and lengths, "
            "at least 1 each, that sum to T"
        )
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return {name: measure(a, b, lengths) for name, (measure, _) in MEASURES.items()}


def logp_difference(reduce: Reduce) -> Measure:
    """TRL's sampling_logp_difference: |trainer - sampler| over the tokens, NaN left out."""

    def measure(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
        difference = np.abs(trainer - sampler)
        known = difference[~np.isnan(difference)]
        return reduce(known) if len(known) else 0.0

    return measure


def importance_ratios(sampler: Array, trainer: Array, lengths: Sequence[int]) -> Array:
    """TRL's vllm_importance_sampling_ratio in its default mode, sequence_mask: of each answer exp of the sum of
    trainer - sampler, in which NaN counts as 0; 0 where it is above 3.
    """
    ratios = np.exp(_by_answer(_sum, np.nan_to_num(trainer - sampler, nan=0.0), lengths))
    return np.where(ratios > TRL_CLIP_MAX, 0.0, ratios)


def importance_ratio(reduce: Reduce) -> Measure:
    """TRL's importance_sampling_ratio."""
    return lambda sampler, trainer, lengths: reduce(importance_ratios(sampler, trainer, lengths))


def abs_difference_of_answers(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """slime: the mean over answers of an answer's mean |trainer - sampler|."""
    return _mean(_by_answer(_mean, np.abs(trainer - sampler), lengths))


def kl(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """The mean over tokens of sampler - trainer (k1)."""
    return _mean(sampler - trainer)


def k3(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """The mean over tokens of exp(r) - r - 1, r = trainer - sampler."""
    return _mean(_k3(trainer - sampler))


def reverse_k3(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """The same with r = sampler - trainer."""
    return _mean(_k3(sampler - trainer))


def clamped_k3(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """The same as k3, with r within 20 nats and each token's value at most 10."""
    return _mean(np.clip(_k3(np.clip(trainer - sampler, -CLAMP, CLAMP)), -SWIFT_K3_CLAMP, SWIFT_K3_CLAMP))


def perplexity(side: str, is_log: bool) -> Measure:
    """The mean over answers of exp(-mean of the answer's log-probabilities by that side), or of its logarithm."""

    def measure(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
        logarithms = -_by_answer(_mean, sampler if side == "sampler" else trainer, lengths)
        return _mean(logarithms if is_log else np.exp(logarithms))

    return measure


def log_ppl_difference(reduce: Reduce) -> Measure:
    """Of each answer, mean of the sampler's log-probabilities - mean of the trainer's."""
    return lambda sampler, trainer, lengths: reduce(_log_ppl_differences(sampler, trainer, lengths))


def log_ppl_abs_difference(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """The mean over answers of that difference's size."""
    return _mean(np.abs(_log_ppl_differences(sampler, trainer, lengths)))


def ppl_ratio(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """The mean over answers of the exponential of that difference: perplexity of trainer / of sampler."""
    return _mean(np.exp(_log_ppl_differences(sampler, trainer, lengths)))


def chi2_token(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """The mean over tokens of exp(r)**2, less 1; r = trainer - sampler within 20 nats."""
    return _mean(np.exp(np.clip(trainer - sampler, -CLAMP, CLAMP)) ** 2) - 1.0


def chi2_of_products(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """verl: the mean over answers of exp(2 r), less 1; r is the answer's sum of trainer - sampler, within 20 nats."""
    total = np.clip(_by_answer(_sum, trainer - sampler, lengths), -CLAMP, CLAMP)
    return _mean(np.exp(2.0 * total)) - 1.0


def chi2_of_geometric_means(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """ms-swift: the same with the answer's mean for its sum."""
    mean = np.clip(_by_answer(_mean, trainer - sampler, lengths), -CLAMP, CLAMP)
    return _mean(np.exp(mean) ** 2) - 1.0


def probs_difference(reduce: Reduce) -> Measure:
    """verl's rollout_probs_diff: |exp(trainer) - exp(sampler)| over the tokens."""
    return lambda sampler, trainer, lengths: reduce(np.abs(np.exp(trainer) - np.exp(sampler)))


def pearson(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """The correlation of probabilities (not their logarithms) over the tokens; NaN where a side has only one value."""
    a, b = (np.exp(values) - _mean(np.exp(values)) for values in (sampler, trainer))
    squares = _sum(a * a) * _sum(b * b)
    return max(-1.0, min(1.0, _sum(a * b) / math.sqrt(squares))) if squares > 0.0 else math.nan


def mean_exp_abs_difference(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """NeMo RL's token_mult_prob_error: the mean over tokens of exp|trainer - sampler|."""
    return _mean(np.exp(np.abs(trainer - sampler)))


def js_divergence(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
    """NeMo RL: the mean over tokens of half k3 of trainer and of sampler from the mixture of both."""
    mixture = np.log(0.5 * np.exp(trainer) + 0.5 * np.exp(sampler))
    return _mean(0.5 * _k3(trainer - mixture) + 0.5 * _k3(sampler - mixture))


def share_outside(low: float, high: float) -> Measure:
    """The share of tokens whose ratio exp(trainer - sampler) is below `low` or above `high`."""

    def measure(sampler: Array, trainer: Array, lengths: Sequence[int]) -> float:
        ratios = np.exp(trainer - sampler)
        return int(np.count_nonzero(~((ratios >= low) & (ratios <= high)))) / len(ratios)

    return measure


def _k3(log_ratios: Array) -> Array:
    """exp(r) - r - 1 without its cancellation near 0."""
    values = np.expm1(log_ratios) - log_ratios
    small = np.abs(log_ratios) < 1e-3
    r = np.where(small, log_ratios, 0.0)
    return np.where(small, r * r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0))), values)


def _log_ppl_differences(sampler: Array, trainer: Array, lengths: Sequence[int]) -> Array:
    return _by_answer(_mean, sampler, lengths) - _by_answer(_mean, trainer, lengths)


def _by_answer(reduce: Reduce, values: Array, lengths: Sequence[int]) -> Array:
    """[answers], one value each."""
    ends = np.cumsum(np.asarray(lengths))
    return np.array([reduce(values[end - length : end]) for end, length in zip(ends, lengths, strict=True)])


def _sum(values: Array) -> float:
    """Rounded once; what is not finite, or overflows, as NumPy has it."""
    try:
        return math.fsum(values.tolist())
    except (OverflowError, ValueError):
        return float(np.sum(values))


def _mean(values: Array) -> float:
    return _sum(values) / len(values)


def _std(values: Array) -> float:
    """With the divisor count - 1, as torch.std has it; NaN of a single value."""
    if len(values) < 2:
        return math.nan
    return math.sqrt(_sum((values - _mean(values)) ** 2) / (len(values) - 1))


def _max(values: Array) -> float:
    return float(np.max(values))


def _min(values: Array) -> float:
    return float(np.min(values))


TRL = "huggingface/trl 1.16.0, trl/trainer/grpo_trainer.py, GRPOTrainer._generate_and_score_completions"
SLIME = (
    "THUDM/slime 0.3.1, slime/backends/megatron_utils/loss.py, policy_loss_function, and cp_utils.py, "
    "get_sum_of_sample_mean, with one answer a rollout; vllm-project/vime has it from there"
)
VERL = "volcengine/verl 0.9.1, verl/trainer/ppo/rollout_corr_helper.py, compute_offpolicy_metrics"
VERL_DEBUG = "volcengine/verl 0.9.1, verl/utils/debug/metrics.py, calculate_debug_metrics"
SWIFT = (
    "modelscope/ms-swift 4.6.0.dev0 (3602360), swift/rlhf_trainers/grpo_trainer.py, "
    "GRPOTrainer._compute_rollout_offpolicy_metrics"
)
NEMO = "NVIDIA-NeMo/RL (7ea279a), nemo_rl/algorithms/loss/loss_functions.py, ClippedPGLossFn.__call__"
PRIME = (
    "PrimeIntellect-ai/prime-rl 0.8.0 (559b447), src/prime_rl/trainer/rl/loss.py, "
    "compute_importance_ratio_and_mismatch_kl"
)
SHARES = "huggingface/trl issue 6789, its tables"


def _off_policy(prefix: str, source: str, changed: dict[str, Measure]) -> dict[str, tuple[Measure, str]]:
    """What verl and ms-swift, which has it from verl, have in common, and what one has otherwise."""
    common: dict[str, Measure] = {
        "kl": kl,
        "k3_kl": k3,
        "training_ppl": perplexity("trainer", is_log=False),
        "training_log_ppl": perplexity("trainer", is_log=True),
        "rollout_ppl": perplexity("sampler", is_log=False),
        "rollout_log_ppl": perplexity("sampler", is_log=True),
        "log_ppl_diff": log_ppl_difference(_mean),
        "log_ppl_abs_diff": log_ppl_abs_difference,
        "log_ppl_diff_max": log_ppl_difference(_max),
        "log_ppl_diff_min": log_ppl_difference(_min),
        "ppl_ratio": ppl_ratio,
        "chi2_token": chi2_token,
        "chi2_seq": chi2_of_products,
    }
    return {f"{prefix}/{name}": (measure, source) for name, measure in {**common, **changed}.items()}


# By the name under which the project logs it: the function, and where the formula stands.
MEASURES: dict[str, tuple[Measure, str]] = {
    "sampling/sampling_logp_difference/mean": (logp_difference(_mean), TRL),
    "sampling/sampling_logp_difference/max": (logp_difference(_max), TRL),
    "sampling/importance_sampling_ratio/min": (importance_ratio(_min), TRL),
    "sampling/importance_sampling_ratio/mean": (importance_ratio(_mean), TRL),
    "sampling/importance_sampling_ratio/max": (importance_ratio(_max), TRL),
    "train/train_rollout_logprob_abs_diff": (abs_difference_of_answers, SLIME),
    **_off_policy("rollout_corr", VERL, {}),
    "training/rollout_probs_diff_max": (probs_difference(_max), VERL_DEBUG),
    "training/rollout_probs_diff_mean": (probs_difference(_mean), VERL_DEBUG),
    "training/rollout_probs_diff_std": (probs_difference(_std), VERL_DEBUG),
    "training/rollout_actor_probs_pearson_corr": (pearson, VERL_DEBUG),
    **_off_policy("rollout_correction", SWIFT, {"k3_kl": clamped_k3, "chi2_seq": chi2_of_geometric_means}),
    "token_mult_prob_error": (mean_exp_abs_difference, NEMO),
    "gen_kl_error": (k3, NEMO),
    "policy_kl_error": (reverse_k3, NEMO),
    "js_divergence_error": (js_divergence, NEMO),
    "mismatch_kl/all/mean": (k3, PRIME),
    "share of ratios outside [0.9, 1.1]": (share_outside(0.9, 1.1), SHARES),
    "share of ratios outside [0.8, 1.2]": (share_outside(0.8, 1.2), SHARES),
}
