"""Which files a checkpoint's numbers come from, and the hash that says whether two directories hold the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lfm2np.checkpoint.strict_json import is_present, read_object
from lfm2np.checkpoint.tensors import INDEX, SINGLE
from lfm2np.errors import CheckpointError


def weight_files(directory: Path) -> list[str]:
    """As tensors.py chooses them: the single file, else the index and its shards."""
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


def checkpoint_sha256(directory: Path) -> str:
    """SHA-256, in hex, of config.json and the weight files: of one line "SHA-256  name" each, as sha256sum has them."""
    names = ["config.json", *weight_files(directory)]
    lines = "".join(f"{file_sha256(directory / name)}  {name}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()
