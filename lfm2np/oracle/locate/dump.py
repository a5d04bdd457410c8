"""A file of activations, as an engine's author writes it, read and held against the shapes that the config demands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors import SafetensorError

from lfm2np.checkpoint.config import ModelConfig
from lfm2np.checkpoint.strict_json import read_object
from lfm2np.checkpoint.tensors import widen
from lfm2np.errors import DumpError
from lfm2np.oracle.locate.operations import Operation
from lfm2np.oracle.locate.spread import PRECISIONS
from lfm2np.values import plain, show

Array = NDArray[Any]
IDS = "token_ids"
WHOLE = {f"{sign}{bits}": f"<{sign.lower()}{bits // 8}" for sign in "IU" for bits in (8, 16, 32, 64)}
REAL = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # little-endian, whatever the machine's own order
ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "q_layernorm", "k_layernorm", "attended", "out_proj")
MOST_LISTED = 5


@dataclass(frozen=True, eq=False)
class Dump:
    """What was dumped of one sequence.

    tensors    by the names of operations.py, each [T, width] float64; `lm_head` may be [1, V], the last row
    stored     the format that each of them was stored in
    unknown    names that mean nothing here, and are not looked at
    """

    token_ids: Array  # [T] int64
    tensors: Mapping[str, Array]
    stored: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def read_dump(
    path: Path, config: ModelConfig, operations: Sequence[Operation], names: Mapping[str, str] | None = None
) -> Dump:
    """The file's tensors; `names` says what the engine's names mean. DumpError names file, tensor and expectation."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as problem:
        raise DumpError(f"{path}: cannot be read: {problem}") from None
    try:
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except SafetensorError as problem:
        raise DumpError(f"{path}: not a sound safetensors file ({len(content)} bytes): {problem}") from None
    return make_dump(
        {name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in entries},
        str(path),
        config,
        operations,
        names or {},
    )


def make_dump(
    entries: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    source: str,
    config: ModelConfig,
    operations: Sequence[Operation],
    names: Mapping[str, str],
) -> Dump:
    """From dtype, shape and bytes of each tensor."""
    known = {one.name: one for one in operations}
    require_meanings(names, known)
    given: dict[str, str] = {}  # by meaning, the name in the file
    unknown = []
    for name in sorted(entries):
        meaning = names.get(name, name)
        if meaning != IDS and meaning not in known:
            unknown.append(plain(name))
        elif meaning in given:
            raise DumpError(f"{source}: {plain(name)} and {plain(given[meaning])} both mean {meaning}: expected one")
        else:
            given[meaning] = name
    if IDS not in given:
        raise DumpError(f"{source}: no tensor {IDS}, expected the whole numbers [T] that the engine ran on")
    ids = read_ids(entries[given[IDS]], f"{source}: {plain(given[IDS])}", config)
    if unknown and len(given) == 1:
        listed = ", ".join(unknown[:MOST_LISTED]) + (", ..." if len(unknown) > MOST_LISTED else "")
        raise DumpError(
            f"{source}: none of its {len(unknown)} names is known ({listed}): expected {operations[0].name}, "
            f"{operations[1].name}, ..., or --names to say what they mean"
        )
    tensors, stored = {}, {}
    for meaning, name in given.items():
        if meaning != IDS:
            dtype, shape, content = entries[name]
            what = f"{source}: {plain(name)}"
            stored[meaning] = format_of(dtype, what)
            values = read_numbers(dtype, shape, content)
            tensors[meaning] = as_rows(values, known[meaning], len(ids), config, what)
    return Dump(ids, tensors, stored, tuple(unknown))


def read_names(path: Path, config: ModelConfig) -> dict[str, str]:
    """A JSON object of the engine's names to ours; "{layer}" in both stands for every layer's number."""
    found: dict[str, str] = {}
    for name, meaning in read_object(path, DumpError).items():
        if not isinstance(meaning, str):
            raise DumpError(f"{path}: {plain(name)}: {show(meaning)}, expected the name of a tensor")
        if ("{layer}" in name) != ("{layer}" in meaning):
            raise DumpError(f"{path}: {plain(name)}: {show(meaning)}, expected {{layer}} in both or in neither")
        layers = range(config.num_hidden_layers) if "{layer}" in name else (0,)
        for layer in layers:
            found[name.replace("{layer}", str(layer))] = meaning.replace("{layer}", str(layer))
    return found


def require_meanings(names: Mapping[str, str], known: Mapping[str, Operation]) -> None:
    """DumpError for a meaning that no model of this family has; one of the other layer type is only not there."""
    forms = {re.sub(r"\.\d+", ".{layer}", name) for name in known} | {IDS}
    forms |= {f"model.layers.{{layer}}.conv.{part}" for part in ("in_proj", "conv", "out_proj")}
    forms |= {f"model.layers.{{layer}}.self_attn.{part}" for part in ATTENTION_PARTS}
    for name, meaning in names.items():
        if re.sub(r"\.\d+", ".{layer}", meaning) not in forms:
            raise DumpError(f"--names: {plain(name)}: {show(meaning)}, expected one of {', '.join(sorted(forms))}")


def read_ids(entry: tuple[str, tuple[int, ...], bytes], what: str, config: ModelConfig) -> Array:
    """[T] or [1, T] whole numbers in the vocabulary."""
    dtype, shape, content = entry
    if dtype not in WHOLE:
        raise DumpError(f"{what}: dtype {dtype}, expected whole numbers ({', '.join(WHOLE)})")
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1) or 0 in shape:
        raise DumpError(f"{what}: shape {shape}, expected (T,) or (1, T) with at least one token")
    ids = np.frombuffer(content, WHOLE[dtype])
    wrong = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if wrong.size:
        value = int(ids[wrong[0]])
        raise DumpError(f"{what}: {value} at {int(wrong[0])}, expected ids below vocab_size={config.vocab_size}")
    if len(ids) > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise DumpError(f"{what}: {len(ids)} tokens, expected at most max_position_embeddings={most}")
    return ids.astype(np.int64)


def format_of(dtype: str, what: str) -> str:
    if dtype not in REAL:
        raise DumpError(f"{what}: dtype {dtype}, expected one of {', '.join(REAL)}")
    return REAL[dtype]


def read_numbers(dtype: str, shape: tuple[int, ...], content: bytes) -> Array:
    """float64; bfloat16 is the upper half of a float32."""
    values = np.frombuffer(content, STORED[dtype]).reshape(shape)
    return (widen(values, dtype) if dtype == "BF16" else values).astype(np.float64)


def as_rows(values: Array, operation: Operation, tokens: int, config: ModelConfig, what: str) -> Array:
    """[T, width] from what engines dump: a batch of one, heads apart, a convolution's channels first.

    Conv1d's output is [D, T + L - 1], as it pads both ends: the first T columns count.
    """
    width, is_convolution = operation.width, operation.name.endswith(".conv.conv")
    padded = tokens + config.conv_L_cache - 1
    rows = (tokens, 1) if operation.name == "lm_head" else (tokens,)
    for one in (values, values[0]) if values.ndim > 1 and len(values) == 1 else (values,):
        if one.ndim > 1 and len(one) in rows and one[0].size == width:
            return one.reshape(len(one), width)
        if is_convolution and one.ndim == 2 and len(one) == width and one.shape[1] in (tokens, padded):
            return np.ascontiguousarray(one[:, :tokens].T)
    more = f" or [{width}, {padded}]" if is_convolution else ""
    raise DumpError(f"{what}: shape {values.shape}, expected [{tokens}, {width}]{more} for T={tokens} tokens")


def default_format(dump: Dump) -> str:
    """The coarsest format that any tensor is stored in; float32 for none, and for float64."""
    found = [PRECISIONS[one] for one in dump.stored.values() if one in PRECISIONS]
    return max(found, key=lambda one: one.unit).name if found else "float32"
