"""FILE.jsonl: results of work, one item a line, each with the SHA-256 of the line and that of the checkpoint.

{"format_version": 2, "checkpoint": SHA-256, "kind": "score", "item": ..., "result": ..., "sha256": of all the others}

Version 1 hashed the result alone, so that a flipped bit in an item gave another item's result: such files are refused.

A line says all that is needed to compute it again, and exact results are the same bits everywhere. So a run that broke
off goes on with its file, and files from unlike machines are merged by putting their lines together. A check's file
also has an engine's answers (oracle/engines/file_target.py).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
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
MAX_LINE = 2**30
ANSWERS = (b'{"request"', b'{"end"', b'{"verdict"')  # how lines of an engine's answers begin
FIELDS = {"format_version", "checkpoint", "kind", "item", "result", "sha256"}
DTYPES = ("<f4", "<f8", "<i8")  # of arrays: little-endian, whatever the machine's own order


@dataclass(frozen=True, eq=False)
class Entry:
    """One line. `item` and `result` are as JSON has them."""

    where: str
    kind: str
    item: Any
    result: Any
    sha256: str  # of the line

    def __str__(self) -> str:
        return f"{self.where}: {self.kind} of {show(self.item)}"


class ResultsFile:
    """The results of one checkpoint in one file: what it holds, and what is appended. See work.Record.

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
        self._checkpoint = model.sha256
        for where, line in self._lines.read():
            if not line.startswith(ANSWERS):
                add(self.entries, read_entry(line, where, model))

    def known(self, kind: str, item: Any) -> Any | None:
        entry = self.entries.get(key_of(kind, encoded(item)))
        return None if entry is None else decoded(entry.result, entry.where)

    def extend(self, kind: str, items: Sequence[Any], results: Sequence[Any]) -> None:
        """One line a result, all of them on the disk when this returns. RequestError if they can't be written."""
        entries = []
        for item, result in zip(items, results, strict=True):
            content = encoded(item), encoded(result)
            sha256 = line_fields(self._checkpoint, kind, *content)["sha256"]
            entries.append(Entry(str(self._lines.path), kind, *content, sha256))
        self._lines.append("".join(line_of(entry, self._checkpoint) for entry in entries).encode())
        for entry in entries:
            add(self.entries, entry)

    def __enter__(self) -> ResultsFile:
        self._lines.claim()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lines.close()


# --- lines


def line_of(entry: Entry, checkpoint: str) -> str:
    return json.dumps(line_fields(checkpoint, entry.kind, entry.item, entry.result)) + "\n"


def line_fields(checkpoint: str, kind: str, item: Any, result: Any) -> dict[str, Any]:
    """All of a line, with its SHA-256."""
    fields = {"checkpoint": checkpoint, "kind": kind, "item": item, "result": result}
    return sealed({"format_version": FORMAT_VERSION, **fields})


def read_entry(line: bytes, where: str, model: LoadedModel) -> Entry:
    """The entry of a line, its own SHA-256 and its checkpoint checked."""
    raw = parse_object(line, where, RequestError)
    if set(raw) != FIELDS:
        raise RequestError(f"{where}: {', '.join(sorted(raw))[:200]}: expected {', '.join(sorted(FIELDS))}")
    if not same(raw["format_version"], FORMAT_VERSION):
        older = "; the SHA-256 of version 1 does not cover the item: compute again into another file"
        actual = f"{where}: format_version {show(raw['format_version'])}, expected {FORMAT_VERSION}"
        raise RequestError(actual + older * same(raw["format_version"], 1))
    if raw["checkpoint"] != model.sha256:
        actual, expected = show(raw["checkpoint"]), f"{model.sha256}, that of {model.path}"
        raise RequestError(f"{where}: of the checkpoint of SHA-256 {actual}, expected {expected}")
    entry = Entry(where, str(raw["kind"]), raw["item"], raw["result"], str(raw["sha256"]))
    if problem := damage(raw):
        raise ProofError(f"{entry}: {problem}")
    return entry


def add(entries: dict[str, Entry], entry: Entry) -> None:
    """ProofError if there is another result of the item already."""
    first = entries.setdefault(key_of(entry.kind, entry.item), entry)
    if first.sha256 != entry.sha256:
        raise ProofError(f"{entry}: a line of SHA-256 {entry.sha256}, expected {first.sha256}, as {first.where} has it")


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
    chosen = [entries[index] for index in sorted(drawn)]
    for kind in dict.fromkeys(entry.kind for entry in chosen):
        if kind not in works:
            raise RequestError(f"{kind!r}: no known kind of work, expected one of {', '.join(works)}")
        same_kind = [entry for entry in chosen if entry.kind == kind]
        results = compute(works[kind], model, [decoded(entry.item, entry.where) for entry in same_kind], place)
        for entry, result in zip(same_kind, results, strict=True):
            expected = line_fields(model.sha256, entry.kind, entry.item, encoded(result))["sha256"]
            if entry.sha256 != expected:
                raise ProofError(f"{entry}: a line of SHA-256 {entry.sha256}, expected {expected}, as computed here")
    return chosen


class LineFile:
    """The one file that survives an interrupt: lines of JSON of at most `max_line` bytes each, read, then appended to.

    A missing file has none. A torn last line, which a crash may leave, is dropped with a warning, and
    overwritten by the next `append`. RequestError that names file and line for other damage.
    """

    def __init__(self, path: str | Path, max_line: int = MAX_LINE) -> None:
        self.path, self._max_line = Path(path), max_line
        self._file: IO[bytes] | None = None
        self._whole = self._size = 0  # bytes of the whole lines, and of all that was found
        self._lacks_newline = False

    def read(self) -> Iterator[tuple[str, bytes]]:
        """Each line, its end included, and where it stands; to the end, and before the first `append`. Any number of
        times."""
        self._whole = self._size = 0
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
        with self._writing():
            self._open()

    def append(self, content: bytes) -> None:
        """One more line, its end included, on the disk when this returns. RequestError if it can't be written.

        One unbuffered write after the whole lines. What a failed one leaves is cut off by the next.
        """
        with self._writing():
            file = self._open()
            file.truncate(self._whole)
            line = b"\n" + content if self._lacks_newline else content
            written = file.write(line)
            self._size = self._whole + (written or 0)
            os.fsync(file.fileno())
            if self._size < self._whole + len(line):
                raise OSError(f"{written} of {len(line)} bytes written")
            self._whole, self._lacks_newline = self._size, False

    def close(self) -> None:
        """Any number of times; the next `append` opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
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
