"""The tensors of a checkpoint directory, as read-only views of memory maps, checked name by name and shape by shape.

`model.safetensors`, or shards listed by `model.safetensors.index.json`; where both stand, the single file counts, as
in transformers. Pickles (*.bin, *.pt) are never read. Every CheckpointError names the file. Nothing here knows of
quantised matrices: tensors.py puts them in between `language_part` and `selected`.
Source: the safetensors format (8 bytes little-endian header length, JSON header, data); transformers models/lfm2.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from lfm2np.checkpoint.config_json import is_vision_language
from lfm2np.checkpoint.layout import collected
from lfm2np.checkpoint.names import language_tensors, plan_of
from lfm2np.checkpoint.stored import CHUNK, DTYPES, PARTS, Array, StoredTensor
from lfm2np.checkpoint.strict_json import is_present, parse_object, read_object
from lfm2np.errors import CheckpointError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.weights import EMBEDDING, HEAD
from lfm2np.values import plain, show

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_DIMENSIONS = 8
MAX_HEADER_BYTES = 100_000_000  # the library's own limit


def selected(tensors: Mapping[str, StoredTensor], config: ModelConfig, source: str) -> dict[str, StoredTensor]:
    """Exactly `expected_tensors(config)`, each of its shape; a tied model's head must repeat its embedding."""
    ours = collected(tensors, plan_of(tensors, config), config, source)
    if config.tie_word_embeddings and (head := ours.pop(HEAD, None)) is not None:
        _require_equal_bytes(head, ours[EMBEDDING])
    return ours


def language_part(directory: Path) -> tuple[dict[str, StoredTensor], str]:
    """As open_tensors; of a model that also sees the language model's only, by the names that it has alone."""
    tensors, source = open_tensors(directory)
    return (language_tensors(tensors, source) if is_vision_language(directory) else tensors), source


def _require_equal_bytes(head: StoredTensor, embedding: StoredTensor) -> None:
    kinds = [(each.dtype, each.shape, [array.dtype for array in each.arrays]) for each in (head, embedding)]
    if kinds[0] != kinds[1] or not all(map(np.array_equal, _bytes_of(head), _bytes_of(embedding))):
        expected = "expected equal bytes from tie_word_embeddings=true (config.json)"
        raise CheckpointError(f"{head.source}: {head.name} differs from {embedding.name}, {expected}")


def _bytes_of(tensor: StoredTensor) -> Iterator[npt.NDArray[np.uint8]]:
    for array in tensor.arrays:
        flat = np.ascontiguousarray(array).reshape(-1)
        for start in range(0, flat.size, CHUNK):
            yield flat[start : start + CHUNK].view(np.uint8)


# --- files


def open_tensors(directory: Path) -> tuple[dict[str, StoredTensor], str]:
    """Every tensor of the checkpoint, whatever the config says, and the file that lists them."""
    if not directory.is_dir():
        state = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory}: {state}, expected a directory with {SINGLE}")
    single, index = directory / SINGLE, directory / INDEX
    if is_present(single, CheckpointError):  # a dangling link must not fall through to the index
        return _map_file(single), str(single)
    if is_present(index, CheckpointError):
        return _open_shards(index), str(index)
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise CheckpointError(
            f"{directory}: only {', '.join(pickles[:5])}: pickles can run code and are not read, expected {SINGLE}"
        )
    raise CheckpointError(f"{directory}: no weights, expected {SINGLE} or {INDEX}")


def _open_shards(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            raise CheckpointError(f"{index}: names the shard {show(shard)}, which does not exist")
        for name, tensor in _map_file(path).items():
            if name in tensors or weight_map.get(name) != shard:
                other = tensors[name].source if name in tensors else weight_map.get(name, "no shard")
                raise CheckpointError(f"{path}: holds {plain(name)}, expected it in {other} ({index.name})")
            tensors[name] = tensor
    for name in sorted(weight_map.keys() - tensors):
        raise CheckpointError(f"{index}: {plain(name)} should be in {weight_map[name]}, which does not hold it")
    return tensors


def read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: {show(weight_map)}, expected an object of tensor name to shard")
    for name, shard in weight_map.items():
        # A shard is a file beside the index: "../x", "a/b", "C:x" or "a\\b" would leave the directory.
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or set(shard) & set("/\\:\0"):
            raise CheckpointError(
                f"{index}: weight_map[{plain(name)}]: {show(shard)}, expected the plain name of a .safetensors file"
            )
    return weight_map


def _map_file(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file as a view of one memory map."""
    header, origin = _read_header(path)
    data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)[origin:]
    return {name: _tensor(path, name, fields, data) for name, fields in header.items()}


def _read_header(path: Path) -> tuple[dict[str, object], int]:
    """What it says of each tensor, validated by the library (overlaps, gaps, overflow) and by us (length, duplicates).

    And where the data begin.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: not a regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise CheckpointError(f"{path}: {size} bytes, expected at least the 8 of the header's length")
        (length,) = struct.unpack("<Q", start)
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: header of {length} bytes, expected at most {min(size - 8, MAX_HEADER_BYTES)}: "
                f"the file has {size} (truncated or not safetensors)"
            )
        header = parse_object(file.read(length), f"{path}: header", CheckpointError)
    try:
        with safe_open(str(path), framework="np") as checked:
            names = set(checked.keys())
    except (SafetensorError, OSError, ValueError) as problem:
        raise CheckpointError(f"{path}: not a sound safetensors file ({size} bytes): {problem}") from None
    header.pop("__metadata__", None)
    if names != header.keys():
        raise CheckpointError(f"{path}: header changed while it was read")
    return header, 8 + length


def _tensor(path: Path, name: str, fields: object, data: Array) -> StoredTensor:
    """Of one header entry; its range is checked again although the library has, being what we index with."""
    if not isinstance(fields, dict):  # the library would also take ["F32", [2], [0, 8]]
        raise CheckpointError(f"{path}: {plain(name)}: {show(fields)}, expected dtype, shape and data_offsets")
    dtype, shape, (begin, end) = str(fields["dtype"]), tuple(fields["shape"]), fields["data_offsets"]
    if len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{path}: {plain(name)}: {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}")
    if dtype not in (known := DTYPES | PARTS):
        raise CheckpointError(f"{path}: {plain(name)}: dtype {dtype}, expected one of {', '.join(known)}")
    if end - begin != math.prod(shape) * known[dtype].itemsize or not 0 <= begin <= end <= len(data):
        raise CheckpointError(f"{path}: {plain(name)}: bytes {begin} to {end} do not hold {dtype} of shape {shape}")
    return StoredTensor(name, dtype, data[begin:end].view(known[dtype]).reshape(shape), str(path))
