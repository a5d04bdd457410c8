"""FILE.jsonl: results of work, one item a line, each with the SHA-256 of the line and that of the checkpoint.

{"format_version": 2, "checkpoint": SHA-256, "kind": "score", "item": ..., "result": ..., "sha256": of all the others}

A line says all that is needed to compute it again, and exact results are the same bits everywhere. So an interrupted
run continues with its file, and files from different machines are merged by joining their lines. A check's file
also has an engine's answers (oracle/engines/file_target.py).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.strict_json import parse_object
from lfm2np.engine.work.place import AnyPlace, Work, compute
from lfm2np.errors import ProofError, RequestError
from lfm2np.values import same, show
from scheduler.checksum import canonical, damage, sealed

FORMAT_VERSION = 2
ANSWERS = (b'{"request"', b'{"end"', b'{"verdict"')  # how lines of an engine's answers begin
FIELDS = {"format_version", "checkpoint", "kind", "item", "result", "sha256"}
DTYPES = ("<f4", "<f8", "<i8")  # of arrays: little-endian, whatever the machine's own order


@dataclass(frozen=True, eq=False)
class Entry:
    """One line, `item` and `result` as JSON has them."""

    where: str
    line: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.where}: {self.line['kind']} of {show(self.line['item'])}"


class ResultsFile:
    """The results of one checkpoint in one file: what it holds, and what is appended. See place.Record.

    RequestError for an arithmetic whose bits are not the same everywhere, an invalid line, or one of another
    checkpoint; ProofError for a line that does not match its own SHA-256, or two results of one item.
    """

    def __init__(self, file: str | Path | LineFile, model: LoadedModel) -> None:
        self._lines = file if isinstance(file, LineFile) else LineFile(file)
        if model.numerics.name != "exact":
            raise RequestError(
                f"{self._lines.path}: numerics {model.numerics.name}, expected exact, whose bits are everywhere alike"
            )
        self.entries: dict[str, Entry] = {}  # by `key_of`, in the order of the lines
        self._model = model
        for where, line in self._lines.read():
            if not line.startswith(ANSWERS):
                add(self.entries, read_entry(line, where, model))

    def known(self, kind: str, item: Any) -> Any | None:
        entry = self.entries.get(key_of(kind, encoded(item)))
        return None if entry is None else decoded(entry.line["result"], entry.where)

    def extend(self, kind: str, items: Sequence[Any], results: Sequence[Any]) -> None:
        """One line a result, all of them on the disk when this returns. RequestError if they can't be written."""
        lines = [line_of(self._model, kind, item, result) for item, result in zip(items, results, strict=True)]
        self._lines.append("".join(json.dumps(line) + "\n" for line in lines).encode())
        for line in lines:
            add(self.entries, Entry(str(self._lines.path), line))

    def __enter__(self) -> ResultsFile:
        self._lines.claim()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lines.close()


# --- lines


def line_of(model: LoadedModel, kind: str, item: Any, result: Any) -> dict[str, Any]:
    """All of a line, with its SHA-256."""
    fields = {"checkpoint": model.sha256, "kind": kind, "item": encoded(item), "result": encoded(result)}
    return sealed({"format_version": FORMAT_VERSION, **fields})


def read_entry(line: bytes, where: str, model: LoadedModel) -> Entry:
    """The entry of a line, its own SHA-256 and its checkpoint checked."""
    fields = parse_object(line, where, RequestError)
    if set(fields) != FIELDS:
        raise RequestError(f"{where}: {', '.join(sorted(fields))[:200]}: expected {', '.join(sorted(FIELDS))}")
    if not same(fields["format_version"], FORMAT_VERSION):
        raise RequestError(f"{where}: format_version {show(fields['format_version'])}, expected {FORMAT_VERSION}")
    if fields["checkpoint"] != model.sha256:
        actual, expected = show(fields["checkpoint"]), f"{model.sha256}, that of {model.path}"
        raise RequestError(f"{where}: of the checkpoint of SHA-256 {actual}, expected {expected}")
    if problem := damage(fields):
        raise ProofError(f"{Entry(where, fields)}: {problem}")
    return Entry(where, fields)


def add(entries: dict[str, Entry], entry: Entry) -> None:
    """ProofError if there is another result of the item already."""
    first = entries.setdefault(key_of(entry.line["kind"], entry.line["item"]), entry)
    require_same(entry, first.line["sha256"], f"as {first.where} has it")


def require_same(entry: Entry, expected: str, whence: str) -> None:
    actual = entry.line["sha256"]
    if actual != expected:
        raise ProofError(f"{entry}: a line of SHA-256 {actual}, expected {expected}, {whence}")


def key_of(kind: str, item: Any) -> str:
    return canonical([kind, item])


def encoded(value: Any) -> Any:
    """Plain data as JSON has it: arrays by their bits, in base64."""
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        if little.dtype.str not in DTYPES:
            raise TypeError(f"an array of {value.dtype}: expected one of {', '.join(DTYPES)}")
        content = base64.b64encode(little.tobytes()).decode("ascii")
        return {"dtype": little.dtype.str, "shape": list(value.shape), "base64": content}
    if isinstance(value, Mapping):
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    return value


def decoded(value: Any, where: str) -> Any:
    """The reverse of `encoded`; RequestError for an invalid array."""
    if isinstance(value, list):
        return [decoded(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {"dtype", "shape", "base64"}:
        return {key: decoded(item, where) for key, item in value.items()}
    if value["dtype"] not in DTYPES:
        raise RequestError(f"{where}: an array of dtype {show(value['dtype'])}, expected one of {', '.join(DTYPES)}")
    try:
        array = np.frombuffer(base64.b64decode(value["base64"], validate=True), value["dtype"])
        return array.reshape([int(size) for size in value["shape"]]).astype(array.dtype.newbyteorder("="))
    except (TypeError, ValueError) as problem:
        raise RequestError(f"{where}: an array that can't be read: {problem}") from None


# --- merging


def merged(paths: Iterable[str | Path], model: LoadedModel) -> dict[str, Entry]:
    """The entries of all files, in their order, each item once. RequestError for a file that is not there."""
    entries: dict[str, Entry] = {}
    for path in paths:
        if not Path(path).is_file():
            raise RequestError(f"{path}: no such file, expected lines of results")
        for entry in ResultsFile(path, model).entries.values():
            add(entries, entry)
    return entries


def spot_check(
    model: LoadedModel,
    entries: Sequence[Entry],
    works: Mapping[str, Work],
    count: int,
    seed: int,
    place: AnyPlace = None,
) -> list[Entry]:
    """Computes `count` entries again, drawn by the seed, and returns them. ProofError for one of other bits."""
    if not 0 <= count <= len(entries):
        raise RequestError(f"{count} items to compute again: expected 0 to {len(entries)}, as many as there are")
    drawn = random.Random(seed).sample(range(len(entries)), count)
    by_kind: dict[str, list[Entry]] = {}
    for index in sorted(drawn):
        by_kind.setdefault(entries[index].line["kind"], []).append(entries[index])
    for kind, chosen in by_kind.items():
        if kind not in works:
            raise RequestError(f"{kind!r}: no known kind of work, expected one of {', '.join(works)}")
        items = [decoded(entry.line["item"], entry.where) for entry in chosen]
        for entry, item, result in zip(chosen, items, compute(works[kind], model, items, place), strict=True):
            require_same(entry, line_of(model, kind, item, result)["sha256"], "as computed here")
    return [entry for chosen in by_kind.values() for entry in chosen]


# --- the file itself


class LineFile:
    """The one file that survives an interrupt: lines of JSON, read, then appended to.

    A missing file has none. A torn last line, which a crash may leave, is dropped with a warning, and overwritten when
    the file is written. RequestError that names file and line for other damage. Several threads may append: a check's
    answers come while a thread writes what it computed of them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None
        self._lock = threading.RLock()
        self._size = self._whole = 0  # bytes of all that was found, and of its whole lines
        self._end = b""  # what the last of them lacks

    def read(self) -> Iterator[tuple[str, bytes]]:
        """Where each line stands, and the line with its end. Any number of times, to the end, before `append`."""
        self._size = self._whole = 0
        try:
            if self.path.exists() and not self.path.is_file():
                raise RequestError(f"{self.path}: is not a regular file")
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    where = f"{self.path} line {number}"
                    self._size += len(line)
                    if not line.endswith(b"\n") and not is_json(line):
                        warnings.warn(f"{where}: torn, {len(line)} bytes without an end: dropped", stacklevel=3)
                        return
                    yield where, line
                    self._whole, self._end = self._size, b"" if line.endswith(b"\n") else b"\n"
        except FileNotFoundError:
            return
        except OSError as problem:
            raise RequestError(f"{self.path}: can't be read: {problem}") from None

    def claim(self) -> None:
        """Locks the file until `close`; RequestError at once, not after hours of work, if it can't be written."""
        with self._writing():
            self._open()

    def append(self, content: bytes) -> None:
        """More lines, their ends included, on the disk when this returns. RequestError if they can't be written.

        A write that fails leaves a torn line, and the file is to be read again.
        """
        with self._writing():
            file, lines = self._open(), self._end + content
            file.truncate(self._whole)
            if (written := file.write(lines) or 0) < len(lines):  # unbuffered: one write
                raise OSError(f"{written} of {len(lines)} bytes written")
            os.fsync(file.fileno())
            self._whole = self._size = self._whole + written
            self._end = b""

    def close(self) -> None:
        """Any number of times; the next `append` opens the file again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as problem:
                self.close()
                raise RequestError(f"{self.path}: can't be written: {problem}") from None

    def _open(self) -> IO[bytes]:
        """At its end, locked. OSError if another process has it, or it is not as long as what was read."""
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
            lock(self._file)
        size = self._file.seek(0, os.SEEK_END)
        if size != self._size:
            raise OSError(f"{size} bytes, expected {self._size}: a write failed, or something else writes to it")
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


def is_json(line: bytes) -> bool:
    """Whether a last line without a newline is whole: a part of an object does not parse."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
