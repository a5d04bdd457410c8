"""One e-value against each hypothesis, from the exact likelihoods of sampled answers: at any time, at a stated error.

The e-value is a mean of likelihood ratios: what each other hypothesis, and each of some ways that nobody claims, gives
the answers so far, over what the hypothesis gives them. If the hypothesis is true, this is a martingale of mean 1: it
ever exceeds 1 / alpha with a probability of at most alpha, whatever is sent and whenever it stops (Ville 1939; Ramdas
et al. 2023, Game-theoretic statistics and safe anytime-valid inference, section 3). Then it is rejected, and stays so.

Assumed is that tokens are drawn from the hypothesis' distribution given those before them, up to rounding errors:
- A token that filters drop counts as kept where a rounding error may keep it.
- Errors may correlate with the difference between two hypotheses, up to ALIGNED: their covariance is paid, by Cauchy
  and Schwarz. So candidates that are closer than rounding errors are never told apart.
- Tokens of a text may be others than were sampled, which no hypothesis describes: they count for at most MOST_OF_TEXT
  nats each, and only between hypotheses that are named.
- Reported log-probabilities are the exact ones, raw or processed, with errors of Student's t, scaled as in
  rollouts/exact.py: few right engines' errors are normal, and one outlier must not decide (Lange, Little and Taylor,
  "Robust statistical modeling using the t distribution", JASA 84, 1989). Those of one answer are not independent: half
  of the logarithm counts. The hypothesis has the best of the scales RIGHT, all others their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.files import is_gguf, read_tensors
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.params import SamplingParams, from_json
from lfm2np.engine.work.place import Place
from lfm2np.errors import NumericsError, RequestError
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.engines.records_json import words_of_sampling
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.rollouts.exact import AT, TOLERANCES, joined, noises_of, scales_of, scores_of
from lfm2np.oracle.rollouts.rollout import Rollout

Float64 = NDArray[np.float64]
FACTORS = (0.5, 0.7, 0.85, 1.2, 1.4, 2.0)  # of the temperature: ways that nobody claims
UNNAMED = (*(f"at {factor:g} times the temperature" for factor in FACTORS), "log-probabilities of another model")
MOST, MOST_OF_TEXT = 3.0, 1.0  # nats of one token
SHARED = 0.01  # of each alternative follows the hypothesis: one that excludes a token loses no more than 4.6 nats
ALIGNED = 0.25  # measured on simulated providers: docs/engine/16-vet.md
RIGHT = 2.0 ** (np.arange(-4, 5) / 4.0)  # times the emulated engines' rounding error
OTHER = 2.0 ** np.array([1.5, 2.0, 3.0, 5.0, 7.0])  # times it: another's. A neighbour in a wider gap passes for right
COUNTED = 0.5
LEAST_SCALE = 1e-3  # nats: what servers round log-probabilities to
FREEDOM = 4.0  # of Student's t
EXCLUDED = -60.0  # nats: of a value that can't be reported


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A checkpoint under exact arithmetic. format: of an engine that runs it, whose rounding an honest one has."""

    name: str
    model: LoadedModel
    format: str
    sampling: SamplingParams


def hypotheses_of(
    candidates: Mapping[str, LoadedModel], requested: SamplingParams, others: Sequence[str]
) -> list[Hypothesis]:
    """Each candidate, the claim first, with the sampling that was requested and each of the others.

    RequestError for a sampling that can't be, or another vocabulary than the claim's.
    """
    first = next(iter(candidates.values()))
    for name, model in candidates.items():
        for token_id in range(max(model.config.vocab_size, first.config.vocab_size)):
            token, expected = (each.tokenizer.token(token_id) for each in (model, first))
            if token != expected:
                raise RequestError(f"candidate {name}: token {token_id} is {token!r}, expected {expected!r}")
    ways = {"": requested, **{f", sampled {text}": parse_sampling(text) for text in others}}
    if not all(sampling.temperature for sampling in ways.values()):
        raise RequestError("temperature 0: expected more than 0; greedy answers are what lfm2np check judges")
    formats = {name: format_of(model) for name, model in candidates.items()}
    return [
        Hypothesis(name + words, model, formats[name], sampling)
        for name, model in candidates.items()
        for words, sampling in ways.items()
    ]


def format_of(model: LoadedModel) -> str:
    if not is_gguf(model.path):
        return "bfloat16"
    tensors = read_tensors(model.path, model.config).values()
    floats = {"F32", "F16", "BF16"}
    return "float16" if {tensor.dtype for tensor in tensors if len(tensor.shape) == 2} <= floats else "q8"


def parse_sampling(text: str) -> SamplingParams:
    """'temperature=0.7 top_k=40' -> what tokens are drawn from. RequestError for another name or value."""
    return from_json(words_of_sampling(text))


def require_different(hypotheses: Sequence[Hypothesis], seen: Likelihoods) -> None:
    """RequestError for candidates that gave every token so far the same log-probability: other files of one model."""
    for (one, ours), (other, theirs) in combinations(zip(hypotheses, seen.logprobs, strict=True), 2):
        if one.model is not other.model and np.isfinite(ours).any() and np.array_equal(ours, theirs):
            same = f"the same, all {len(seen.last)} tokens so far are equally likely"
            raise RequestError(f"candidates {one.name} and {other.name}: {same}: leave one out")


class Likelihoods(NamedTuple):
    """Of N tokens under H hypotheses, nats; of reported values, NaN where there are none."""

    logprobs: Float64  # [H, 1 + F, N] as it is sampled, and at each of FACTORS; -inf where filters exclude the token
    most: Float64  # [H, N] that a right engine may give it, whose filters keep or drop a token by a rounding error
    errors: Float64  # [H, 2, N] of reported log-probabilities, read as raw and as processed ones
    scales: Float64  # [H, 2, N] their standard deviation in the candidate's format
    certain: NDArray[np.bool_]  # [N] whether the engine named the token
    last: NDArray[np.bool_]  # [N] whether it is the last of its answer


def likelihoods_of(hypotheses: Sequence[Hypothesis], pairs: Sequence[Pair], place: Place) -> Likelihoods:
    """Of answers with tokens: see answers.with_tokens. NumericsError where a checkpoint can't be computed."""
    arrays = zip(*(under(hypothesis, pairs, place) for hypothesis in hypotheses), strict=True)
    certain = np.concatenate([np.full(answer.num_tokens, answer.text is None) for _, answer in pairs])
    last = np.zeros(len(certain), bool)
    last[np.cumsum([answer.num_tokens for _, answer in pairs]) - 1] = True
    logprobs, most, errors, scales = map(np.stack, arrays)
    return Likelihoods(logprobs, most, errors, scales, certain, last)


def under(hypothesis: Hypothesis, pairs: Sequence[Pair], place: Place) -> tuple[Float64, Float64, Float64, Float64]:
    """The first four arrays, of one hypothesis."""
    model, sampling = hypothesis.model, hypothesis.sampling
    rollouts = [
        Rollout(request.request_id, request.prompt_token_ids, answer.ids, answer.logprobs, sampling=sampling)
        for request, answer in pairs
    ]
    readings = ["raw", "processed", *(f"processed{AT}{sampling.temperature * factor}" for factor in FACTORS)]
    scores, failed = scores_of(model, rollouts, place, readings=readings)
    if failed:
        raise NumericsError(f"{hypothesis.name}: {failed[0][1]}")
    noises = noises_of(hypothesis.format, model, scores, Known(place=place))
    raw, *processed = (joined(each.views[reading].logprobs for each in scores) for reading in readings)
    high, scales = [], []
    for index, each in enumerate(scores):
        spread = float(np.sqrt(np.mean(noises[index].spread[each.rows] ** 2)))
        tolerance = min(int(np.searchsorted(TOLERANCES, LIMIT * spread)), len(TOLERANCES) - 1)
        high.append(each.views["processed"].high[tolerance])
        both = [scales_of(each, noises[index], hypothesis.format, reading) for reading in readings[:2]]
        scales.append(np.stack([np.hypot(np.hypot(scale, unit / 2.0), LEAST_SCALE) for scale, unit in both]))
    errors = joined(each.reported("sampler") for each in scores) - np.stack([raw, np.maximum(processed[0], -1e3)])
    return np.stack(processed), joined(high), errors, np.concatenate(scales, axis=1)


def joined_likelihoods(parts: Sequence[Likelihoods]) -> Likelihoods:
    """One after another."""
    return Likelihoods(*(np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True)))


class Standing(NamedTuple):
    """At the ends of answers: within one, a decision would hang on where it stops."""

    hypothesis: Hypothesis
    log_e: float  # natural logarithm of the largest e-value against it
    by: str  # what has most of it
    rejected_after: int | None  # tokens; None: it is left
    fits_after: int | None  # when it is refuted that what was reported is another model's, likewise
    more: tuple[float, ...]  # tokens until each hypothesis, if it is true, rejects this one; infinite: never


def standings(hypotheses: Sequence[Hypothesis], seen: Likelihoods, alpha: float) -> list[Standing]:
    densities = densities_of(seen)
    return [standing(hypotheses, seen, densities, number, alpha) for number in range(len(hypotheses))]


def standing(
    hypotheses: Sequence[Hypothesis], seen: Likelihoods, densities: Float64, number: int, alpha: float
) -> Standing:
    """Against the hypothesis of this number."""
    count, enough, ends = len(hypotheses), -math.log(alpha), np.flatnonzero(seen.last)
    exact = seen.logprobs[number, 0]
    odds = np.maximum(np.where(np.isfinite(exact), exact, seen.most[number]), -700.0)
    ways = np.vstack([seen.logprobs[:, 0], seen.logprobs[number, 1:]])
    gains = np.logaddexp(math.log1p(-SHARED) + ways, math.log(SHARED) + odds) - odds
    gains = np.minimum(gains, np.where(seen.certain, MOST, MOST_OF_TEXT))
    gains[count:, ~seen.certain] = 0.0
    variance = seen.scales[number, 1] ** 2
    ratios = np.cumsum(gains, axis=1) - ALIGNED * np.sqrt(np.cumsum(variance) * np.cumsum(gains**2, axis=1))
    right, other = densities[:, :, : len(RIGHT)], densities[number, :, len(RIGHT) :]
    fair = right[number].max(axis=(0, 1))
    reported = np.array([log_mean(each) for each in right]) - fair
    ratios[:count] += reported
    ratios = np.vstack([ratios, log_mean(other) - fair])[:, ends]
    ratios[number] = -np.inf  # is no rival of itself
    total = np.logaddexp.reduce(ratios) - math.log(len(ratios) - 1)
    rejected = first_above(total, ends, enough)
    at = int(np.argmax(total if rejected is None else total >= enough))
    names = [*(each.name for each in hypotheses), *UNNAMED]
    likelier = log_mean(right[number]) - other.max(axis=(0, 1))
    # Between distributions that are close, half the mean square of the gains is their divergence, with less variance.
    power = np.mean(gains[:count] ** 2, axis=1)
    rates = power / 2.0 - ALIGNED * np.sqrt(np.mean(variance) * power) + reported[:, -1] / len(exact)
    missing = np.maximum(0.0, enough + math.log(len(ratios) - 1) - ratios[:count, -1])
    return Standing(
        hypotheses[number],
        float(total.max()),
        names[int(np.argmax(ratios[:, at]))],
        rejected,
        first_above(likelier[ends], ends, enough) if np.isfinite(seen.errors).any() else 0,
        tuple(np.where(rates > 1e-9, missing / np.maximum(rates, 1e-9), np.inf).tolist()),
    )


def densities_of(seen: Likelihoods) -> Float64:
    """[H, 2, scales, N] logarithms, summed so far, of reported values; 0 without any."""
    scales = seen.scales[:, :, None] * np.concatenate([RIGHT, OTHER])[:, None]
    errors = np.abs(seen.errors[:, :, None])
    densities = np.where(np.isnan(errors), 0.0, COUNTED * log_density(errors / scales, scales))
    return np.cumsum(densities, axis=-1)


def log_density(sizes: Float64, scales: Float64) -> Float64:
    """Of Student's t, at errors in units of their scales."""
    nu = FREEDOM
    constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
    density = constant - np.log(scales) - (nu + 1) / 2 * np.log1p(np.minimum(sizes, 1e150) ** 2 / nu)
    return np.asarray(np.maximum(density, EXCLUDED))


def log_mean(densities: Float64) -> Float64:
    """[N] of the mean over the first two axes."""
    flat = densities.reshape(-1, densities.shape[-1])
    return np.asarray(np.logaddexp.reduce(flat) - math.log(len(flat)))


def first_above(logarithms: Float64, ends: NDArray[np.int64], enough: float) -> int | None:
    """After how many tokens; None: never. ends: [answers] the last token of each."""
    reached = np.flatnonzero(logarithms >= enough)
    return int(ends[reached[0]]) + 1 if len(reached) else None
