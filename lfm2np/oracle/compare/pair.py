"""Whether two checkpoints are the same network, up to the rounding of its weights; and the parts to measure
separately.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from lfm2np.checkpoint.files import has_tokenizer, read_config, read_tensors, read_tokenizer
from lfm2np.checkpoint.loaded import LoadedModel, checkpoint_path
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import RequestError
from lfm2np.truth.config import MixtureConfig, ModelConfig
from lfm2np.truth.layers import expected_tensors
from lfm2np.truth.weights import EMBEDDING, HEAD
from lfm2np.values import show

BY = ("layer", "tensor", "none")
REALS = (
    *("norm_eps", "rope_theta", "partial_rotary_factor"),
    *("sliding_rope_theta", "sliding_partial_rotary_factor"),
)  # a GGUF keeps them as float32
APART = ("layer_types", "mixture", *REALS)  # compared by themselves
FREE = (
    *("max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_ids", "pad_token_id"),
    *("model_type", "is_rope_relabelled", "is_sliding_factor_ignored", "routed_scaling_factor"),
)  # may differ
SIZES, MIXTURE = (
    [field.name for field in fields(kind) if field.name not in (*APART, *FREE)] for kind in (ModelConfig, MixtureConfig)
)
FINAL_NORM = "model.embedding_norm.weight"
LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
EXPERT = re.compile(r"experts\.[0-9]+\.")


@dataclass(frozen=True, eq=False)
class Files:
    """A checkpoint whose weights are read when needed. tensors: HEAD is the embedding's if it is tied."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]

    def factor(self, name: str) -> float:
        """A factor of the network that is not in the stored tensor: outputs of experts, in their last matrix."""
        mixture = self.config.mixture
        return mixture.routed_scaling_factor if mixture and is_experts_output(name) else 1.0


@dataclass(frozen=True)
class Part:
    """Tensors that are taken from the quantised checkpoint together, in a network that is otherwise the base."""

    name: str
    tensors: tuple[str, ...]
    layer: int | None  # None: the embedding, the last norm or the head


def files_of(path: str | Path | None) -> Files:
    """ConfigError or CheckpointError names the file."""
    place = checkpoint_path(path)
    config = read_config(place)
    return Files(place, config, with_head(read_tensors(place, config), config))


def with_head(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    ordered = {name: tensors[name] for name in expected_tensors(config)}
    return {**ordered, HEAD: tensors.get(HEAD, tensors[EMBEDDING])}


def is_experts_output(name: str) -> bool:
    return ".experts." in name and name.endswith(".w2.weight")


# --- the same network


def require_same_network(base: Files, other: Files) -> None:
    """RequestError names the first difference between the networks.

    The scale of the experts' outputs may be part of their weights; contexts and special tokens may differ, too.
    """
    ours, theirs = base.config, other.config
    for name in SIZES:
        require(name, getattr(ours, name), getattr(theirs, name), base, other)
    for index, (kind, other_kind) in enumerate(zip(ours.layer_types, theirs.layer_types, strict=True)):
        require(f"layer_types[{index}]", kind, other_kind, base, other)
    for name in REALS:
        if np.float32(getattr(ours, name)) != np.float32(getattr(theirs, name)):
            require(name, getattr(ours, name), getattr(theirs, name), base, other)
    kind, other_kind = ("dense" if config.mixture is None else "mixture of experts" for config in (ours, theirs))
    require("feed-forward", kind, other_kind, base, other)
    for name in MIXTURE if ours.mixture and theirs.mixture else ():
        require(name, getattr(ours.mixture, name), getattr(theirs.mixture, name), base, other)


def require(name: str, expected: object, actual: object, base: Files, other: Files) -> None:
    if actual != expected:
        raise RequestError(f"{other.path}: {name}: {actual}, expected {expected}, as {base.path} has it")


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


def longest(base: ModelConfig, others: Sequence[ModelConfig]) -> int:
    return min(config.max_position_embeddings for config in (base, *others))


# --- parts


def parts_of(base: ModelConfig, other: ModelConfig, names: Sequence[str], by: str) -> list[Part]:
    """All tensors, in the network's order, each in one part. A layer's experts are one tensor, as in a GGUF file.

    An embedding that is the head in both checkpoints is one tensor, with the cost of both uses.
    """
    grouped: dict[str, list[str]] = {}
    for name in names:
        if not (name == HEAD and base.tie_word_embeddings and other.tie_word_embeddings):
            grouped.setdefault(part_name(name, by), []).append(name)
    if by == "none":
        return []
    parts = []
    for part, tensors in grouped.items():
        both = tensors[0] == EMBEDDING and base.tie_word_embeddings and other.tie_word_embeddings
        layer = LAYER.fullmatch(tensors[0])
        parts.append(Part(part, (*tensors, *([HEAD] if both else [])), int(layer[1]) if layer else None))
    return parts


def part_name(name: str, by: str) -> str:
    layer = LAYER.fullmatch(name)
    if by == "tensor":
        return EXPERT.sub("experts.", name)
    if layer:
        return f"layer {layer[1]}"
    return {EMBEDDING: "embedding", FINAL_NORM: "final norm", HEAD: "head"}[name]
