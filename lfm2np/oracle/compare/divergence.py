"""The divergence of one prediction from another, accurate also where it is tiny: the same bits on every machine.

With logits a of the base and b of the other, p = softmax(a) and d = a - b:

    KL = sum p d + log sum p exp(-d) = log sum p exp(-d'),  d' = d - sum p d
       = log(1 + S),  S = sum p f(d'),  f(x) = exp(-x) - 1 + x >= 0,  as sum p d' = 0

Logits are float32, so d is off by a rounding of itself, and no term of S cancels another: a KL of 1e-15 has six right
digits, where sum p (log p - log q) has none. The neglected sum p d' is a rounding of the largest d. Where exp(-d') is
too large for a float64, or p too small, the term is exp(log p - d'), beside which p (d' - 1) is negligible; where that
is too large as well, KL = m + log sum exp(log p - d' - m), m the largest of these.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.grids import exact_sum
from lfm2np.truth import elementary

Array = NDArray[Any]
Float64 = NDArray[np.float64]
SMALL = 1.0  # up to there f by its series
F_TERMS = tuple(1.0 / math.factorial(k) for k in range(20, 1, -1))  # the next is below 2**-65
FARTHEST = 500.0  # of -d', or of the logarithm of a term, whose exponential has to be finite
TINY = 2.0**-900
LARGE = 0.4  # from there log(1 + S) as it stands


def divergence(base_logits: Array, base_logprobs: Float64, logits: Array) -> Float64:
    """KL [r] in nats of predictions [r, V]: float32 logits, and the base's log_softmax.

    0 if all logits are equal; never below 0, however large the differences.
    """
    probabilities = elementary.exp(base_logprobs)
    apart = base_logits.astype(np.float64) - logits
    apart -= exact_sum(without_tiny(probabilities * apart))[:, None]
    far = apart < -FARTHEST
    terms = without_tiny(probabilities * beyond_linear(np.where(far, 0.0, apart)))
    if not far.any():
        return log_of_one_more(exact_sum(terms))
    logarithms = base_logprobs - apart
    largest = logarithms.max(axis=1)
    beyond = largest > FARTHEST
    terms += np.where(far & ~beyond[:, None], without_tiny(elementary.exp(logarithms)), 0.0)
    divergences = log_of_one_more(exact_sum(terms))
    rest = logarithms[beyond] - largest[beyond, None]
    divergences[beyond] = largest[beyond] + elementary.log(exact_sum(elementary.exp(rest)))
    return divergences


def without_tiny(terms: Float64) -> Float64:
    """0 for terms so small that a sum of such terms alone has no grid in float64."""
    return np.where(np.abs(terms) < TINY, 0.0, terms)


def beyond_linear(x: Float64) -> Float64:
    """f(x) = exp(-x) - 1 + x; for small x by its series x^2 (1/2 - x/6 + ...)."""
    is_small = np.abs(x) <= SMALL
    near = np.where(is_small, -x, 0.0)
    return np.where(is_small, near * near * elementary.polynomial(F_TERMS, near), elementary.exp(-x) - 1.0 + x)


def log_of_one_more(x: Float64) -> Float64:
    """log(1 + x) of x >= 0: 2 atanh(x / (2 + x)), as in elementary.log, accurate for small x."""
    s = np.where(x < LARGE, x / (2.0 + x), 0.0)
    return np.where(x < LARGE, 2.0 * s * elementary.polynomial(elementary.ATANH_TERMS, s * s), elementary.log(1.0 + x))
