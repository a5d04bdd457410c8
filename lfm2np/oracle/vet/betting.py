"""The sequential test: each hypothesis against everything else, token by token, at any time, at a stated error.

A gambler bets against a hypothesis at its own odds: his capital is the product of what his way gives each token over
what the hypothesis gives it. If the hypothesis is true, the capital exceeds 1 / alpha at any time with a probability of
at most alpha, whatever is asked and whenever it is stopped (Ville). He splits his stake: half among the other
hypotheses, half among ways that nobody claims, so that a list without the truth is refuted as well. A hypothesis that
was rejected stays rejected; what is accepted is what is left.

A right engine has rounding errors, so the odds are made fairer than the hypothesis' own:
- A token that filters drop counts as kept where a rounding error may keep it (`upper`).
- Errors d of its logits, at random and of size tau, give token y the probability p[y] (1 + tau^2 (sum p^2 - p[y])) on
  the average, up to higher orders, as E exp(d[y] - log sum p exp d) is: these are the odds.
- Errors may be aligned with the difference between two candidates, as both come from rounding the same network: with a
  correlation of ALIGNED, their covariance, by Cauchy and Schwarz, is paid too. So candidates that are closer to each
  other than the rounding error are never told apart, however long it takes.
- No token counts for more than MOST nats: the tokenizer, the end of an answer and the server's own words are not
  in the hypothesis.
- Tokens that are those of a text, tokenised again, may be others than were sampled. No hypothesis describes them, so
  ways that nobody claims would gain by that: on such tokens only the candidates bet against each other, and no token
  counts for more than MOST_OF_TEXT nats.

Source: Ville 1939; Ramdas et al. 2023, Game-theoretic statistics and safe anytime-valid inference, sections 2 and 3.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.vet.hypotheses import Hypotheses
from lfm2np.oracle.vet.likelihoods import WARMER, Likelihoods
from lfm2np.oracle.vet.reported import PLAIN, WIDE, log_densities, log_mean

Float64 = NDArray[np.float64]
MOST = 3.0  # nats against a hypothesis, of one token
MOST_OF_TEXT = 1.0
SHARED = 0.01  # of each bet follows the hypothesis itself: a way that excludes a token loses no more than 4.6 nats
ALIGNED = 0.25  # fixtures/vet.py measures it
LOOSE = 0.1  # of a bet on a filtered hypothesis follows its filters if they keep all that a rounding error may keep
ANY = 0.05  # of the bet on tokens as likely as any other
ORDERS, STRENGTHS = (1, 2), (4.0, 32.0)  # of the way that learns: tokens of context, and the weight of the hypothesis
WAYS = (
    *(f"at {factor:g} times the temperature" for factor in WARMER),
    "with some tokens as likely as any other",
    *(f"as its own earlier answers after {order} tokens" for order in ORDERS for _ in STRENGTHS),
)
REPORTS = "with log-probabilities of another model"


@dataclass(frozen=True, eq=False)
class Standing:
    """Of one hypothesis. capital: the largest logarithm against it; by: the way that has most of it then;
    rejected: after how many tokens, None if it is left; fits: after how many tokens what is reported refutes that it is
    another model's, None if not yet. Tokens alone can't say that: 0.
    """

    capital: float
    by: str
    rejected: int | None
    fits: int | None = 0


@dataclass(eq=False)
class Ledger:
    """All answers so far. spreads: tau of each candidate's logits, nats."""

    hypotheses: Hypotheses
    vocab_size: int
    spreads: Sequence[float]
    answers: list[Likelihoods] = field(default_factory=list)
    _seen: Mapping[tuple[int, ...], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    _counts: list[Float64] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))

    def add(self, answer: Likelihoods) -> None:
        self.answers.append(answer)
        self._counts.append(self._learnt(answer))

    def _learnt(self, answer: Likelihoods) -> Float64:
        """[orders, 2, R]: how often this token, and any token, came after the same tokens before."""
        ids = (*answer.before, *answer.token_ids.tolist())
        counts = np.zeros((len(ORDERS), 2, len(answer)))
        for row, token in enumerate(answer.token_ids.tolist()):
            for index, order in enumerate(ORDERS):
                after = self._seen[tuple(ids[row + 2 - order : row + 2])]
                counts[index, :, row] = after.get(token, 0), sum(after.values())
                after[token] = after.get(token, 0) + 1
        return counts

    def joined(self, name: str) -> NDArray[Any]:
        return np.concatenate([getattr(answer, name) for answer in self.answers], axis=-1)

    def standings(self, alpha: float) -> list[Standing]:
        """Of each hypothesis, after every token that came."""
        if not self.answers:
            return [Standing(0.0, "", None) for _ in self.hypotheses.each]
        logprobs, upper = self.joined("logprobs"), self.joined("upper")
        bets = np.logaddexp(math.log1p(-LOOSE) + logprobs, math.log(LOOSE) + self.joined("loose"))
        squares, warmer = self.joined("squares"), self.joined("warmer")
        counts, certain = np.concatenate(self._counts, axis=-1), self.joined("certain")
        ends = np.cumsum([len(answer) for answer in self.answers]) - 1
        densities = self._densities()
        standings = []
        for number in range(len(upper)):
            others = [other for other in range(len(upper)) if other != number]
            ways = self._ways(logprobs[number], warmer[number], counts)
            possible = np.where(np.isfinite(logprobs[number]), logprobs[number], upper[number])
            odds, variance = self._odds(number, possible, squares[number])
            factors = factors_of(np.concatenate([bets[others], ways]), odds)
            factors[:, ~certain] = np.minimum(factors[:, ~certain], MOST_OF_TEXT)
            factors[len(others) :, ~certain] = 0.0
            price = ALIGNED * np.sqrt(np.cumsum(variance) * np.cumsum(factors**2, axis=1))
            capitals = np.cumsum(factors, axis=1) - price
            names = [self.hypotheses.each[other].name for other in others] + list(WAYS)
            weights = [0.5 / max(1, len(others))] * len(others) + [0.5 / (len(WAYS) + 1)] * len(WAYS)
            if densities is not None:
                fair = densities[number][PLAIN].max(axis=(0, 1))
                for place, other in enumerate(others):
                    capitals[place] += log_mean(densities[other][PLAIN]) - fair
                capitals = np.vstack([capitals, log_mean(densities[number][WIDE]) - fair])
                names, weights = [*names, REPORTS], [*weights, 0.5 / (len(WAYS) + 1)]
            standing = standing_of(capitals, np.array(weights), names, alpha, ends)
            if densities is not None:
                likelier = log_mean(densities[number][PLAIN]) - densities[number][WIDE].max(axis=(0, 1))
                standing = replace(standing, fits=first_above(likelier, alpha, ends))
            standings.append(standing)
        return standings

    def _ways(self, logprobs: Float64, warmer: Float64, counts: Float64) -> Float64:
        """[ways, N] log-probabilities by ways to sample that nobody claims, around one hypothesis."""
        p = np.exp(logprobs)
        even = np.log((1.0 - ANY) * p + ANY / self.vocab_size)
        learnt = [
            np.log((counts[index, 0] + strength * p) / (counts[index, 1] + strength) + 1e-300)
            for index in range(len(ORDERS))
            for strength in STRENGTHS
        ]
        return np.vstack([warmer, even[None], learnt])

    def _odds(self, number: int, logprobs: Float64, squares: Float64) -> tuple[Float64, Float64]:
        """[N] of a hypothesis and its rounding errors, and the variance of these errors of log-probabilities."""
        tau = self.spreads[self.hypotheses.each[number].candidate] / self.hypotheses.temperature(number)
        p = np.exp(np.minimum(logprobs, 0.0))
        variance = tau**2 * ((1.0 - p) ** 2 + np.maximum(0.0, squares - p * p))
        return logprobs + np.log1p(np.maximum(-0.5, tau**2 * (squares - p))), variance

    def _densities(self) -> list[Float64] | None:
        """By hypothesis [modes, scales, N] of what was reported so far; None if nothing was."""
        if not any(np.isfinite(answer.reported).any() for answer in self.answers):
            return None
        densities = []
        for number, each in enumerate(self.hypotheses.each):
            pair, temperature = self.hypotheses.pairs.index(each.pair), self.hypotheses.temperature(number)
            parts = [log_densities(answer, pair, number, temperature) for answer in self.answers]
            densities.append(np.concatenate(parts, axis=-1).cumsum(axis=-1))
        return densities


def factors_of(logprobs: Float64, odds: Float64) -> Float64:
    """[ways, N] what each token adds to the capital of a way with these log-probabilities."""
    odds = np.maximum(odds, -700.0)
    mixed = np.logaddexp(math.log1p(-SHARED) + logprobs, math.log(SHARED) + odds)
    return np.minimum(mixed - odds, MOST)


def standing_of(
    capitals: Float64, weights: Float64, names: Sequence[str], alpha: float, ends: NDArray[np.int64]
) -> Standing:
    """At the ends of answers: within one, a decision would hang on where it stops."""
    shares = capitals[:, ends] + np.log(weights)[:, None]
    largest = shares.max(axis=0)
    total = largest + np.log(np.exp(shares - largest).sum(axis=0))
    rejected = first_above(np.repeat(total, np.diff(ends, prepend=-1)), alpha, ends)
    at = int(np.argmax(total)) if rejected is None else int(np.searchsorted(ends, rejected - 1))
    best = int(np.argmax(shares[:, at]))
    return Standing(float(total.max()), names[best], rejected)


def first_above(logarithms: Float64, alpha: float, ends: NDArray[np.int64]) -> int | None:
    """After how many tokens 1 / alpha is reached, at the end of an answer; None: never."""
    crossed = np.flatnonzero(logarithms[ends] >= -math.log(alpha))
    return int(ends[crossed[0]]) + 1 if len(crossed) else None
