"""One e-value against each hypothesis, from the exact likelihoods of sampled answers: at any time, at a stated error.

The e-value is a mean of likelihood ratios: what each other hypothesis, and each of some ways that nobody claims, gives
the answers so far, over what the hypothesis gives them. If the hypothesis is true, this is a martingale of mean 1: it
ever exceeds 1 / alpha with a probability of at most alpha, whatever is sent and whenever it stops. Then the hypothesis
is rejected, and stays so. By the ways that nobody claims a list without the truth is refuted as well.

Assumed is that tokens are drawn from the hypothesis' distribution given those before them, up to rounding errors:
- A token that filters drop counts as kept where a rounding error may keep it.
- Errors may correlate with the difference between two hypotheses, up to ALIGNED: their covariance is paid, by Cauchy
  and Schwarz. So candidates that are closer than rounding errors are never told apart.
- A token counts for at most MOST nats. Tokens of a text may be others than were sampled, which no hypothesis describes:
  they count for at most MOST_OF_TEXT, and only between hypotheses that are named.
- Reported log-probabilities are the exact ones, raw or processed, with errors of heavy tails in units of the format's
  rounding error. Those of one answer are not independent, so half of the logarithm counts; the hypothesis is given the
  best of the scales RIGHT, all others their mean.

Source: Ville 1939; Ramdas et al. 2023, Game-theoretic statistics and safe anytime-valid inference, sections 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import Place, compute
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import STAGES
from lfm2np.oracle.judging.position import resolution
from lfm2np.oracle.judging.scored import Known, add_noises, spoken, truths_of
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.judging.views import VIEWS, view_of
from lfm2np.oracle.vet.candidates import Hypothesis

Float64 = NDArray[np.float64]
FACTORS = (1.0, 0.5, 0.7, 0.85, 1.2, 1.4, 2.0)  # of the temperature; but for the first, nobody claims them
ANY = 0.05  # of tokens as likely as any other: another way that nobody claims
UNNAMED = (*(f"at {factor:g} times the temperature" for factor in FACTORS[1:]), "with some tokens at random")
MOST, MOST_OF_TEXT = 3.0, 1.0
SHARED = 0.01  # of each alternative follows the hypothesis: one that excludes a token loses no more than 4.6 nats
EMULATED = STAGES[2]  # engines that rounding errors are estimated by
ALIGNED = 0.25  # fixtures/vet.py measures it
RIGHT = 2.0 ** (np.arange(-4, 5) / 4.0)  # times the emulated engines' rounding error
OTHER = np.array([4.0, 8.0, 32.0, 128.0])  # times it: another model's
DEGREES, COUNTED = 4.0, 0.5  # of Student's t; of the logarithm
LEAST_SCALE = 1e-3  # nats: what servers round log-probabilities to, or lose when they sum in float32


class Likelihoods(NamedTuple):
    """Of N tokens under H hypotheses, nats; of reported values, NaN where there are none."""

    logprobs: Float64  # [H, F, N] at each of FACTORS; -inf where filters exclude the token
    most: Float64  # [H, N] that a right engine may give it, whose filters keep or drop a token by a rounding error
    errors: Float64  # [H, 2, N] of reported log-probabilities, read as raw and as processed ones
    scales: Float64  # [H, 2, N] their standard deviation in the candidate's format
    certain: NDArray[np.bool_]  # [N] whether the engine named the token
    last: NDArray[np.bool_]  # [N] whether it is the last of its answer


def likelihoods_of(hypotheses: Sequence[Hypothesis], pairs: Sequence[Pair], place: Place) -> Likelihoods:
    """Of answers with tokens: see answers.with_tokens. NumericsError where a checkpoint can't be computed."""
    arrays = [under(hypothesis, pairs, place) for hypothesis in hypotheses]
    answers = [answer for _, answer in pairs]
    certain = np.concatenate([np.full(answer.num_tokens, answer.text is None) for answer in answers])
    last = np.concatenate([np.arange(answer.num_tokens) == answer.num_tokens - 1 for answer in answers])
    return Likelihoods(*map(np.stack, zip(*arrays, strict=True)), certain, last)


def under(hypothesis: Hypothesis, pairs: Sequence[Pair], place: Place) -> tuple[Float64, Float64, Float64, Float64]:
    """[F, N], [N], [2, N] and [2, N]: the arrays of one hypothesis."""
    model, sampling = hypothesis.model, hypothesis.sampling
    scale = rounding_of(hypothesis, pairs, place)
    tolerance = 2.0 ** math.ceil(math.log2(LIMIT * math.sqrt(np.mean(scale**2))))
    tempered = [replace(sampling, temperature=sampling.temperature * factor) for factor in FACTORS]
    views = {"views": [view_of(params) for params in (*tempered, SamplingParams())], "tolerances": [tolerance]}
    items: list[dict[str, Any]] = [
        {"token_ids": [*request.prompt_token_ids, *answer.ids], "start": len(request.prompt_token_ids), **views}
        for request, answer in pairs
    ]
    results = compute(VIEWS, model, items, place)
    *logprobs, raw = np.concatenate([result["logprobs"] for result in results], axis=1)
    reported = np.concatenate([answer.logprobs or [np.nan] * answer.num_tokens for _, answer in pairs])
    return (
        np.stack(logprobs),
        np.concatenate([result["high"][0, 0] for result in results]),
        reported - np.stack([raw, np.maximum(logprobs[0], -1e3)]),
        np.stack([scale, scale / sampling.temperature]),
    )


def rounding_of(hypothesis: Hypothesis, pairs: Sequence[Pair], place: Place) -> Float64:
    """[N] standard deviation of the tokens' raw log-probabilities in the format, nats."""
    model, form, known, scales = hypothesis.model, format_named(hypothesis.format), Known(place=place), []
    truths = truths_of(model, pairs, known)
    add_noises(model, form.name, list(truths.values()), known, EMULATED)
    for pair in pairs:
        truth, start = truths[spoken(*pair)], len(pair[0].prompt_token_ids) - 1
        columns = [truth.at(start + index, token) for index, token in enumerate(pair[1].ids)]
        cells = np.arange(start, start + len(columns)) - truth.first, np.array(columns)
        unit = resolution(truth.largest[cells[0]], form.bits) / 2.0 * (1.0 - np.exp(truth.logprobs[cells]))
        scales.append(np.hypot(known.noises[form.name, truth.spoken].scales(truth)[cells], unit))
    return np.hypot(np.concatenate(scales), LEAST_SCALE)


class Standing(NamedTuple):
    """Of one hypothesis, at the ends of answers: within one, a decision would hang on where it stops."""

    log_e: float = 0.0  # natural logarithm of the largest e-value against it
    by: str = ""  # what has most of it
    rejected: int | None = None  # after how many tokens; None: it is left
    fits: int | None = None  # when it is refuted that what was reported is another model's, likewise
    more: tuple[float, ...] = ()  # tokens until each hypothesis, if it is true, rejects this one; infinite: never


def standings(hypotheses: Sequence[Hypothesis], parts: Sequence[Likelihoods], alpha: float) -> list[Standing]:
    """Of each hypothesis, after the answers of all parts."""
    seen = Likelihoods(*(np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True)))
    densities = densities_of(seen)
    return [standing(hypotheses, seen, densities, number, alpha) for number in range(len(hypotheses))]


def standing(
    hypotheses: Sequence[Hypothesis], seen: Likelihoods, densities: Float64, number: int, alpha: float
) -> Standing:
    """Against the hypothesis of this number."""
    count, enough, ends = len(hypotheses), -math.log(alpha), np.flatnonzero(seen.last)
    exact = seen.logprobs[number, 0]
    odds = np.maximum(np.where(np.isfinite(exact), exact, seen.most[number]), -700.0)
    random = np.log((1.0 - ANY) * np.exp(exact) + ANY / hypotheses[number].model.config.vocab_size)
    ways = np.vstack([seen.logprobs[:, 0], seen.logprobs[number, 1:], random])
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
    names = [*(each.name for each in hypotheses), *UNNAMED, "log-probabilities of another model"]
    likelier = log_mean(right[number]) - other.max(axis=(0, 1))
    # Between distributions that are close, half the mean square of the gains is their divergence, with less variance.
    power = np.mean(gains[:count] ** 2, axis=1)
    rates = power / 2.0 - ALIGNED * np.sqrt(np.mean(variance) * power) + reported[:, -1] / len(exact)
    missing = np.maximum(0.0, enough + math.log(len(ratios) - 1) - ratios[:count, -1])
    return Standing(
        float(total.max()),
        names[int(np.argmax(ratios[:, at]))],
        rejected,
        first_above(likelier[ends], ends, enough) if np.isfinite(seen.errors).any() else 0,
        tuple(np.where(rates > 1e-9, missing / np.maximum(rates, 1e-9), np.inf).tolist()),
    )


def densities_of(seen: Likelihoods) -> Float64:
    """[H, 2, scales, N] logarithms, summed so far, of reported values; 0 without any."""
    scales = seen.scales[:, :, None] * np.concatenate([RIGHT, OTHER])[:, None]
    ratios = seen.errors[:, :, None] / scales
    student = -np.log(scales) - (DEGREES + 1.0) / 2.0 * np.log1p(ratios**2 / DEGREES)
    return np.cumsum(COUNTED * np.nan_to_num(student), axis=-1)


def log_mean(densities: Float64) -> Float64:
    """[N] of the mean over the first two axes."""
    flat = densities.reshape(-1, densities.shape[-1])
    return np.asarray(np.logaddexp.reduce(flat) - math.log(len(flat)))


def first_above(logarithms: Float64, ends: NDArray[np.int64], enough: float) -> int | None:
    """After how many tokens; None: never. ends: [answers] the last token of each."""
    reached = np.flatnonzero(logarithms >= enough)
    return int(ends[reached[0]]) + 1 if len(reached) else None
