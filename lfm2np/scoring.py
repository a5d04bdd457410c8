"""Teacher forcing: how likely the model finds the tokens that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lfm2np import reference
from lfm2np.config import ModelConfig
from lfm2np.errors import RequestError
from lfm2np.numerics import Numerics
from lfm2np.numerics.pieces import pieces
from lfm2np.tokenizer import require_ids
from lfm2np.weights import ModelWeights, Progress

LOGITS_AT_ONCE = 2**23  # bounds the memory of the logits; under exact no choice can change a bit


@dataclass(frozen=True)
class TokenScore:
    """One given token against the model's distribution for its position."""

    position: int  # of the token; 0 has no prediction, so the first score stands at 1
    token_id: int
    logprob: float  # natural logarithm, from the raw logits
    rank: int  # 1 for the greedy token; among equal logits the lower id comes first
    margin: float  # its logit minus the best other one: positive if it is the greedy token
    greedy_token_id: int


def score(
    weights: ModelWeights,
    config: ModelConfig,
    numerics: Numerics,
    token_ids: Sequence[int],
    progress: Progress | None = None,
) -> list[TokenScore]:
    """Scores of tokens 1 to T-1 given those before each; `progress(done, total)` counts layers.

    RequestError for fewer than two tokens, more than `max_position_embeddings`, or an id outside the vocabulary.
    """
    ids = np.array(require_ids(token_ids, config.vocab_size), np.int64)
    if not 2 <= len(ids) <= config.max_position_embeddings:
        raise RequestError(
            f"{len(ids)} tokens to score: expected 2 to max_position_embeddings={config.max_position_embeddings}"
        )
    states = reference.hidden_states(weights, config, numerics, ids[:-1].tolist(), progress)
    scores: list[TokenScore] = []
    for rows in pieces(len(states), config.vocab_size, LOGITS_AT_ONCE):
        logits = reference.output_logits(weights, numerics, states[rows])
        logprobs = numerics.log_softmax(logits)
        for row, logit, logprob in zip(range(rows.start, rows.stop), logits, logprobs, strict=True):
            token_id = int(ids[row + 1])
            own = logit[token_id]
            ahead = int(np.count_nonzero(logit > own) + np.count_nonzero(logit[:token_id] == own))
            others = np.delete(logit, token_id)
            margin = float(own) - float(others.max()) if others.size else float("inf")
            scores.append(
                TokenScore(row + 1, token_id, float(logprob[token_id]), ahead + 1, margin, int(np.argmax(logit)))
            )
    return scores
