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
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.config_json import parse_config
from lfm2np.checkpoint.lfm3 import in_file
from lfm2np.checkpoint.tensors import SINGLE
from lfm2np.errors import CheckpointError
from lfm2np.system import cache_directory
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors
from lfm2np.values import Progress

SEED = 350
ROWS = 2**12  # of a tensor, made at a time
SMALL, LARGE, LFM3 = "LFM2-350M", "LFM2-2.6B", "LFM3-1.7B"
MIXTURE, SHORT_MIXTURE = "LFM2-8B-A1B", "LFM2-8B-A1B-4-layers"


def published_config(name: str) -> dict[str, object]:
    """config.json of one of the names above, as far as it decides about shapes.

    Source: huggingface.co/LiquidAI/NAME; of LFM3-1.7B the defaults of transformers 5.24, its rotation in the reading of
    the trained weights. Of the short mixture's layers two are dense and two sparse: sides that hold all weights in 8
    bytes fit into memory.
    """
    text = (resources.files("lfm2np.commands.bench") / "configs" / f"{name}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def random_checkpoint(
    directory: Path | None = None,
    raw: dict[str, object] | None = None,
    progress: Progress | None = None,
    name: str = SMALL,
) -> Path:
    """The directory of the checkpoint, made unless it is there, whole by the size of its files.

    raw       config.json; that of `name` if it is not given: see published_config
    progress  called with (numbers done, numbers in all)
    errors    CheckpointError where it can't be written; an interrupt leaves nothing behind
    """
    raw = published_config(name) if raw is None else raw
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
        written = (place / "config.json").read_text(encoding="utf-8"), (place / SINGLE).stat().st_size
        return written == (text, len(file_header(config)) + 2 * num_weights(config))
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
        for start in range(0, shape[0], ROWS):
            weights = random_weights(rng, name, (min(ROWS, shape[0] - start), *shape[1:]))
            file.write((weights.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes())
            done += weights.size
            if progress:
                progress(done, total)
    file.flush()
    os.fsync(file.fileno())


def random_weights(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Of a size that keeps activations near 1 and lets logits deviate by about 2."""
    normal = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return np.float32(1.0) + np.float32(0.1) * normal
    if name.endswith("embed_tokens.weight"):
        return normal * np.float32(2.0 / math.sqrt(shape[-1]))
    return normal * np.float32(1.0 / math.sqrt(shape[-1]))
