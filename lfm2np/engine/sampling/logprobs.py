"""Log-probabilities of a chosen token and of the most likely ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm) from the raw logits: of the chosen token, and of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), best first, ties by lower id


def token_logprobs(numerics: Numerics, row: NDArray[Any], token_id: int, count: int) -> TokenLogprobs:
    """Log-probabilities of one token and of the `count` most likely ones, from logits [V]."""
    logprobs = numerics.log_softmax(row)
    best = np.argsort(-row, kind="stable")[:count]
    return TokenLogprobs(token_id, float(logprobs[token_id]), tuple((int(i), float(logprobs[i])) for i in best))
