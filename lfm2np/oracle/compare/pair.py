"""Whether two checkpoints are the same network, up to the rounding of its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from lfm2np.checkpoint.files import checkpoint_sha256, has_tokenizer, read_config, read_tensors, read_tokenizer
from lfm2np.checkpoint.loaded import LoadedModel, checkpoint_path
from lfm2np.errors import RequestError
from lfm2np.truth.config import ModelConfig
from lfm2np.values import show

FREE = {  # may differ; a GGUF's experts have their scale in their weights
    *("max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_ids", "pad_token_id"),
    *("model_type", "is_rope_relabelled", "is_sliding_factor_ignored", "routed_scaling_factor"),
}


@dataclass(frozen=True, eq=False)
class Files:
    """A checkpoint that need not be loaded. bits_a_weight: of the file, over all tensors; a tied head counts once."""

    path: Path
    config: ModelConfig
    bits_a_weight: float

    @cached_property
    def sha256(self) -> str:
        return checkpoint_sha256(self.path)


def files_of(path: str | Path | None) -> Files:
    """ConfigError or CheckpointError names the file."""
    place = checkpoint_path(path)
    config = read_config(place)
    tensors = {id(tensor.values): tensor for tensor in read_tensors(place, config).values()}.values()
    weights = sum(math.prod(tensor.shape) for tensor in tensors)
    return Files(place, config, 8 * sum(tensor.values.nbytes for tensor in tensors) / weights)


def require_same_network(base: Files, other: Files) -> None:
    """RequestError names the first difference between the networks.

    The scale of the experts' outputs may be part of their weights; contexts and special tokens may differ, too.
    """
    for (name, expected), (_, actual) in zip_longest(network(base.config), network(other.config), fillvalue=("", "")):
        if actual != expected:
            raise RequestError(f"{other.path}: {name}: {actual!s}, expected {expected!s}, as {base.path} has it")


def network(config: ModelConfig) -> list[tuple[str, Any]]:
    """What makes it this network, in the same order for all; real numbers as a GGUF keeps them, in float32."""
    fields = {name: value for name, value in asdict(config).items() if name not in FREE}
    layers, mixture = fields.pop("layer_types"), fields.pop("mixture")
    fields = {name: np.float32(value) if isinstance(value, float) else value for name, value in fields.items()}
    kinds = {f"layer_types[{index}]": kind for index, kind in enumerate(layers)}
    feed_forward = {"feed-forward": "mixture of experts" if mixture else "dense", **(mixture or {})}
    return [item for item in (fields | kinds | feed_forward).items() if item[0] not in FREE]


def require_same_tokens(base: LoadedModel, other: Files) -> None:
    """RequestError for the first id that means something else; checkpoints without a tokenizer pass."""
    if not base.has_tokenizer or not has_tokenizer(other.path):
        return
    tokenizer = read_tokenizer(other.path, other.config)
    for token_id in range(base.config.vocab_size):
        expected, actual = base.tokenizer.token(token_id), tokenizer.token(token_id)
        if actual != expected:
            difference = f"token {token_id}: {show(actual)}, expected {show(expected)}"
            raise RequestError(f"{other.path}: {difference}, as {base.path} has it")


def longest(base: ModelConfig, others: Sequence[Files]) -> int:
    """The longest context that all of them hold."""
    return min(config.max_position_embeddings for config in (base, *(other.config for other in others)))
