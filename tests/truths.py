"""What reference.py alone answers: the truth that every way through the engine has to equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from numpy.typing import NDArray

from lfm2np import reference
from lfm2np.checkpoint.loaded import LoadedModel


def greedy_steps(model: LoadedModel, prompt: str | Sequence[int], max_tokens: int) -> list[tuple[int, NDArray[Any]]]:
    """Tokens and the logits [V] of each, the whole sequence anew for each, until an end-of-sequence token."""
    ids = model.prompt_ids(prompt)
    found = []
    steps = reference.greedy(model.weights, model.config, model.numerics, ids)
    for token_id, row in islice(steps, min(max_tokens, model.room_after(ids))):
        found.append((token_id, row))
        if token_id in model.config.eos_token_ids:
            break
    return found


def greedy_tokens(model: LoadedModel, prompt: str | Sequence[int], max_tokens: int) -> tuple[int, ...]:
    return tuple(token_id for token_id, _ in greedy_steps(model, prompt, max_tokens))
