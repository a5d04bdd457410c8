"""What the laboratory needs of the package `safetensors`, for a browser that has none: there it has that name.

It reads the folder's own fixtures, and refuses what the package refuses of a header that does not fit its file.
Source: the safetensors format (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}
SIZES = {"BF16": 2} | {name: np.dtype(code).itemsize for name, code in DTYPES.items()}  # in bytes


class SafetensorError(Exception):
    """A file that is none."""


class safe_open:
    """The names of a file's tensors, once its header is known to describe all of its bytes, each of them once."""

    def __init__(self, filename: str, framework: str) -> None:
        self._entries = read_header(Path(filename).read_bytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._entries)


def read_header(content: bytes) -> dict[str, dict[str, Any]]:
    """Name -> dtype, shape and data_offsets; SafetensorError for what does not fit."""
    try:
        (length,) = struct.unpack_from("<Q", content)
        entries: dict[str, dict[str, Any]] = json.loads(content[8 : 8 + length])
        entries.pop("__metadata__", None)
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end_of_this = entry["data_offsets"]
            if begin != end or end_of_this - begin != math.prod(entry["shape"]) * SIZES[entry["dtype"]]:
                raise SafetensorError(f"{name}: bytes {begin} to {end_of_this} do not hold {entry}")
            end = end_of_this
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as problem:
        raise SafetensorError(f"the header can't be read: {problem}") from None
    if 8 + length + end != len(content):
        raise SafetensorError(f"the header describes {end} bytes, the file has {len(content) - 8 - length}")
    return entries


def load_file(filename: str | Path) -> dict[str, NDArray[Any]]:
    """Every tensor, as an array of its own."""
    content = Path(filename).read_bytes()
    entries = read_header(content)
    (length,) = struct.unpack_from("<Q", content)
    return {
        name: np.frombuffer(
            content, DTYPES[entry["dtype"]], math.prod(entry["shape"]), 8 + length + entry["data_offsets"][0]
        )
        .reshape(entry["shape"])
        .copy()
        for name, entry in entries.items()
    }
