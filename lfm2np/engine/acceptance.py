"""Speculative decoding, one position: which token comes when a drafter has guessed one. Exact: integers throughout.

p is the model's distribution at the position and q the one that the guess was drawn from, both as integer weights.

    a guess that was not drawn   q is 1 there. Accept with probability p(guess), else draw from p without it: which is
                                 to draw from p, and to see whether the guess came. So we draw, with the noise that a
                                 run without drafts uses: every token is the same as without drafts, not only likely so
    a guess drawn from q         accept with probability min(1, p / q), else draw from max(p - q, 0), normalised

Either way a token t comes with probability q(t) min(1, p(t) / q(t)) + sum of max(q - p, 0) * max(p(t) - q(t), 0) /
sum of max(p - q, 0) = min(p, q) + max(p - q, 0) = p(t), since the two sums are equal.
The noise is a function of (seed, sample, position), and a guess drawn from q is one of (prefix, seed): then so is the
token, in any batch, whether or not there was room to compute with the guess.

Source: Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (ICML 2023), 2.3;
Chen et al., "Accelerating large language model decoding with speculative sampling" (arXiv 2302.01318), algorithm 2.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.engine.sampling.choice import NOISE_BITS, choose, distribution, philox, uniform
from lfm2np.engine.sampling.params import SamplingParams

Int64 = NDArray[np.int64]

ACCEPT, REPLACE = 1, 2  # purposes of noise; 0 is the plain draw


@dataclass(frozen=True, eq=False)
class Guess:
    """A token drawn from weights [V]: the probability that it was guessed is weights[token_id] / sum(weights)."""

    token_id: int
    weights: Int64


def next_token(
    row: NDArray[Any],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_token_ids: Sequence[int],
    seed: int,
    sample_index: int,
    guess: Guess | None = None,
) -> int:
    """The token after prompt and output, from its logits [V]. Greedy, or without a drawn guess: choice.choose."""
    if guess is None or params.temperature == 0.0:
        return choose(row, params, prompt_ids, output_ids, eos_token_ids, seed, sample_index)
    target = distribution(row, params, prompt_ids, output_ids, eos_token_ids)
    position = len(prompt_ids) + len(output_ids)
    if is_accepted(target, guess, uniform(seed, sample_index, position, ACCEPT)):
        return guess.token_id
    return replacement(target, guess.weights, philox(seed, sample_index, position, REPLACE))


def is_accepted(target: Int64, guess: Guess, noise: int) -> bool:
    """noise / 2**128 < p / q, in integers: true for a share min(1, p / q) of [0, 2**128), to the next integer."""
    p = int(target[guess.token_id]) * int(guess.weights.sum())
    q = int(guess.weights[guess.token_id]) * int(target.sum())
    return noise * q < p << NOISE_BITS


def replacement(target: Int64, weights: Int64, noise: int) -> int:
    """A token drawn from max(p - q, 0), with noise of [0, 2**256); each probability is right to 2**-255.

    There is one: a guess is refused only where q > p, and both sum to 1, so p > q elsewhere.
    """
    ids = np.flatnonzero(target).tolist()
    p_total, q_total = int(target.sum()), int(weights.sum())
    shares = [max(0, int(target[i]) * q_total - int(weights[i]) * p_total) for i in ids]
    cumulative = list(accumulate(shares))
    drawn = noise * cumulative[-1] >> 2 * NOISE_BITS
    return int(ids[bisect_right(cumulative, drawn)])
