"""Recorded activations for the tests of `locate`, in memory and as files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Stored, safetensors_bytes, stored

import lfm2np
from lfm2np.arithmetic.ieee import FLOAT32
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine.drafters import ScriptedDrafter
from lfm2np.engine.loading import Model
from lfm2np.oracle.judging.emulate import Emulated
from lfm2np.oracle.locate.dump import Dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.recorders.lfm2np_recorder import RecordedEngine, record
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


# --- runs of our own engine whose activations are recorded: what faults are put into


TRAINED, BIASED, UNTIED, LFM3 = "trained", "torture/biased_two_taps", "torture/all_attention", "lfm3"


@cache
def loaded(name: str, numerics: str) -> Model:
    return lfm2np.load(FIXTURES / name, numerics)


def located(
    model: Model, recorded: Recorded, kept: Callable[[str], bool] = lambda name: True, stored: str = "float32"
) -> Report:
    chosen = {name: values for name, values in recorded.items() if name in ("token_ids", "steps") or kept(name)}
    return locate(open_checkpoint(model.path, model.config), model.config, dump_of(chosen, stored))


def up_to(tensor: str) -> Callable[[str], bool]:
    """What to keep if this is to be the first finding: the tensors of its layer and of those before it."""
    last = layer_of(tensor)
    return lambda name: last is None or name == "model.embed_tokens" or layer_of(name, last + 1) <= last


def layer_of(name: str, default: Any = None) -> Any:
    match = re.match(r"model\.layers\.(\d+)", name)
    return int(match[1]) if match else default


def prompt(seed: int, length: int, vocabulary: int = 60) -> list[int]:
    return [int(integer) for integer in np.random.default_rng(seed).integers(10, vocabulary, length)]


Asked = tuple[list[int], int] | tuple[list[int], int, dict[str, Any]]


def run_of(*requests: Asked, is_apart: bool = False, **sizes: Any) -> Callable[[Model], RecordedEngine]:
    """Requests a, b and c: their prompts, numbers of new tokens, and more parameters. `is_apart`: one after another."""

    def build(model: Model) -> RecordedEngine:
        run = RecordedEngine(model, **{"block_size": 4, "prefix_caching": False, **sizes})
        for name, (ids, new, *more) in zip("abc", requests, strict=False):
            run.add(name, ids, new, **dict(*more))
            if is_apart:
                run.run()
        return run

    return build


BEGIN, LONG_BEGIN = prompt(9, 8), prompt(9, 24, 44)
THRICE = {"n": 3, "temperature": 2.0, "seed": 1}
DRAFTS: dict[str, Any] = {"drafter": ScriptedDrafter({"a": prompt(7, 12)}), "num_speculative_tokens": 3}
WITH_A_PREFIX = (BEGIN + prompt(1, 5), 3), (BEGIN + prompt(2, 4), 3)
RUNS = {
    "in chunks": run_of((prompt(1, 13), 5), max_num_batched_tokens=5),
    "token by token": run_of((prompt(1, 6), 3), max_num_batched_tokens=1),
    "with neighbours": run_of((prompt(0, 9), 2), (prompt(1, 5), 4), (prompt(2, 7), 6)),
    "one after another": run_of((prompt(1, 9), 3), (prompt(2, 6), 3), (prompt(3, 1), 3), max_num_seqs=1),
    "after a hit": run_of(*WITH_A_PREFIX, is_apart=True, prefix_caching=True, max_num_batched_tokens=20),
    "a shared prefix": run_of(*WITH_A_PREFIX, prefix_caching=True),
    "at length": run_of((prompt(1, 90), 3), block_size=16, max_num_batched_tokens=48),
    "sampled thrice": run_of((prompt(1, 9), 4, THRICE)),
    "wrong drafts": run_of((prompt(1, 9), 8), **DRAFTS),
    # past an LFM3's window, of 16 positions
    "window, in chunks": run_of((prompt(1, 33, 44), 12), (prompt(2, 29, 44), 12), max_num_batched_tokens=10),
    "window, sampled thrice": run_of((prompt(1, 26, 44), 6, THRICE)),
    # the pool of the layers with a window is small: what b would need of its prefix there is gone
    "window, a lost prefix": run_of(
        (LONG_BEGIN + prompt(1, 40, 44), 3),
        (LONG_BEGIN + prompt(2, 6, 44), 3),
        is_apart=True,
        prefix_caching=True,
        num_window_blocks=14,
        max_num_batched_tokens=20,
    ),
}


def rows_of(model: Model, run: str, request: str) -> Recorded:
    """Of a request of a run; a#1 is the second sample of a."""
    engine = RUNS[run](model)
    engine.run()
    name, _, index = request.partition("#")
    return engine.dump(name, int(index or 0))
