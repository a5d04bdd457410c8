"""Greedy generation on the reference: one token at a time, each from the whole sequence."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np import reference
from lfm2np.config import ModelConfig, show
from lfm2np.errors import RequestError
from lfm2np.numerics import Numerics
from lfm2np.progress import Progress
from lfm2np.tokenizer import Tokenizer
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


def stream(
    weights: ModelWeights,
    config: ModelConfig,
    numerics: Numerics,
    prompt_ids: Sequence[int],
    max_tokens: int,
    logprobs: int | None = None,
    progress: Progress | None = None,
) -> Iterator[GeneratedToken]:
    """Greedy tokens until an end-of-sequence token, `max_tokens` or the longest context. Checks before it starts."""
    max_tokens = require_count("max_tokens", max_tokens, 1, None)
    if logprobs is not None:
        logprobs = require_count("logprobs", logprobs, 0, config.vocab_size)
    if len(prompt_ids) >= config.max_position_embeddings:
        raise RequestError(
            f"prompt of {len(prompt_ids)} tokens: expected fewer than "
            f"max_position_embeddings={config.max_position_embeddings}"
        )
    room = min(max_tokens, config.max_position_embeddings - len(prompt_ids))
    steps = reference.greedy(weights, config, numerics, prompt_ids, progress)
    return _stream(config, numerics, steps, room, logprobs)


def require_count(name: str, value: object, least: int, most: int | None) -> int:
    """The integer, also NumPy's; RequestError unless it lies from `least` to `most`. True is not 1, 2.5 not 2."""
    try:
        count = None if isinstance(value, bool | np.bool_) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None or count < least or (most is not None and count > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise RequestError(f"{name} {show(value)}: expected a whole number, {bounds}")
    return count


def _stream(
    config: ModelConfig,
    numerics: Numerics,
    steps: Iterator[tuple[int, NDArray[Any]]],
    room: int,
    logprobs: int | None,
) -> Iterator[GeneratedToken]:
    for count, (token_id, row) in enumerate(steps, start=1):
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


def collect(
    prompt_ids: Sequence[int], tokens: Iterable[GeneratedToken], tokenizer: Tokenizer | None = None
) -> Completion:
    """The completion that a stream amounts to; without a tokenizer its text is None. Keeps no logits."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason = None
    for token in tokens:
        token_ids.append(token.token_id)
        logprobs += [token.logprobs] if token.logprobs else []
        finish_reason = token.finish_reason
    assert finish_reason is not None, "a stream ends with a finish reason"
    shown = token_ids[:-1] if finish_reason == "stop" else token_ids
    return Completion(
        prompt_token_ids=tuple(prompt_ids),
        token_ids=tuple(token_ids),
        text=tokenizer.decode(shown) if tokenizer else None,
        finish_reason=finish_reason,
        logprobs=tuple(logprobs) if logprobs else None,
    )
