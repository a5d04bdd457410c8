"""The container: header, keys, tensors of a GGUF file, every length checked before it is used.

magic "GGUF", version, number of tensors, number of keys; the keys with typed values; of each tensor name, dimensions
(the fastest first), type, offset; padding up to the alignment; the data. Little-endian. Source: docs/gguf.md and
gguf.cpp of llama.cpp (ggml). Its rules are ours, and where it asserts we raise: a key or a tensor stands once, rows are
whole blocks, tensors lie one behind another in the file's order, each padded to the alignment. A file in splits is
refused: `llama-gguf-split --merge` makes one of them.

The package `gguf` reads this, too, but trusts it: a length in a broken file becomes an endless loop, an unknown type a
ValueError, two tensors may overlap; and a vocabulary of 65,536 tokens takes its reader 15 s and 250 MB, this one 0.9 s
and 39 MB.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lfm2np.checkpoint.gguf.ggml_types import NUMBERS, QUANTISED, BlockRows, Bytes, package
from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.errors import CheckpointError, Lfm2npError
from lfm2np.values import plain, show

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32  # unless general.alignment says another
MAX_DIMENSIONS, MAX_NAME = 4, 64
STRING, ARRAY = 8, 9
NUMERIC = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}  # types of values: struct's and NumPy's letters
TYPES = {number: name for name, number in NUMBERS.items()}


@dataclass(frozen=True)
class Value:
    """Of a key. kind: "uint32", "string", "array of float32", ...; bytes that are no UTF-8 stay as surrogates."""

    kind: str
    value: Any


@dataclass(frozen=True)
class Container:
    """Keys and tensors by their names, shapes as NumPy has them."""

    path: Path
    keys: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True)
class Keys:
    """The keys of a file under one prefix, each with the type that it must have; `error` is raised for another."""

    container: Container
    prefix: str
    error: type[Lfm2npError]

    def stored(self, key: str) -> Value | None:
        return self.container.keys.get(f"{self.prefix}.{key}")

    def value(self, key: str, kind: str) -> Any:
        if self.stored(key) is None:
            raise self.wrong(key, f"a key of type {kind}", "absent")
        return self.optional(key, kind)

    def optional(self, key: str, kind: str) -> Any:
        """None if there is no such key."""
        stored = self.stored(key)
        if stored is not None and stored.kind != kind:
            raise self.wrong(key, f"a {kind}")
        return None if stored is None else stored.value

    def wrong(self, key: str, expected: str, shown: str | None = None) -> Lfm2npError:
        """`shown` is said of the value, by default what it is and its type."""
        if (stored := self.stored(key)) is not None and shown is None:
            shown = f"{show(stored.value)} ({stored.kind})"
        return self.error(f"{self.container.path}: {self.prefix}.{plain(key)}: {shown}, expected {expected}")


@dataclass
class _Header:
    path: Path
    content: Bytes  # of the whole file
    at: int = 0
    keys: dict[str, Value] = field(default_factory=dict)

    def take(self, count: int, what: str) -> bytes:
        left = len(self.content) - self.at
        if count > left:
            raise CheckpointError(
                f"{self.path}: {what}: {count} bytes from byte {self.at} on, expected at most the {left} that are left "
                "(truncated or not GGUF)"
            )
        self.at += count
        return self.content[self.at - count : self.at].tobytes()

    def number(self, letter: str, what: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}"), what))[0]

    def string(self, what: str) -> str:
        return self.take(self.number("Q", f"{what}: length"), what).decode("utf-8", "surrogateescape")


def open_container(path: Path) -> Container:
    """CheckpointError names what is wrong, and where."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: {'not a regular file' if path.exists() else 'does not exist'}")
        if not path.stat().st_size:  # which no memory map takes
            raise CheckpointError(f"{path}: 0 bytes, expected a GGUF file")
        header = _Header(path, np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray))
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem}") from None
    num_tensors = _read_start(header)
    count = header.keys.get("split.count", Value("uint16", 1))
    if count.value != 1:
        merge = "expected 1: `llama-gguf-split --merge FIRST OUT` makes one file of several"
        raise CheckpointError(f"{path}: split.count: {show(count.value)} ({count.kind}), {merge}")
    return Container(path, header.keys, _read_tensors(header, num_tensors))


def _read_start(header: _Header) -> int:
    """Up to the keys; the number of tensors."""
    path = header.path
    magic = header.take(4, "magic")
    if magic != MAGIC:
        raise CheckpointError(f"{path}: begins with {magic!r}, expected {MAGIC!r}")
    version = header.number("I", "version")
    if version not in VERSIONS:
        turned = " (a big-endian file)" if version in (0x02000000, 0x03000000) else ""
        raise CheckpointError(f"{path}: GGUF version {version}{turned}, expected {' or '.join(map(str, VERSIONS))}")
    num_tensors = header.number("Q", "number of tensors")
    for _ in range(header.number("Q", "number of keys")):
        key = header.string(f"key {len(header.keys)}")
        if not key or key in header.keys:
            wrong = "stands twice" if key else "empty"
            raise CheckpointError(f"{path}: key {plain(key)!r}: {wrong}, expected one name")
        header.keys[key] = _read_value(header, plain(key))
    return int(num_tensors)


def _read_value(header: _Header, key: str) -> Value:
    kind, count = header.number("I", f"{key}: type"), 1
    if is_array := kind == ARRAY:
        kind, count = header.number("I", f"{key}: type of its array"), header.number("Q", f"{key}: length of its array")
    if kind != STRING and kind not in NUMERIC:
        raise CheckpointError(f"{header.path}: {key}: value of type {kind}, expected 0 to 12 (arrays not in arrays)")
    if kind == STRING:
        name, values = "string", [header.string(f"{key}[{index}]" if is_array else key) for index in range(count)]
    else:
        letter = NUMERIC[kind]
        content = header.take(count * struct.calcsize(f"<{letter}"), f"{key}: {count} values" if is_array else key)
        for byte in content if letter == "?" else b"":
            if byte > 1:
                raise CheckpointError(f"{header.path}: {key}: the bool {byte}, expected 0 or 1")
        name, values = np.dtype(letter).name, np.frombuffer(content, f"<{letter}").tolist()
    return Value(f"array of {name}", values) if is_array else Value(name, values[0])


def _read_tensors(header: _Header, count: int) -> dict[str, StoredTensor]:
    path, entries = header.path, dict[str, tuple[str, tuple[int, ...], int]]()
    for number in range(count):
        name = header.string(f"name of tensor {number}")
        if not 0 < len(name) < MAX_NAME or name in entries:
            wrong = "stands twice" if name in entries else f"{len(name)} characters"
            fits = f"a name of its own, below {MAX_NAME}"
            raise CheckpointError(f"{path}: tensor {number}, {plain(name)!r}: {wrong}, expected {fits}")
        entries[name] = _read_entry(header, plain(name))
    alignment = _alignment(header)
    start, expected, tensors = _padded(header.at, alignment), 0, dict[str, StoredTensor]()
    for name, (dtype, shape, offset) in entries.items():
        numbers = DTYPES.get(dtype, np.dtype(np.uint8))
        begin, size = start + offset, math.prod(shape) * numbers.itemsize
        if offset != expected:
            place = f"{expected}, behind the tensor before it, padded to {alignment} bytes"
            raise CheckpointError(f"{path}: {plain(name)}: offset {offset}, expected {place}")
        if begin + size > len(header.content):
            raise CheckpointError(
                f"{path}: {plain(name)}: {dtype} in bytes {begin} to {begin + size}, expected at most "
                f"{len(header.content)}, the file's size (truncated)"
            )
        expected += _padded(size, alignment)
        stored = header.content[begin : begin + size].view(numbers).reshape(shape)
        values = BlockRows(dtype, stored) if dtype in QUANTISED else stored
        tensors[name] = StoredTensor(name, dtype, values, str(path))
    return tensors


def _read_entry(header: _Header, name: str) -> tuple[str, tuple[int, ...], int]:
    """Of the table of tensors: type, shape of the numbers, or of quantised rows in bytes, offset."""
    path, num_dimensions = header.path, header.number("I", f"{name}: number of dimensions")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise CheckpointError(f"{path}: {name}: {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    sizes = [header.number("Q", f"{name}: dimensions") for _ in range(num_dimensions)]
    kind, offset = header.number("I", f"{name}: type"), header.number("Q", f"{name}: offset")
    if kind not in TYPES:
        theirs = {member.value: f" ({member.name})" for member in package(f"{path}: type {kind}").GGMLQuantizationType}
        told = f"type {kind}{theirs.get(kind, '')} is not read"
        raise CheckpointError(f"{path}: {name}: {told}, expected one of {', '.join(NUMBERS)}")
    dtype, shape = TYPES[kind], tuple(reversed(sizes))
    if not all(0 < size < 2**40 for size in shape):
        raise CheckpointError(f"{path}: {name}: shape {shape}, expected sizes from 1 to 2**40")
    if dtype not in QUANTISED:
        return dtype, shape, offset
    package(f"{path}: {name}: {dtype}")
    block = QUANTISED[dtype]
    if shape[-1] % block.weights:
        expected = f"a multiple of its block, {block.weights}"
        raise CheckpointError(f"{path}: {name}: {dtype} with rows of {shape[-1]}, expected {expected}")
    return dtype, (*shape[:-1], shape[-1] // block.weights * block.size), offset


def _alignment(header: _Header) -> int:
    stored = header.keys.get("general.alignment", Value("uint32", ALIGNMENT))
    if stored.kind != "uint32" or not 0 < stored.value <= 2**20 or stored.value & (stored.value - 1):
        value = f"{show(stored.value)} ({stored.kind})"
        raise CheckpointError(f"{header.path}: general.alignment: {value}, expected a uint32, a power of two")
    return int(stored.value)


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
