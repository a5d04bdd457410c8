"""A checkpoint of either form, a directory in the Hugging Face format or a GGUF file: config, tensors, files, hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lfm2np.checkpoint.config import ModelConfig, load_config
from lfm2np.checkpoint.gguf.container import open_container
from lfm2np.checkpoint.gguf.names import named_tensors
from lfm2np.checkpoint.gguf.settings import config_of
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.strict_json import is_present, read_object
from lfm2np.checkpoint.tensors import INDEX, SINGLE, open_checkpoint
from lfm2np.errors import CheckpointError

GGUF = ".gguf"


def is_gguf(path: Path) -> bool:
    """By its name; whether it is there, and what is in it, shows when it is read."""
    return path.suffix == GGUF and not path.is_dir()


def directory_of(path: Path) -> Path:
    """Where tokenizer.json and the like stand: in the directory, or beside the file."""
    return path.parent if is_gguf(path) else path


def read_config(path: Path) -> ModelConfig:
    """ConfigError or CheckpointError names the file."""
    return config_of(open_container(path)) if is_gguf(path) else load_config(path)


def read_tensors(path: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Name -> tensor for exactly `expected_tensors(config)`; CheckpointError names the file."""
    return named_tensors(open_container(path), config) if is_gguf(path) else open_checkpoint(path, config)


def config_file(path: Path) -> Path:
    """What says the config: config.json, or the GGUF itself."""
    return path if is_gguf(path) else path / "config.json"


def weight_files(path: Path) -> list[str]:
    """The GGUF and its splits; or as tensors.py chooses them: the single file, else the index and its shards."""
    if is_gguf(path):
        return [one.name for one in open_container(path).paths]
    directory = path
    if is_present(directory / SINGLE, CheckpointError):
        return [SINGLE]
    shards = read_object(directory / INDEX, CheckpointError)["weight_map"]
    assert isinstance(shards, dict), "the checkpoint was opened with it"
    return [INDEX, *sorted(set(shards.values()))]


def file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem}") from None


def checkpoint_sha256(path: Path) -> str:
    """SHA-256, in hex, of config.json and the weight files: of one line "SHA-256  name" each, as sha256sum has them."""
    names = weight_files(path) if is_gguf(path) else ["config.json", *weight_files(path)]
    lines = "".join(f"{file_sha256(directory_of(path) / name)}  {name}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()
