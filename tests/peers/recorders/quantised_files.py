"""GGUF files quantised by llama.cpp's own library, and such files with one tensor's scales exchanged."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from random_checkpoint import random_checkpoint

from lfm2np.checkpoint.gguf.container import open_container
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED

FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12}
FILE_TYPES |= {"Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30}  # enum llama_ftype
WIDE = {  # superblocks need rows of 256
    "model_type": "lfm2",
    "vocab_size": 400,
    "hidden_size": 256,
    "intermediate_size": 512,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def wide_checkpoint(directory: Path) -> Path:
    random_checkpoint(directory, WIDE)
    return directory


def quantise(source: Path, target: Path, name: str) -> Path:
    """Of a file in F32."""
    from llama_cpp import llama_cpp as api

    settings = api.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = FILE_TYPES[name], 1
    assert api.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings)) == 0
    return target


def with_neighbours_scales(source: Path, target: Path, tensor: str) -> Path:
    """A copy in which each block of that tensor has the scales of the block before it in its row."""
    stored, content = open_container(source).tensors[tensor], bytearray(source.read_bytes())
    kind, rows = QUANTISED[stored.dtype], np.ascontiguousarray(*stored.arrays)
    at = content.index(rows.tobytes())
    blocks = rows.reshape(len(rows), -1, kind.size)
    damaged = blocks.copy()
    for half in kind.halves:
        damaged[:, :, half : half + 2] = np.roll(blocks[:, :, half : half + 2], 1, axis=1)
    content[at : at + rows.size] = damaged.tobytes()
    target.write_bytes(content)
    return target
