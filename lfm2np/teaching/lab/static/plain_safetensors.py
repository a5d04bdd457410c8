"""What the laboratory needs of the package `safetensors`, for a browser that has none: there it has that name.

It names the tensors of a file, and refuses what the package refuses of a header that does not fit its file.
Source: the safetensors format (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1}  # in bytes


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
