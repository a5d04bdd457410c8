"""What reference.py alone answers: the truth that every way through the engine has to equal."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.judging.truth import Spoken, Truth, Wanted, spoken_truths
from lfm2np.truth import reference


def greedy_steps(model: LoadedModel, prompt: str | Sequence[int], max_tokens: int) -> list[tuple[int, NDArray[Any]]]:
    """Tokens and the logits [V] of each, the whole sequence anew for each, until an end-of-sequence token."""
    ids = list(model.prompt_ids(prompt))
    steps: list[tuple[int, NDArray[Any]]] = []
    for _ in range(min(max_tokens, model.room_after(ids))):
        states = reference.hidden_states(model.weights, model.config, model.numerics, ids)
        row = reference.output_logits(model.weights, model.numerics, states[-1:])[0]
        ids.append(int(np.argmax(row)))  # the lowest id where logits tie
        steps.append((ids[-1], row))
        if ids[-1] in model.config.eos_token_ids:
            break
    return steps


def greedy_tokens(model: LoadedModel, prompt: str | Sequence[int], max_tokens: int) -> tuple[int, ...]:
    return _tokens_of(model, tuple(model.prompt_ids(prompt)), max_tokens)


@functools.cache
def _tokens_of(model: LoadedModel, ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    return tuple(token_id for token_id, _ in greedy_steps(model, ids, max_tokens))


def truth_of(model: LoadedModel, token_ids: Sequence[int], wanted: Wanted) -> Truth:
    """Of one sequence."""
    return spoken_truths(model, {Spoken(tuple(token_ids)): wanted})[0]
