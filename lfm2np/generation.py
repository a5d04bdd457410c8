"""Greedy generation on the reference: one token at a time, each from the whole sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np import reference
from lfm2np.config import ModelConfig
from lfm2np.errors import RequestError
from lfm2np.numerics import Numerics
from lfm2np.weights import ModelWeights


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm) from the raw logits: of the chosen token, and of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), best first, ties by lower id


@dataclass(frozen=True, eq=False)
class GeneratedToken:
    token_id: int
    logits: NDArray[Any]  # [V], the row that it was chosen from
    finish_reason: str | None  # "stop" or "length" with the last token
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Completion:
    """What a request came to. `token_ids` includes the end-of-sequence token, `text` does not."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str  # "stop": an end-of-sequence token; "length": max_tokens or the longest context
    logprobs: tuple[TokenLogprobs, ...] | None

    def with_text(self, text: str) -> Completion:
        return replace(self, text=text)


def stream(
    weights: ModelWeights,
    config: ModelConfig,
    numerics: Numerics,
    prompt_ids: Sequence[int],
    max_tokens: int,
    logprobs: int | None = None,
) -> Iterator[GeneratedToken]:
    """Greedy tokens until an end-of-sequence token, `max_tokens` or the longest context. Checks before it starts."""
    require_lengths(config, len(prompt_ids), max_tokens)
    if logprobs is not None and not 0 <= logprobs <= config.vocab_size:
        raise RequestError(f"logprobs {logprobs}: expected 0 to vocab_size={config.vocab_size}")
    room = min(max_tokens, config.max_position_embeddings - len(prompt_ids))
    return _stream(weights, config, numerics, prompt_ids, room, logprobs)


def require_lengths(config: ModelConfig, prompt_length: int, max_tokens: int) -> None:
    """RequestError for a prompt that leaves no room for one token, or a limit below one."""
    if max_tokens < 1:
        raise RequestError(f"max_tokens {max_tokens}: expected at least 1")
    if prompt_length >= config.max_position_embeddings:
        raise RequestError(
            f"prompt of {prompt_length} tokens: expected fewer than "
            f"max_position_embeddings={config.max_position_embeddings}"
        )


def _stream(
    weights: ModelWeights,
    config: ModelConfig,
    numerics: Numerics,
    prompt_ids: Sequence[int],
    room: int,
    logprobs: int | None,
) -> Iterator[GeneratedToken]:
    for count, (token_id, row) in enumerate(reference.greedy(weights, config, numerics, prompt_ids), start=1):
        finish_reason = "stop" if token_id in config.eos_token_ids else "length" if count == room else None
        chosen = None if logprobs is None else token_logprobs(numerics, row, token_id, logprobs)
        yield GeneratedToken(token_id, row, finish_reason, chosen)
        if finish_reason:
            return


def token_logprobs(numerics: Numerics, row: NDArray[Any], token_id: int, count: int) -> TokenLogprobs:
    """Log-probabilities of one token and of the `count` most likely ones, from logits [V]."""
    logprobs = numerics.log_softmax(row)
    best = np.argsort(-row, kind="stable")[:count]
    return TokenLogprobs(token_id, float(logprobs[token_id]), tuple((int(i), float(logprobs[i])) for i in best))


def collect(prompt_ids: Sequence[int], tokens: Iterable[GeneratedToken]) -> Completion:
    """The completion that a finished stream amounts to, without its text."""
    generated = list(tokens)
    logprobs = tuple(token.logprobs for token in generated if token.logprobs is not None)
    finish_reason = generated[-1].finish_reason
    assert finish_reason is not None, "a stream ends with a finish reason"
    return Completion(
        prompt_token_ids=tuple(prompt_ids),
        token_ids=tuple(token.token_id for token in generated),
        text=None,
        finish_reason=finish_reason,
        logprobs=logprobs if generated[-1].logprobs is not None else None,
    )
