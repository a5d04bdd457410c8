"""GGUF files of random weights, beside what gguf_file.py writes."""

from __future__ import annotations

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

__all__ = ["ARRAY", "BOOL", "F32", "I32", "LETTERS", "STRING", "U32", "Key", "Tensor", "gguf_bytes", "header", "info"]
__all__ += ["model_keys", "model_tensors", "padded", "quantised_tensors", "string", "value"]


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
