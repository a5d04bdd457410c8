"""A file that is there as a whole or as it was before."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lfm2np.errors import RequestError


@contextlib.contextmanager
def replaced(target: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the target's place, on the disk, when the block ends, and is gone if that fails.

    It keeps the mode of a file that it replaces, also while it is written; a link stays one, to the new file.
    """
    target = target.resolve()
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    try:
        with open(beside, "xb", opener=partial(os.open, mode=0o666 if mode is None else mode & 0o666)) as file:
            if mode is not None:
                beside.chmod(mode)
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
        with replaced(target) as file:
            file.write(data)
    except OSError as problem:
        raise RequestError(f"{path}: can't be written: {problem.strerror or problem}") from None
