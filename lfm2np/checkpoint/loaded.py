"""From a checkpoint to what computes: config, weights prepared for one arithmetic, tokenizer."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from lfm2np.arithmetic import TRUTH, Numerics, numerics_named
from lfm2np.arithmetic.products.exactness import require_exact_products
from lfm2np.checkpoint.config_json import READINGS
from lfm2np.checkpoint.files import (
    GGUF,
    checkpoint_sha256,
    has_tokenizer,
    is_gguf,
    read_config,
    read_tensors,
    read_tokenizer,
    tokenizer_place,
)
from lfm2np.checkpoint.strict_json import is_directory, is_present
from lfm2np.checkpoint.text.tokenizer import Tokenizer, require_ids
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.errors import CheckpointError, RequestError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import parameter_count
from lfm2np.truth.processor import require_ieee
from lfm2np.truth.weights import ModelWeights
from lfm2np.values import Progress

WEIGHTS = ("resident", "streamed")
PUBLISHED = r"LFM\d(\.\d)?-[\d.]+[MB](-[A-Z]\w*)*"  # LFM2-350M, LFM2-8B-A1B, LFM2.5-1.2B-Instruct
MOST_PARAMETERS = 5 * 10**8  # whose weights are kept a second time, as integers of 8 bytes
MOST_PRODUCTS = 2 * 10**10  # of a request in integers: some 20 seconds


@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel:
    """A checkpoint under one arithmetic: all that the engine needs. lfm2np.Model is one that answers by itself."""

    path: Path
    config: ModelConfig
    numerics: Numerics
    weights: ModelWeights
    where_weights: str = "resident"  # or "streamed": see read_model
    tokenizer_directory: Path | None = None  # whose tokenizer.json is taken, if it is not the checkpoint's own
    rope: str = "trained"  # see read_model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, numerics={self.numerics.name!r})"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read when first needed, so that a checkpoint without one still takes token ids."""
        return read_tokenizer(self.path, self.config, self.tokenizer_directory)

    @cached_property
    def has_tokenizer(self) -> bool:
        """Whether there is one; it is read, and may turn out corrupt, when `tokenizer` is first used."""
        return has_tokenizer(self.path, self.tokenizer_directory)

    @property
    def tokenizer_or_none(self) -> Tokenizer | None:
        return self.tokenizer if self.has_tokenizer else None

    @cached_property
    def sha256(self) -> str:
        """Of config.json and the weight files, or of the GGUF: which checkpoint this is, wherever it lies.

        Another where a reading of its rotation makes another network of the same files: results must not be mixed.
        """
        of_files = checkpoint_sha256(self.path)
        is_read_otherwise = self.config.is_rope_relabelled and self.rope != READINGS[0]
        return hashlib.sha256(f"{of_files} {self.rope}".encode()).hexdigest() if is_read_otherwise else of_files

    def truth_of(self, num_tokens: int) -> Self:
        """What a sequence of so many tokens is compared with: this checkpoint in `integers`, whatever `exact` does.

        Itself, so that reference.py computes in the same arithmetic, if that is not `exact`, or where integers would
        take too long or too much memory: then one that computes by itself shares the arithmetic with what it judges.
        """
        count = parameter_count(self.config, active=True)
        fits = parameter_count(self.config) <= MOST_PARAMETERS and count * num_tokens <= MOST_PRODUCTS
        return self._in_integers if self.numerics.name == "exact" and fits else self

    @cached_property
    def _in_integers(self) -> Self:
        arithmetic = numerics_named(TRUTH)
        weights = prepare_weights(read_tensors(self.path, self.config), self.config, arithmetic)
        return replace(self, numerics=arithmetic, weights=weights, where_weights="resident")

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return require_ids(ids, self.config.vocab_size)

    def room_after(self, prompt_ids: Sequence[int]) -> int:
        """How many tokens may follow a prompt. RequestError if none, as the longest context is full."""
        room = self.config.max_position_embeddings - len(prompt_ids)
        if room < 1:
            raise RequestError(
                f"prompt of {len(prompt_ids)} tokens: expected fewer than "
                f"max_position_embeddings={self.config.max_position_embeddings}"
            )
        return room


def trained_fixture() -> Path:
    """The small trained model that comes with the package."""
    return _fixture("trained")


def draft_fixture() -> Path:
    """The smaller one, of the same vocabulary, that drafts for it."""
    return _fixture("draft")


def moe_fixture() -> Path:
    """The trained mixture of experts, of the same vocabulary."""
    return _fixture("moe")


def lfm3_fixture() -> Path:
    """The trained LFM3, of the same vocabulary."""
    return _fixture("lfm3")


def chat_fixture() -> Path:
    """The one that calls tools; its tokenizer is its own."""
    return _fixture("chat")


def hand_fixture() -> Path:
    """The model of the drawings whose numbers fit on paper; it has no tokenizer, its words are in words.json."""
    return _fixture("hand")


def _fixture(name: str) -> Path:
    packaged = Path(__file__).parents[1] / "_fixtures" / name
    checkout = Path(__file__).parents[2] / "fixtures" / name
    for path in (packaged, checkout):
        if path.is_dir():
            return path
    raise CheckpointError(f"{packaged}: the {name} fixture is not in this installation; name a model directory")


def checkpoint_path(path: str | Path | None) -> Path:
    """The directory or GGUF file named, or the trained fixture; CheckpointError unless it is one."""
    if path is not None and not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"{path!r}: expected the path of a directory, or of a GGUF file")
    place = trained_fixture() if path is None else Path(path)
    if not is_directory(place, CheckpointError) and not (is_gguf(place) and is_present(place, CheckpointError)):
        expected = "expected one with config.json and model.safetensors, or a GGUF file"
        raise CheckpointError(f"{place}: not a directory, {expected}{how_to_get(place)}")
    return place


def how_to_get(place: Path) -> str:
    """The command that fetches what is named as Liquid AI names its checkpoints; "" for another name."""
    name, _, number_format = place.stem.rpartition("-") if place.suffix == GGUF else (place.name, "", "")
    if not re.fullmatch(PUBLISHED, name):
        return ""
    words = [f"LiquidAI/{name}", "--local-dir", str(place)]
    if number_format:
        words = [f"LiquidAI/{name}-GGUF", place.name, "--local-dir", str(place.parent)]
    return f"; to fetch it (hf: pip install huggingface_hub): hf download {shlex.join(words)}"


def read_model(
    path: str | Path | None = None,
    numerics: str = "exact",
    progress: Progress | None = None,
    weights: str = "resident",
    tokenizer: str | Path | None = None,
    rope: str = "trained",
) -> LoadedModel:
    """What lfm2np.load says, without the conveniences of lfm2np.Model."""
    arithmetic = numerics_named(numerics)
    if rope not in READINGS:
        raise RequestError(f"rope {rope!r}: expected one of {', '.join(READINGS)}")
    if weights not in WEIGHTS:
        raise RequestError(f"weights {weights!r}: expected one of {', '.join(WEIGHTS)}")
    if arithmetic.name == TRUTH and weights == "streamed":
        raise RequestError(f"weights 'streamed': expected resident weights for numerics {TRUTH!r}")
    require_ieee()
    if arithmetic.name == "exact":
        require_exact_products()
    place, directory = checkpoint_path(path), tokenizer_place(tokenizer)
    config = read_config(place, rope)
    prepared = prepare_weights(read_tensors(place, config), config, arithmetic, progress, weights == "streamed")
    return LoadedModel(place, config, arithmetic, prepared, weights, directory, rope)
