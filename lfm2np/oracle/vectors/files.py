"""A vector set as two files in a folder: vectors.json and vectors.safetensors. Read strictly, replaced as a whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from lfm2np.checkpoint.strict_json import parse_object, read_bytes
from lfm2np.errors import RequestError
from lfm2np.oracle.vectors.form import VectorsError, require_form
from lfm2np.values import plain
from scheduler.checksum import FIELD, damage, sealed

DOCUMENT, TENSORS = "vectors.json", "vectors.safetensors"
LIMITS = {DOCUMENT: 256 * 2**20, TENSORS: 4 * 2**30}  # bytes
Tensors = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class VectorSet:
    """Both files. `tensors_sha256` is that of the second file, whatever the first says of it."""

    document: dict[str, Any]  # as schemas/vectors.schema.json describes, without its checksum
    tensors: Tensors  # by VECTOR/NAME
    tensors_sha256: str


def packaged_set() -> Path:
    """The folder of the packaged set, of the trained fixture."""
    here = Path(__file__).parents[2]
    packaged = here / "_fixtures" / "vectors" / "trained"
    for path in (packaged, here.parent / "fixtures" / "vectors" / "trained"):
        if path.is_dir():
            return path
    raise VectorsError(f"{packaged}: the packaged vectors are not in this installation; name a folder")


def read_set(folder: str | Path) -> VectorSet:
    """VectorsError names file, JSON path or tensor if the set can't be read or has another form."""
    folder = Path(folder)
    content = read_bytes(folder / DOCUMENT, LIMITS[DOCUMENT], VectorsError)
    document: dict[str, Any] = parse_object(content, str(folder / DOCUMENT), VectorsError)
    if document.get("format_version") == 1:
        raise VectorsError(f"{folder / DOCUMENT}: format_version 1, which has no checksum, expected 2: make it again")
    require_form(document, str(folder / DOCUMENT))
    if problem := damage(document):
        raise VectorsError(f"{folder / DOCUMENT}: {problem}")
    del document[FIELD]
    content = read_bytes(folder / TENSORS, LIMITS[TENSORS], VectorsError)
    tensors = read_tensors(content, str(folder / TENSORS))
    expected = {f"{vector['id']}/{name}" for vector in document["vectors"] for name in vector["tensors"]}
    for name in sorted(expected ^ tensors.keys()):
        what = "missing, though" if name in expected else "there, but not"
        raise VectorsError(f"{folder / TENSORS}: tensor {plain(name)}: {what} in its vector's list ({DOCUMENT})")
    return VectorSet(document, tensors, hashlib.sha256(content).hexdigest())


def read_tensors(content: bytes, source: str) -> dict[str, NDArray[np.float32]]:
    """All of them float32; any numbers, as they are compared by their bits."""
    try:
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except SafetensorError as problem:
        raise VectorsError(f"{source}: not a sound safetensors file ({len(content)} bytes): {problem}") from None
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] != "F32":
            raise VectorsError(f"{source}: tensor {plain(name)}: dtype {entry['dtype']}, expected F32")
        tensors[name] = np.frombuffer(entry["data"], "<f4").reshape(entry["shape"])
    return tensors


def tensors_bytes(tensors: Tensors) -> bytes:
    """The same bytes for the same tensors: no metadata, sorted names."""
    ordered = {name: np.ascontiguousarray(tensors[name], "<f4") for name in sorted(tensors)}
    content: bytes = safetensors.numpy.save(ordered)
    return content


def document_text(document: Mapping[str, Any]) -> str:
    """JSON with its checksum, and one position per line, so that a diff shows changed positions."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    whole = sealed(document)
    lines = [f"{line(name)}: {line(value)}," for name, value in whole.items() if name not in ("notes", "vectors")]
    notes = [f" {line(name)}: {line(value)}" for name, value in document["notes"].items()]
    lines += ['"notes": {', ",\n".join(notes), "},", '"vectors": [']
    vectors = []
    for vector in document["vectors"]:
        fields = [f"{line(name)}: {line(value)}" for name, value in vector.items() if name != "positions"]
        positions = ",\n".join(f"  {line(position)}" for position in vector["positions"])
        vectors.append("{" + ",\n ".join(fields) + ',\n "positions": [\n' + positions + "\n ]}")
    return "{\n" + "\n".join([*lines, ",\n".join(vectors), "]"]) + "\n}\n"


def write_set(vector_set: VectorSet, folder: str | Path) -> int:
    """Writes both files, so that the folder holds this set or its old content; returns their bytes.

    RequestError names the folder if it can't be written, or holds anything but a set.
    """
    require_replaceable(folder)
    contents = {DOCUMENT: document_text(vector_set.document).encode(), TENSORS: tensors_bytes(vector_set.tensors)}
    try:
        target = Path(folder).resolve()
        beside = target.with_name(f".{secrets.token_hex(8)}.part")
        try:
            beside.mkdir()
            for name, content in contents.items():
                with (beside / name).open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            replace_folder(target, beside)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
    except OSError as problem:
        raise RequestError(f"{folder}: can't be written: {problem.strerror or problem}") from None
    return sum(map(len, contents.values()))


def require_replaceable(folder: str | Path) -> None:
    """RequestError for a folder that can't be written, or holds anything but a set: before the work, not after."""
    try:
        target = Path(folder).resolve()
        if not target.parent.is_dir():
            raise RequestError(f"{folder}: no directory {target.parent}, expected one to write into")
        if not target.exists():
            return
        if not target.is_dir():
            raise RequestError(f"{folder}: not a directory, expected a folder to write or replace")
        others = sorted(path.name for path in target.iterdir() if path.name not in LIMITS)
    except (OSError, ValueError) as problem:
        raise RequestError(f"{folder}: can't be written: {problem}") from None
    if others:
        raise RequestError(f"{folder}: holds {plain(others[0])}, expected nothing but {' and '.join(LIMITS)}")


def replace_folder(target: Path, beside: Path) -> None:
    """A full directory can't be replaced in one step: the old one is moved aside, and back on failure."""
    if not target.exists():
        beside.rename(target)
        return
    old = beside.with_suffix(".old")
    target.rename(old)
    try:
        beside.rename(target)
    except BaseException:
        with contextlib.suppress(OSError):
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
