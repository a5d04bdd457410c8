"""Drafters: who proposes the tokens that a step then checks. Any object with `is_random` and `propose` is one.

A drafter sees contexts and returns guesses; it holds no place in the engine's cache, so there is nothing to undo when a
guess is rejected, a request is preempted, split or aborted. What it proposes can change how long a run takes, and never
the distribution of its tokens; unless `is_random`, not even one token: see acceptance.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.values import require_count


@dataclass(frozen=True)
class DraftContext:
    """One sequence, prompt first, whose last known token is computed in this step, be it a prompt's; at most `count` of
    its next tokens are wanted."""

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # of the request: see sampling.choice.request_seed
    sample_index: int
    count: int


@dataclass(frozen=True, eq=False)
class Draft:
    """The guesses, in order. Drawn ones come with the weights [V] that each was drawn from, and there is one more than
    `count`: for the position after the last that can be computed, so that every position is decided in one way. A
    drafter that leaves it out decides some tokens by a plain draw, and then they depend on the batch.
    """

    token_ids: tuple[int, ...] = ()
    weights: tuple[NDArray[np.int64], ...] | None = None


class Drafter(Protocol):
    @property
    def is_random(self) -> bool:
        """Whether the guesses are drawn. They must then be a function of the prefix, the parameters and the seed."""

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        """A draft for each context, in their order; an empty one where nothing can be guessed."""


class NgramDrafter:
    """Prompt lookup: what followed the last time that the newest tokens stood together.

    The longest suffix, of `longest` to `shortest` tokens, that also stands earlier in prompt or output; of several such
    places the first, so that most tokens follow. vLLM's rule (vllm/v1/spec_decode/ngram_proposer.py).
    """

    is_random = False

    def __init__(self, longest: int = 4, shortest: int = 1) -> None:
        """RequestError unless 1 <= shortest <= longest."""
        self.shortest = require_count("shortest n-gram", shortest, 1, None)
        self.longest = require_count("longest n-gram", longest, self.shortest, None)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [Draft(self._continue(context.token_ids, context.count)) for context in contexts]

    def _continue(self, ids: tuple[int, ...], count: int) -> tuple[int, ...]:
        tokens = np.array(ids, np.int64)
        for size in range(min(self.longest, len(ids) - 1), self.shortest - 1, -1):
            earlier = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            places = np.flatnonzero((earlier == tokens[-size:]).all(axis=1))
            if len(places):
                return ids[places[0] + size : places[0] + size + count]
        return ()


class ScriptedDrafter:
    """Proposes a given output: `script` holds one by request id, right or wrong at any position."""

    is_random = False

    def __init__(self, script: Mapping[str, Sequence[int]]) -> None:
        self._script = script

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = []
        for context in contexts:
            done = len(context.token_ids) - context.num_prompt_tokens
            drafts.append(Draft(tuple(self._script.get(context.request_id, ())[done : done + context.count])))
        return drafts
