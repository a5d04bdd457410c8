"""A file that is there as a whole or as it was before."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lfm2np.errors import RequestError


@contextlib.contextmanager
def replaced(target: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the target's place, on the disk, when the block ends, and is gone if that fails."""
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes a file so that it is there as a whole or as it was before. RequestError that names it if it can't be.

    A name for something else than a file (a device, a pipe) is written to directly, not replaced.
    """
    target, data = Path(path), content.encode("utf-8") if isinstance(content, str) else content
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        with replaced(target.resolve()) as file:
            file.write(data)
    except OSError as problem:
        raise RequestError(f"{path}: can't be written: {problem.strerror or problem}") from None
