"""From a checkpoint directory to a model that answers: `lfm2np.load(path)`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from lfm2np import reference
from lfm2np.checkpoint import open_checkpoint
from lfm2np.checkpoint_files import checkpoint_sha256
from lfm2np.config import ModelConfig, load_config
from lfm2np.digest import digest
from lfm2np.errors import CheckpointError, RequestError, TokenizerError
from lfm2np.generation import Completion, GeneratedToken, collect, stream
from lfm2np.numerics import Numerics, numerics_named
from lfm2np.numerics.machine import require_exact_product, require_ieee
from lfm2np.progress import Progress
from lfm2np.scoring import TokenScore, score
from lfm2np.strict_json import is_directory, is_present
from lfm2np.tokenizer import Tokenizer, load_tokenizer, require_ids
from lfm2np.weights import ModelWeights, prepare_weights

WEIGHTS = ("resident", "streamed")


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A loaded checkpoint under one arithmetic. Prompts are text or token ids; text gets its BOS from the tokenizer."""

    path: Path
    config: ModelConfig
    numerics: Numerics
    weights: ModelWeights
    where_weights: str = "resident"  # or "streamed": see load

    def __repr__(self) -> str:
        return f"Model({str(self.path)!r}, numerics={self.numerics.name!r})"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read when first needed, so that a checkpoint without one still takes token ids."""
        return load_tokenizer(self.path, self.config)

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

    @cached_property
    def sha256(self) -> str:
        """Of config.json and the weight files: which checkpoint this is, whatever its directory is called."""
        return checkpoint_sha256(self.path)

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 64,
        logprobs: int | None = None,
        progress: Progress | None = None,
    ) -> Iterator[GeneratedToken]:
        """Greedy tokens as they come, each with the logits [V] it was chosen from; see `generate`.

        `progress(done, total)` counts the layers of each token's pass.
        """
        ids = self.prompt_ids(prompt)
        return stream(self.weights, self.config, self.numerics, ids, max_tokens, logprobs, progress)

    def generate(self, prompt: str | Sequence[int], max_tokens: int = 64, logprobs: int | None = None) -> Completion:
        """Greedy continuation until an end-of-sequence token, `max_tokens` or the model's longest context.

        `logprobs` K adds the K most likely tokens at each position. Without a tokenizer.json, `text` is None.
        """
        tokenizer = self.tokenizer if self.has_tokenizer else None  # a corrupt one shows before the work, not after
        ids = self.prompt_ids(prompt)
        return collect(ids, self.stream(ids, max_tokens, logprobs), tokenizer)

    @cached_property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer.json; it is read, and may turn out corrupt, when `tokenizer` is first used."""
        return is_present(self.path / "tokenizer.json", TokenizerError)

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, checked."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return require_ids(ids, self.config.vocab_size)


def trained_fixture() -> Path:
    """The small trained model that comes with the package."""
    return _fixture("trained")


def draft_fixture() -> Path:
    """The smaller one, of the same vocabulary, that drafts for it."""
    return _fixture("draft")


def hand_fixture() -> Path:
    """The model of the drawings whose numbers fit on paper; it has no tokenizer, its words are in words.json."""
    return _fixture("hand")


def _fixture(name: str) -> Path:
    packaged = Path(__file__).parent / "_fixtures" / name
    checkout = Path(__file__).parent.parent / "fixtures" / name
    for path in (packaged, checkout):
        if path.is_dir():
            return path
    raise CheckpointError(f"{packaged}: the {name} fixture is not in this installation; name a model directory")


def checkpoint_directory(path: str | Path | None) -> Path:
    """The directory named, or the trained fixture; CheckpointError unless it is one."""
    if path is not None and not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"{path!r}: expected the path of a directory")
    directory = trained_fixture() if path is None else Path(path)
    if not is_directory(directory, CheckpointError):
        raise CheckpointError(f"{directory}: not a directory, expected one with config.json and model.safetensors")
    return directory


def load(
    path: str | Path | None = None,
    numerics: str = "exact",
    progress: Progress | None = None,
    weights: str = "resident",
) -> Model:
    """The model in a checkpoint directory (without a path: the trained fixture) under one arithmetic.

    numerics  "exact" (default), "float32", "float64" or "bfloat16"
    progress  called with (matrices done, matrices in all)
    weights   "resident" in memory (8 bytes each in exact), or "streamed": kept as stored and widened for each product,
              piece by piece, which is slower and takes little memory
    errors    ConfigError, CheckpointError, NumericsError, RequestError: all of them Lfm2npError. The tokenizer is
              read when it is first needed: TokenizerError then
    """
    arithmetic = numerics_named(numerics)
    if weights not in WEIGHTS:
        raise RequestError(f"weights {weights!r}: expected one of {', '.join(WEIGHTS)}")
    require_ieee()
    require_exact_product()
    directory = checkpoint_directory(path)
    config = load_config(directory)
    tensors = open_checkpoint(directory, config)
    prepared = prepare_weights(tensors, config, arithmetic, progress, weights == "streamed")
    return Model(directory, config, arithmetic, prepared, weights)
