"""GGUF files of random weights, whole and in splits, beside what gguf_file.py writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from blocks_drawn import random_rows
from gguf_file import (
    ARRAY,
    BOOL,
    F32,
    I32,
    LETTERS,
    STRING,
    U32,
    Key,
    Tensor,
    gguf_bytes,
    header,
    info,
    model_keys,
    model_tensors,
    padded,
    string,
    value,
)

from lfm2np.checkpoint.gguf.ggml_types import QUANTISED
from lfm2np.truth.config import ModelConfig

__all__ = [
    "ARRAY",
    "BOOL",
    "F32",
    "I32",
    "LETTERS",
    "STRING",
    "U32",
    "Key",
    "Tensor",
    "gguf_bytes",
    "header",
    "info",
    "model_keys",
    "model_tensors",
    "padded",
    "quantised_tensors",
    "split_bytes",
    "string",
    "value",
    "write_splits",
]


def split_bytes(keys: Mapping[str, Key], tensors: Mapping[str, Tensor], count: int) -> list[bytes]:
    """As llama.cpp's gguf-split makes them: the first has all keys, the others only those of the split."""
    names, contents = list(tensors), []
    for number in range(count):
        split_keys = {"split.no": (2, number), "split.count": (2, count), "split.tensors.count": (I32, len(tensors))}
        part = {
            name: tensors[name] for name in names[number * len(names) // count : (number + 1) * len(names) // count]
        }
        contents.append(gguf_bytes({**(keys if number == 0 else {}), **split_keys}, part))
    return contents


def write_splits(directory: Path, contents: Sequence[bytes]) -> list[Path]:
    paths = [directory / f"x-{number + 1:05}-of-{len(contents):05}.gguf" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def quantised_tensors(
    config: ModelConfig, dtype: str, seed: int = 0, exponents: tuple[int, int] = (8, 11)
) -> dict[str, Tensor]:
    """Random blocks for every matrix, random float32 near 1 for all else; routers are float32 as llama.cpp has them."""
    random = np.random.default_rng(seed)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor_seed = int(random.integers(2**31))
        if len(shape) == 2 and "gate.weight" not in name and dtype in QUANTISED:
            return Tensor(dtype, shape, random_rows(dtype, shape, tensor_seed, exponents).tobytes())
        values = np.random.default_rng(tensor_seed).normal(0.0 if "gate" in name else 1.0, 0.1, shape)
        return Tensor("F32", shape, values.astype("<f4").tobytes())

    return model_tensors(config, made)
