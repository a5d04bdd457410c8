"""The weights of a checkpoint directory, as read-only views of memory maps, checked name by name and shape by shape.

`model.safetensors`, or shards listed by `model.safetensors.index.json`; where both stand, the single file counts, as
in transformers. Pickles (*.bin, *.pt) are never read. Every CheckpointError names the file.
Source: the safetensors format (8 bytes little-endian header length, JSON header, data); transformers models/lfm2.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from lfm2np.checkpoint.config import ModelConfig
from lfm2np.checkpoint.strict_json import is_present, parse_object, read_object
from lfm2np.errors import CheckpointError
from lfm2np.values import plain, show

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_DIMENSIONS = 8
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_EXPONENT_BITS = {"BF16": 0x7F80, "F16": 0x7C00}
_CHUNK = 2**20  # elements looked at together: keeps temporaries small
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

Array = npt.NDArray[np.generic]
Dim = tuple[int, str]  # a dimension and the key of config.json it comes from


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as the file holds it.

    dtype   "BF16", "F16" or "F32"
    values  read-only view of the memory map: uint16 (the bits of BF16), float16 or float32, all in the file's byte
            order, little-endian, whatever the machine's own is
    source  the file, for messages
    """

    name: str
    dtype: str
    values: Array
    source: str = ""


@dataclass(frozen=True)
class _Entry:
    """One tensor of one file's header: where its bytes stand in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor the model needs; `lm_head.weight` only where the head is not tied."""
    return {name: tuple(size for size, _ in dims) for name, dims in _layout(config).items()}


def parameter_count(config: ModelConfig) -> int:
    """Numbers in all expected tensors; a tied head counts once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def open_checkpoint(directory: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Name -> tensor for exactly `expected_tensors(config)`; raises CheckpointError naming the file.

    Nothing is read but headers (and a redundant tied `lm_head.weight`, which must equal the embedding). The files
    must not shrink while the views live: that is a bus error in any memory map.
    """
    try:
        tensors, source = _open_all(directory)
        return _select(tensors, config, source)
    except OSError as problem:
        raise CheckpointError(f"{directory}: cannot be read: {problem}") from None


def widen(values: Array, dtype: str) -> npt.NDArray[np.float32]:
    """A fresh float32 array with exactly the stored values: bfloat16 is the upper half of a float32."""
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {show(dtype)}, expected one of {', '.join(DTYPES)}")
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def require_finite(tensor: StoredTensor) -> None:
    """Raises CheckpointError naming the tensor and the first index that holds NaN or an infinity."""
    flat = tensor.values.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        bad = np.flatnonzero(_not_finite(chunk, tensor.dtype))
        if bad.size:
            index = tuple(int(i) for i in np.unravel_index(start + int(bad[0]), tensor.values.shape))
            value = float(widen(chunk[bad[:1]], tensor.dtype)[0])
            where = f"{tensor.source}: " if tensor.source else ""
            raise CheckpointError(f"{where}{tensor.name}: {value} at index {index}, expected finite numbers")


def _not_finite(chunk: Array, dtype: str) -> npt.NDArray[np.bool_]:
    if dtype == "F32":
        return np.logical_not(np.isfinite(chunk.astype(np.float32, copy=False)))
    mask = np.uint16(_EXPONENT_BITS[dtype])
    bits = chunk.view(np.dtype(np.uint16).newbyteorder(chunk.dtype.byteorder))  # the file's order, not the machine's
    all_ones: npt.NDArray[np.bool_] = (bits & mask) == mask
    return all_ones


def _layout(config: ModelConfig) -> dict[str, tuple[Dim, ...]]:
    """Every tensor with the origin of each dimension. Source: transformers models/lfm2, parameter names."""
    hidden = (config.hidden_size, "hidden_size")
    layout: dict[str, tuple[Dim, ...]] = {_EMBEDDING: ((config.vocab_size, "vocab_size"), hidden)}
    for index, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{index}"
        layout[f"{prefix}.operator_norm.weight"] = (hidden,)
        layout[f"{prefix}.ffn_norm.weight"] = (hidden,)
        width = (config.feed_forward_size, "feed_forward_size")
        layout[f"{prefix}.feed_forward.w1.weight"] = (width, hidden)
        layout[f"{prefix}.feed_forward.w2.weight"] = (hidden, width)
        layout[f"{prefix}.feed_forward.w3.weight"] = (width, hidden)
        operator = _conv_layout(config) if kind == "conv" else _attention_layout(config)
        layout.update({f"{prefix}.{name}": dims for name, dims in operator.items()})
    layout["model.embedding_norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        layout[_HEAD] = layout[_EMBEDDING]
    return layout


def _conv_layout(config: ModelConfig) -> dict[str, tuple[Dim, ...]]:
    hidden, triple = (config.hidden_size, "hidden_size"), (3 * config.hidden_size, "3*hidden_size")
    layout: dict[str, tuple[Dim, ...]] = {
        "conv.in_proj.weight": (triple, hidden),
        "conv.conv.weight": (hidden, (1, "depthwise"), (config.conv_L_cache, "conv_L_cache")),
        "conv.out_proj.weight": (hidden, hidden),
    }
    if config.conv_bias:
        layout |= {"conv.in_proj.bias": (triple,), "conv.conv.bias": (hidden,), "conv.out_proj.bias": (hidden,)}
    return layout


def _attention_layout(config: ModelConfig) -> dict[str, tuple[Dim, ...]]:
    hidden, head_dim = (config.hidden_size, "hidden_size"), (config.head_dim, "head_dim")
    queries = (config.num_attention_heads * config.head_dim, "num_attention_heads*head_dim")
    keys = (config.num_key_value_heads * config.head_dim, "num_key_value_heads*head_dim")
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.out_proj.weight": (hidden, queries),
        "self_attn.q_layernorm.weight": (head_dim,),
        "self_attn.k_layernorm.weight": (head_dim,),
    }


def _open_all(directory: Path) -> tuple[dict[str, StoredTensor], str]:
    """Every tensor of the checkpoint, whatever the config says, and the file that lists them."""
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory}: {found}, expected a directory with {SINGLE}")
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
    weight_map = _read_weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            raise CheckpointError(f"{index}: names the shard {show(shard)}, which does not exist")
        for name, tensor in _map_file(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"{path}: {plain(name)} stands also in {tensors[name].source}, expected one of them"
                )
            tensors[name] = tensor
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{tensor.source}: holds {plain(name)}, which {index} does not list")
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{index}: {plain(name)} should be in {shard}, which does not hold it")
        if tensors[name].source != str(index.parent / shard):
            raise CheckpointError(f"{index}: {plain(name)} should be in {shard}, but {tensors[name].source} holds it")
    return tensors


def _read_weight_map(index: Path) -> dict[str, str]:
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
    """Every tensor of one file as a view of one memory map; each entry's range was checked by `_read_header`."""
    entries = _read_header(path)
    buffer = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    return {
        name: StoredTensor(
            name, entry.dtype, buffer[entry.begin : entry.end].view(DTYPES[entry.dtype]).reshape(entry.shape), str(path)
        )
        for name, entry in entries.items()
    }


def _read_header(path: Path) -> dict[str, _Entry]:
    """The header, validated by the library (overlaps, gaps, overflow) and by us (length, dtypes, duplicates)."""
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
    return {name: _entry(path, name, fields, 8 + length, size) for name, fields in header.items()}


def _entry(path: Path, name: str, fields: object, origin: int, size: int) -> _Entry:
    """One header entry; its range is checked again although the library has, being what we index with."""
    if not isinstance(fields, dict):  # the library would also take ["F32", [2], [0, 8]]
        raise CheckpointError(f"{path}: {plain(name)}: {show(fields)}, expected dtype, shape and data_offsets")
    dtype, shape, (begin, end) = str(fields["dtype"]), tuple(fields["shape"]), fields["data_offsets"]
    if len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{path}: {plain(name)}: {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {plain(name)}: dtype {dtype}, expected one of {', '.join(DTYPES)}")
    itemsize: int = DTYPES[dtype].itemsize
    if end - begin != math.prod(shape) * itemsize or not 0 <= begin <= end <= size - origin:
        raise CheckpointError(f"{path}: {plain(name)}: bytes {begin} to {end} do not hold {dtype} of shape {shape}")
    return _Entry(dtype, shape, origin + begin, origin + end)


def _select(tensors: dict[str, StoredTensor], config: ModelConfig, source: str) -> dict[str, StoredTensor]:
    """Exactly the expected tensors, each of the expected shape."""
    layout = _layout(config)
    allowed = layout | {_HEAD: layout[_EMBEDDING]}  # tied checkpoints may repeat the embedding as the head
    missing, unexpected = layout.keys() - tensors, tensors.keys() - allowed
    if missing:
        raise CheckpointError(f"{source}: missing {len(missing)} of the {len(layout)} tensors: {_listed(missing)}")
    if unexpected:
        raise CheckpointError(
            f"{source}: {len(unexpected)} unexpected beside the {len(layout)} tensors: {_listed(unexpected)}"
        )
    for name, tensor in tensors.items():
        _require_shape(tensor, allowed[name])
    if _HEAD in tensors and config.tie_word_embeddings:
        _require_equal_bytes(tensors[_HEAD], tensors[_EMBEDDING])
    return {name: tensors[name] for name in layout}


def _listed(names: Set[str]) -> str:
    return ", ".join(plain(name) for name in sorted(names)[:5]) + (", ..." if len(names) > 5 else "")


def _require_shape(tensor: StoredTensor, dims: tuple[Dim, ...]) -> None:
    shape, expected = tensor.values.shape, tuple(size for size, _ in dims)
    if shape == expected:
        return
    differing = dims if len(shape) != len(dims) else [d for d, size in zip(dims, shape, strict=True) if d[0] != size]
    origins = ", ".join(f"{origin}={size}" for size, origin in differing)
    raise CheckpointError(f"{tensor.source}: {tensor.name}: shape {shape}, expected {expected} from {origins}")


def _require_equal_bytes(head: StoredTensor, embedding: StoredTensor) -> None:
    same = head.dtype == embedding.dtype and all(map(np.array_equal, _bytes_of(head), _bytes_of(embedding)))
    if not same:
        raise CheckpointError(
            f"{head.source}: {head.name} differs from {embedding.name}, expected equal bytes "
            "from tie_word_embeddings=true (config.json)"
        )


def _bytes_of(tensor: StoredTensor) -> Iterator[npt.NDArray[np.uint8]]:
    flat = tensor.values.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK].view(np.uint8)
