"""`lfm2np.load(path)`: a model that answers by itself, by the reference and by the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel, read_model
from lfm2np.engine import generation
from lfm2np.engine.digest import digest
from lfm2np.engine.generation import Completion, GeneratedToken
from lfm2np.engine.teacher_forcing import TokenScore, score
from lfm2np.errors import RequestError
from lfm2np.truth import reference
from lfm2np.values import Progress


class Model(LoadedModel):
    """A loaded checkpoint under one arithmetic. Prompts are text or token ids; text gets its BOS from the tokenizer.

    `logits`, `score` and `digest` are those of reference.py; `generate` and `stream` are the engine's, with its cache.
    """

    def logits(self, prompt: str | Sequence[int]) -> NDArray[Any]:
        """Logits [T, V], float32 (float64 under `float64`), of a sequence from position 0 on; row t predicts t + 1.

        RequestError for no tokens, more than `max_position_embeddings`, or an id outside the vocabulary.
        """
        ids = self.prompt_ids(prompt)
        if len(ids) > self.config.max_position_embeddings:
            raise RequestError(
                f"{len(ids)} tokens: expected at most max_position_embeddings={self.config.max_position_embeddings}"
            )
        return reference.logits(self.weights, self.config, self.numerics, ids)

    def score(self, prompt: str | Sequence[int]) -> list[TokenScore]:
        """Log-probability, rank and margin of every token but the first, given those before it."""
        return score(self.weights, self.config, self.numerics, self.prompt_ids(prompt))

    def digest(self) -> str:
        """SHA-256 of the logits' bits for a fixed set of prompts: under `exact` the same on every machine."""
        return digest(self.weights, self.config, self.numerics)

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 64,
        logprobs: int | None = None,
        progress: Progress | None = None,
    ) -> Iterator[GeneratedToken]:
        """Greedy tokens as they come, each with the logits [V] it was chosen from; see `generate`.

        `progress(done, total)` counts the layers of each step: the prompt's first, in chunks, then one a token.
        """
        return generation.stream(self, self.prompt_ids(prompt), max_tokens, logprobs, progress)

    def generate(self, prompt: str | Sequence[int], max_tokens: int = 64, logprobs: int | None = None) -> Completion:
        """Greedy continuation until an end-of-sequence token, `max_tokens` or the model's longest context.

        `logprobs` K adds the K most likely tokens at each position. Without a tokenizer, `text` is None.
        """
        tokenizer = self.tokenizer_or_none  # a corrupt one shows before the work, not after
        ids = self.prompt_ids(prompt)
        return generation.collect(ids, self.stream(ids, max_tokens, logprobs), tokenizer)


def load(
    path: str | Path | None = None,
    numerics: str = "exact",
    progress: Progress | None = None,
    weights: str = "resident",
    tokenizer: str | Path | None = None,
    rope: str = "trained",
) -> Model:
    """The model in a checkpoint directory or GGUF file (without a path: the trained fixture) under one arithmetic.

    numerics  "exact" (default), "float32", "float64" or "bfloat16"
    progress  called with (matrices done, matrices in all)
    weights   "resident" in memory (8 bytes each in exact), or "streamed": kept as stored and widened for each product,
              piece by piece, which is slower and takes little memory
    tokenizer a directory whose tokenizer.json (and chat template) is taken, not the checkpoint's own
    rope      how a partial rotation is read that an LFM3's config.json labels "default": as it was "trained", or as
              "transformers" computes it, which rotates the whole head
    errors    ConfigError, CheckpointError, NumericsError, RequestError: all of them Lfm2npError. The tokenizer is
              read when it is first needed: TokenizerError then
    """
    loaded = read_model(path, numerics, progress, weights, tokenizer, rope)
    return Model(**{field.name: getattr(loaded, field.name) for field in fields(loaded)})
