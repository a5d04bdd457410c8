"""Checkpoints with the shapes of published ones (350M: 0.7 GB, 8B-A1B: 16.7 GB), random weights, made once and kept.

Speed does not depend on what the weights are, only on their number format: bfloat16, as published, of which exact
arithmetic needs one slice. It is written beside its place and then put there, so that it is whole or not there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.config import parse_config
from lfm2np.checkpoint.lfm3 import in_file
from lfm2np.checkpoint.tensors import SINGLE
from lfm2np.errors import CheckpointError
from lfm2np.model.config import ModelConfig
from lfm2np.model.layers import expected_tensors
from lfm2np.progress import Progress

SEED = 350
ROWS = 2**12  # of a tensor, made at a time
# The published config.json of LFM2-350M, as far as it decides about shapes. Source: huggingface.co/LiquidAI/LFM2-350M
CONFIG: dict[str, object] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "intermediate_size": 6656,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 128000,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 7,
    "pad_token_id": 0,
}

# What differs in LFM2-2.6B. Source: huggingface.co/LiquidAI/LFM2-2.6B
LARGE_CONFIG: dict[str, object] = {
    **CONFIG,
    "hidden_size": 2048,
    "intermediate_size": 10752,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "full_attn_idxs": [2, 5, 9, 13, 17, 21, 24, 27],
}
# Source: huggingface.co/LiquidAI/LFM2-8B-A1B
MIXTURE_CONFIG: dict[str, object] = {
    **{key: value for key, value in CONFIG.items() if not key.startswith(("block_", "full_attn"))},
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_dense_layers": 2,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
}
# Two dense layers and two sparse ones: sides that hold all weights in 8 bytes fit into memory.
SHORT_MIXTURE_CONFIG: dict[str, object] = {
    **MIXTURE_CONFIG,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
# What LFM3-1.7B takes from the defaults of transformers 5.24 (models/lfm3/configuration_lfm3.py), its rotation in the
# reading of the trained weights.
LFM3_CONFIG: dict[str, object] = {
    "architectures": ["Lfm3ForCausalLM"],
    "model_type": "lfm3",
    "vocab_size": 128000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "layer_types": ["conv", "conv", "full_attention", "conv"]
    + ["sliding_attention", "conv", "full_attention", "conv"] * 5,
    "sliding_window": 256,
    "conv_L_cache": 7,
    "conv_bias": False,
    "attention_bias": False,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
    "norm_eps": 1e-05,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 124894,
    "eos_token_id": 124900,
    "pad_token_id": 124893,
}
SMALL, LARGE, LFM3 = "LFM2-350M", "LFM2-2.6B", "LFM3-1.7B"
MIXTURE, SHORT_MIXTURE = "LFM2-8B-A1B", "LFM2-8B-A1B-4-layers"
CONFIGS = {
    SMALL: CONFIG,
    LARGE: LARGE_CONFIG,
    LFM3: LFM3_CONFIG,
    MIXTURE: MIXTURE_CONFIG,
    SHORT_MIXTURE: SHORT_MIXTURE_CONFIG,
}


def cache_directory() -> Path:
    """Where this program keeps what it can make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lfm2np"


def random_checkpoint(
    directory: Path | None = None,
    raw: dict[str, object] | None = None,
    progress: Progress | None = None,
    name: str = SMALL,
) -> Path:
    """The directory of the checkpoint, made unless it is there, whole by the size of its files.

    raw       config.json; that of `name`, one of CONFIGS, if it is not given
    progress  called with (numbers done, numbers in all)
    errors    CheckpointError where it can't be written; an interrupt leaves nothing behind
    """
    raw = CONFIGS[name] if raw is None else raw
    place = cache_directory() / f"{name}-random" if directory is None else directory
    config = parse_config(raw, "config.json")
    text = json.dumps(raw, indent=2) + "\n"
    if is_whole(place, config, text):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(".part", f".{place.name}.", place.parent, ignore_cleanup_errors=True) as part:
            beside = Path(part) / place.name
            beside.mkdir()
            (beside / "config.json").write_text(text, encoding="utf-8")
            with (beside / SINGLE).open("xb") as file:
                write_tensors(file, config, progress)
            if place.is_dir():  # incomplete, or of another version
                shutil.rmtree(place)
            beside.rename(place)
    except OSError as problem:
        raise CheckpointError(f"{place}: can't be written: {problem.strerror or problem}") from None
    return place


def is_whole(place: Path, config: ModelConfig, text: str) -> bool:
    with contextlib.suppress(OSError):
        found = (place / "config.json").read_text(encoding="utf-8"), (place / SINGLE).stat().st_size
        return found == (text, len(file_header(config)) + 2 * num_weights(config))
    return False


def num_weights(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def file_header(config: ModelConfig) -> bytes:
    """The beginning of a safetensors file: the length of the header, and it. All tensors are bfloat16."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    called = in_file if config.model_type == "lfm3" else str
    for name, shape in expected_tensors(config).items():
        end = begin + 2 * math.prod(shape)
        header[called(name)] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_tensors(file: IO[bytes], config: ModelConfig, progress: Progress | None) -> None:
    rng = np.random.default_rng(SEED)
    done, total = 0, num_weights(config)
    file.write(file_header(config))
    for name, shape in expected_tensors(config).items():
        for rows in row_blocks(shape):
            weights = random_weights(rng, name, rows)
            file.write((weights.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes())
            done += weights.size
            if progress:
                progress(done, total)
    file.flush()
    os.fsync(file.fileno())


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for start in range(0, shape[0], ROWS):
        yield (min(ROWS, shape[0] - start), *shape[1:])


def random_weights(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Of a size that keeps activations near 1 and lets logits deviate by about 2."""
    normal = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return np.float32(1.0) + np.float32(0.1) * normal
    if name.endswith("embed_tokens.weight"):
        return normal * np.float32(2.0 / math.sqrt(shape[-1]))
    return normal * np.float32(1.0 / math.sqrt(shape[-1]))
