"""A file that is there as a whole or as it was before."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from lfm2np.errors import RequestError


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes a file so that it is there as a whole or as it was before. RequestError that names it if it can't be.

    A name for something else than a file (a device, a pipe) is written to directly, not replaced.
    """
    target, data = Path(path), content.encode("utf-8") if isinstance(content, str) else content
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        target = target.resolve()
        beside = target.with_name(f".{secrets.token_hex(8)}.part")
        try:
            with beside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    except OSError as problem:
        raise RequestError(f"{path}: can't be written: {problem.strerror or problem}") from None
