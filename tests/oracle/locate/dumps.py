"""Recorded activations for the tests of `locate`, in memory and as files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Stored, safetensors_bytes, stored

from lfm2np.arithmetic.ieee import FLOAT32
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine.loading import Model
from lfm2np.oracle.judging.emulate import Emulated
from lfm2np.oracle.locate.dump import Dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.recorders.lfm2np_recorder import record
from lfm2np.truth import reference
from lfm2np.truth.config import ModelConfig

FIXTURES = Path(__file__).parents[3] / "fixtures"
DIRECTORIES = [FIXTURES / "trained", *sorted(path for path in (FIXTURES / "torture").iterdir() if path.is_dir())]
SIX = FIXTURES / "torture" / "six_heads_two_kv"
Recorded = dict[str, np.ndarray]


@cache
def checkpoint(directory: Path) -> tuple[ModelConfig, Mapping[str, StoredTensor]]:
    config = load_config(directory)
    return config, open_checkpoint(directory, config)


def recorded_under(directory: Path, numerics: Any, length: int = 24) -> Recorded:
    """With a token that is repeated, whose errors repeat too."""
    config, tensors = checkpoint(directory)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, length)
    ids[length // 2 :: 3] = ids[1]
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(numerics, Emulated):
            patch.setattr(reference, "rotary_table", numerics.rotary_table)
        return record(Model(directory, config, numerics, prepare_weights(tensors, config, numerics)), ids.tolist())


@cache
def six_heads() -> Recorded:
    return recorded_under(SIX, FLOAT32, 12)


@cache
def six_heads_with_all() -> Recorded:
    """With what an engine of one step finds in its caches, and the inside of attention, worked out here in float64."""
    recorded = dict(six_heads())
    heads, groups, head_dim = 6, 2, 10
    for name in list(recorded):
        layer, _, part = name.rpartition(".")
        if name.endswith(".conv.u"):
            recorded[f"{layer}.state"] = np.zeros((1, 2 * recorded[name].shape[1]), np.float32)
        if part == "q_rotated":
            keys, tokens = recorded[f"{layer}.k_rotated"], len(recorded[name])
            recorded[f"{layer}.keys_read"], recorded[f"{layer}.values_read"] = keys, recorded[f"{layer}.v_proj"]
            each = np.repeat(keys.reshape(tokens, groups, head_dim), heads // groups, axis=1).astype(np.float64)
            scores = np.einsum("the,che->thc", recorded[name].reshape(tokens, heads, head_dim), each) / head_dim**0.5
            scores[~np.tri(tokens, dtype=bool)[:, None].repeat(heads, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            recorded[f"{layer}.scores"] = np.where(np.isinf(scores), 0.0, scores).reshape(tokens, -1)
            recorded[f"{layer}.weights"] = weights.reshape(tokens, -1)
    return recorded


def dump_of(recorded: Recorded, stored_as: str) -> Dump:
    dumped = {key: values.astype(np.float64) for key, values in recorded.items() if key not in ("token_ids", "steps")}
    sizes = tuple(recorded.get("steps", np.zeros(0)).tolist())
    return Dump(recorded["token_ids"], dumped, dict.fromkeys(dumped, stored_as), sizes=sizes)


def report_of(directory: Path, recorded: Recorded, name: str, stored_as: str | None = None) -> Report:
    config, tensors = checkpoint(directory)
    return locate(tensors, config, dump_of(recorded, stored_as or name), name)


def stored_dump(recorded: Recorded, dtype: str = "F32") -> dict[str, Stored]:
    tensors = {name: stored(values, dtype) for name, values in recorded.items() if name != "token_ids"}
    ids = recorded["token_ids"]
    return tensors | {"token_ids": ("I64", ids.shape, ids.astype("<i8").tobytes())}


def written(path: Path, tensors: dict[str, Stored]) -> Path:
    file = path / "dump.safetensors"
    file.write_bytes(safetensors_bytes(tensors))
    return file
