"""A smaller LFM2 as drafter, run by an engine of its own.

The drafter keeps nothing of a sequence: each proposal is a new request, whose prefix its engine finds in its own prefix
cache, keys, values and convolution states together. What was rejected is a branch that no one continues, and is evicted
in time; so the roll-back of the draft model's states, which engines get wrong (vLLM 50272), needs no code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.drafters import Draft, DraftContext
from lfm2np.engine.engine import Engine
from lfm2np.engine.sampling.choice import distribution
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import CheckpointError, RequestError

DRAFT_SAMPLING = ("greedy", "random")


class ModelDrafter:
    """Proposes the draft model's likeliest tokens, or, with sampling="random", draws from its distribution.

    Drawn guesses use the request's own temperature, filters and masks, without its penalties: q may be any
    distribution. `options` are those of Engine, for the draft model's cache.
    """

    def __init__(
        self, model: LoadedModel, target: LoadedModel, sampling: str = "greedy", block_size: int = 4, **options: Any
    ) -> None:
        """CheckpointError for a draft model with another vocabulary; RequestError for an unknown `sampling`."""
        require_same_vocabulary(model, target)
        if sampling not in DRAFT_SAMPLING:
            raise RequestError(f"draft sampling {sampling!r}: expected one of {', '.join(DRAFT_SAMPLING)}")
        self.is_random = sampling == "random"
        self._model = model
        self._engine = Engine(model, block_size=block_size, on_logits=self._keep, **options)
        self._rows: dict[str, list[NDArray[Any]]] = {}

    def _keep(self, name: str, position: int, row: NDArray[Any], token: int) -> None:
        self._rows.setdefault(name, []).append(row)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """All contexts as one batch; a draft ends where the draft model's context or pool does.

        RequestError if the draft model's numbers overflow for one of them.
        """
        params = [self._params(context) for context in contexts]
        self._rows = {}
        tokens: dict[str, tuple[int, ...]] = {}
        errors: list[str] = []
        try:
            for context, sampling in zip(contexts, params, strict=True):
                if sampling is not None:
                    self._engine.add_request(context.request_id, context.token_ids, sampling)
            for output in self._engine.stream():
                if output.finished:
                    tokens[output.request_id] = tuple(output.outputs[0].token_ids)
                    errors += [output.outputs[0].error] if output.outputs[0].error else []
        finally:  # also after an interrupt: nothing of this proposal may run in the next
            for context in contexts:
                self._engine.discard(context.request_id)
        if errors:
            raise RequestError(f"draft model: {errors[0]}")
        return [
            self._draft(tokens.get(context.request_id), sampling, self._rows.get(context.request_id, []))
            for context, sampling in zip(contexts, params, strict=True)
        ]

    def _params(self, context: DraftContext) -> SamplingParams | None:
        """`count` likeliest tokens, or `count` + 1 drawn ones, as far as there is room; neither ends at an EOS."""
        params = context.params
        drawn = self.is_random and params.temperature != 0.0
        sizes = self._engine.scheduler.config
        longest = min(self._model.config.max_position_embeddings - 1, sizes.num_blocks * sizes.block_size)
        wanted = min(context.count + drawn, longest + 1 - len(context.token_ids))
        if wanted < 1:
            return None
        return SamplingParams(
            temperature=params.temperature if drawn else 0.0,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            banned_token_ids=params.banned_token_ids,
            max_tokens=wanted,
            ignore_eos=True,
            seed=draft_seed(context.seed, context.sample_index),
            profile=params.profile,
        )

    def _draft(self, ids: tuple[int, ...] | None, params: SamplingParams | None, rows: list[NDArray[Any]]) -> Draft:
        if ids is None or params is None:
            return Draft()
        if params.temperature == 0.0:
            return Draft(ids)
        return Draft(ids, tuple(distribution(row, params, (), (), ()) for row in rows))


def draft_seed(seed: int, sample_index: int) -> int:
    """The seed of a sample's guesses: SHA-256 over its seed and index, so that they do not depend on its own noise."""
    digest = hashlib.sha256(b"draft" + seed.to_bytes(8, "big") + sample_index.to_bytes(8, "big")).digest()
    return int.from_bytes(digest[:8], "big")


def require_same_vocabulary(model: LoadedModel, target: LoadedModel) -> None:
    """CheckpointError unless ids mean the same to both, as far as sizes and tokenizers tell."""
    mine, expected = model.config.vocab_size, target.config.vocab_size
    if mine != expected:
        raise CheckpointError(f"draft model {model.path}: vocab_size {mine}, expected {expected} as in {target.path}")
    if model.has_tokenizer and target.has_tokenizer:
        for token_id in range(mine):
            if model.tokenizer.token(token_id) != target.tokenizer.token(token_id):
                raise CheckpointError(
                    f"draft model {model.path}: token {token_id} is {model.tokenizer.token(token_id)!r}, "
                    f"expected {target.tokenizer.token(token_id)!r} as in {target.path}"
                )
