"""A file of lines, each on the disk before the next is begun."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lfm2np.errors import RequestError


class LineFile:
    """Lines of JSON of at most `max_line` bytes each, read once and then appended to.

    A missing file has none. A torn last line, which a crash may leave, is dropped with a warning, and
    overwritten by the next `append`. RequestError that names file and line for other damage.
    """

    def __init__(self, path: str | Path, max_line: int) -> None:
        self.path, self._max_line = Path(path), max_line
        self._file: IO[bytes] | None = None
        self._whole = self._size = 0  # bytes of the whole lines, and of all that was found
        self._lacks_newline = False

    def read(self) -> Iterator[tuple[str, bytes]]:
        """Each line, its end included, and where it stands; to the end, and before the first `append`."""
        if not self.path.exists():
            return
        for number, line in enumerate(lines_of(self.path, self._max_line), 1):
            where = f"{self.path} line {number}"
            self._size += len(line)
            if len(line) > self._max_line:
                raise RequestError(f"{where}: more than {self._max_line} bytes")
            self._lacks_newline = not line.endswith(b"\n")
            if self._lacks_newline and not is_json(line):
                self._lacks_newline = False
                warnings.warn(f"{where}: torn, {len(line)} bytes without an end: dropped", stacklevel=4)
                return
            yield where, line
            self._whole += len(line)

    def claim(self) -> None:
        """Locks the file until `close`; RequestError at once, not after hours of work, if it can't be written."""
        try:
            self._open()
        except OSError as problem:
            self.close()
            raise RequestError(f"{self.path}: can't be written: {problem}") from None

    def append(self, content: bytes) -> None:
        """One more line, its end included, on the disk when this returns. RequestError if it can't be written."""
        try:
            self._write(content)
        except OSError as problem:
            self.close()
            raise RequestError(f"{self.path}: can't be written: {problem}") from None

    def close(self) -> None:
        """Any number of times; the next `append` opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, content: bytes) -> None:
        """One unbuffered write after the whole lines. What a failed one leaves is cut off by the next."""
        file = self._open()
        file.truncate(self._whole)
        line = b"\n" + content if self._lacks_newline else content
        written = file.write(line)
        self._size = self._whole + (written or 0)
        os.fsync(file.fileno())
        if self._size < self._whole + len(line):
            raise OSError(f"{written} of {len(line)} bytes written")
        self._whole, self._lacks_newline = self._size, False

    def _open(self) -> IO[bytes]:
        """At its end, locked. OSError if another process has it, or it is not as long as what was read."""
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
            lock(self._file)
        size = self._file.seek(0, os.SEEK_END)
        if size != self._size:
            raise OSError(f"{size} bytes, expected {self._size}: something else writes to it")
        return self._file


def lock(file: IO[bytes]) -> None:
    """For this process, until the file is closed. OSError if another has it; no lock where a file system has none."""
    with contextlib.suppress(ImportError):  # not on Windows
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError("another run writes to it") from None
        except OSError:
            return


def lines_of(path: Path, max_line: int) -> Iterator[bytes]:
    """With their ends; no more than `max_line` + 1 bytes of each. RequestError if the file can't be read."""
    try:
        with path.open("rb") as file:
            while line := file.readline(max_line + 1):
                yield line
    except OSError as problem:
        raise RequestError(f"{path}: can't be read: {problem}") from None


def is_json(line: bytes) -> bool:
    """Whether a last line without a newline is whole: a part of an object does not parse."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
