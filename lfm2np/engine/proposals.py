"""Draft tokens, asked for and checked: the first half of speculative decoding; sampler.py is the second.

    plan -> contexts -> propose() -> drafts -> Scheduler.add_drafts -> forward -> decide() -> commit_step, update

A drafter is not trusted: if it raises, or its drafts can't be used, that request goes on without drafts.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lfm2np.checkpoint.text.tokenizer import require_ids
from lfm2np.engine.drafters import Draft, DraftContext, Drafter
from lfm2np.engine.sequence import Sequence
from lfm2np.errors import RequestError
from scheduler import BatchPlan, most_drafts

MOST_WEIGHT = 2**62


@dataclass(frozen=True)
class Proposals:
    """By the scheduler's request id: usable drafts, and errors."""

    drafts: dict[str, Draft] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def fed(self, contexts: abc.Sequence[DraftContext]) -> dict[str, tuple[int, ...]]:
        """The tokens that a step may compute with; the last sampled draft only decides the position after them."""
        fed = {}
        for context in contexts:
            draft = self.drafts.get(context.request_id, Draft())
            drawn = draft.weights is not None
            fed[context.request_id] = draft.token_ids[: min(context.count, len(draft.token_ids) - drawn)]
        return {name: ids for name, ids in fed.items() if ids}


def contexts_of(
    plan: BatchPlan, sequences: Mapping[str, Sequence], drafter: Drafter, most: int, room: int
) -> list[DraftContext]:
    """Who gets drafts in a planned step that leaves `room` tokens: at most `most` each.

    Sampled drafts decide a token even where they are not computed with, so every position needs one.
    """
    contexts = []
    for entry in plan.scheduled:
        takes = entry.samples == (entry.request_id,)
        for name in entry.samples:
            sequence = sequences.get(name)  # none if it was aborted before it was split off
            if sequence is None or sequence.is_finished or sequence.draft_error is not None:
                continue
            count = min(most, room, most_drafts(sequence)) if takes else 0
            if count or (drafter.is_random and sequence.params.temperature != 0.0):
                ids, prompt = tuple(sequence.token_ids), sequence.num_prompt_tokens
                sample = (sequence.params, sequence.seed, sequence.index)
                contexts.append(DraftContext(name, ids, prompt, *sample, count))
    return contexts


def propose(drafter: Drafter, contexts: abc.Sequence[DraftContext], vocab_size: int) -> Proposals:
    """All contexts at once; if that fails, each alone, so that one bad request costs no other its drafts."""
    result = Proposals()
    if not contexts:
        return result
    try:
        drafts = list(drafter.propose(contexts))
        together = len(drafts) == len(contexts)
    except Exception:
        together = False
    for index, context in enumerate(contexts):
        try:
            draft = drafts[index] if together else _propose_alone(drafter, context)
            result.drafts[context.request_id] = usable(draft, context, drafter.is_random, vocab_size)
        except Exception as error:
            result.errors[context.request_id] = f"{type(error).__name__}: {error}"
    return result


def _propose_alone(drafter: Drafter, context: DraftContext) -> Draft:
    drafts = list(drafter.propose([context]))
    if len(drafts) != 1:
        raise RequestError(f"drafter: {len(drafts)} drafts for 1 context, expected 1")
    return drafts[0]


def usable(draft: Draft, context: DraftContext, is_random: bool, vocab_size: int) -> Draft:
    """The draft with plain ints. RequestError if it is too long, has an id outside the vocabulary, or weights that are
    no distribution."""
    most = context.count + (draft.weights is not None)
    if len(draft.token_ids) > most:
        raise RequestError(f"drafter: {len(draft.token_ids)} tokens, expected at most {most}")
    ids = tuple(require_ids(draft.token_ids, vocab_size)) if len(draft.token_ids) else ()
    if draft.weights is None:
        return Draft(ids)
    if not is_random or len(draft.weights) != len(ids):
        expected = f"{len(ids)}" if is_random else "none, as it is not random"
        raise RequestError(f"drafter: {len(draft.weights)} distributions, expected {expected}")
    for token_id, weights in zip(ids, draft.weights, strict=True):
        if weights.dtype != np.int64 or weights.shape != (vocab_size,) or weights.min() < 0:
            raise RequestError(f"drafter: weights {weights.dtype} {weights.shape}, expected int64 ({vocab_size},) >= 0")
        if weights[token_id] == 0 or sum(weights.tolist()) > MOST_WEIGHT:
            raise RequestError(f"drafter: weight of token {token_id} is 0, or all sum to more than 2**62")
    return Draft(ids, tuple(draft.weights))


def require_drafter(drafter: Drafter | None) -> Drafter | None:
    """RequestError for an object that can't draft."""
    for name in ("is_random", "propose"):
        if drafter is not None and not hasattr(drafter, name):
            raise RequestError(f"drafter {type(drafter).__name__}: it has no {name}; see lfm2np.Drafter")
    return drafter
