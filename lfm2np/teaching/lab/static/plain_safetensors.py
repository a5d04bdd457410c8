"""What the laboratory needs of the package `safetensors`, for a browser that has none: there it has that name.

It names the tensors of a file. That the file is whole is known by its hash: only the fixtures' are read there.
Source: the safetensors format (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SafetensorError(Exception):
    """A file that is none."""


@contextmanager
def safe_open(filename: str, framework: str) -> Iterator[dict[str, object]]:
    """The header, whose keys are the tensors' names."""
    content = Path(filename).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, object] = json.loads(content[8:end])
    header.pop("__metadata__", None)
    yield header
