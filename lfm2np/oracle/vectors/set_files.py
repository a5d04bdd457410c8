"""A vector set as two files in a folder: vectors.json and vectors.safetensors.

schemas/vectors.schema.json describes the first. Its checksum shows that it is as it was written; golden.py computes the
values again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from lfm2np.checkpoint.strict_json import read_bytes
from lfm2np.errors import Lfm2npError, RequestError
from lfm2np.oracle import vectors_plain
from lfm2np.system import write_whole
from lfm2np.values import plain
from scheduler.checksum import sealed

DOCUMENT, TENSORS = "vectors.json", "vectors.safetensors"
MOST_BYTES = 4 * 2**30  # of tensors
PACKAGED = ("trained", "moe", "lfm3")  # sets of the fixtures of these names
Tensors = Mapping[str, NDArray[np.float32]]


class VectorsError(Lfm2npError):
    """A vector set is missing, can't be read, or is invalid."""

    exit_code = 3


@dataclass(frozen=True, eq=False)
class VectorSet:
    """Both files. `tensors_sha256` is that of the second file, whatever the first says of it."""

    document: dict[str, Any]  # as schemas/vectors.schema.json describes, without its checksum
    tensors: Tensors  # by VECTOR/NAME
    tensors_sha256: str


def packaged_set(name: str = PACKAGED[0]) -> Path:
    """The folder of the packaged set of that fixture."""
    here = Path(__file__).parents[2]
    packaged = here / "_fixtures" / "vectors" / name
    for path in (packaged, here.parent / "fixtures" / "vectors" / name):
        if path.is_dir():
            return path
    raise VectorsError(f"{packaged}: the packaged vectors are not in this installation; name a folder")


@contextlib.contextmanager
def sound(source: object) -> Iterator[None]:
    """Whatever the form of a document makes fail inside is a VectorsError."""
    try:
        yield
    except vectors_plain.PlainError as problem:
        raise VectorsError(str(problem)) from None
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        raise VectorsError(f"{source}: not a sound vector set: {type(problem).__name__}: {problem}") from None


def read_set(folder: str | Path) -> VectorSet:
    """VectorsError names file or tensor if the set can't be read, or was changed since it was written."""
    path, tensors_path = Path(folder) / DOCUMENT, Path(folder) / TENSORS
    with sound(path):
        document = vectors_plain.read_document(str(path))
        expected = {f"{vector['id']}/{name}" for vector in document["vectors"] for name in vector["tensors"]}
    content = read_bytes(tensors_path, MOST_BYTES, VectorsError)
    tensors = read_tensors(content, str(tensors_path))
    for name in sorted(expected ^ tensors.keys()):
        what = "missing, though" if name in expected else "there, but not"
        raise VectorsError(f"{tensors_path}: tensor {plain(name)}: {what} in its vector's list ({DOCUMENT})")
    return VectorSet(document, tensors, hashlib.sha256(content).hexdigest())


def read_tensors(content: bytes, source: str) -> dict[str, NDArray[np.float32]]:
    """All of them float32; any numbers, as they are compared by their bits."""
    try:
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except SafetensorError as problem:
        raise VectorsError(f"{source}: not a sound safetensors file ({len(content)} bytes): {problem}") from None
    for name, entry in entries:
        if entry["dtype"] != "F32":
            raise VectorsError(f"{source}: tensor {plain(name)}: dtype {entry['dtype']}, expected F32")
    return {name: np.frombuffer(entry["data"], "<f4").reshape(entry["shape"]) for name, entry in entries}


def tensors_bytes(tensors: Tensors) -> bytes:
    """The same bytes for the same tensors: no metadata, sorted names."""
    content: bytes = safetensors.numpy.save(
        {name: np.ascontiguousarray(tensors[name], "<f4") for name in sorted(tensors)}
    )
    return content


def document_text(document: Mapping[str, Any]) -> str:
    """JSON with its checksum, a line for each position or row of a script, so that a diff shows what has changed."""
    return text_of(sealed(document)) + "\n"


def text_of(value: Any) -> str:
    if isinstance(value, dict) and any(map(is_table, value.values())):
        return "{" + ",\n ".join(f"{json.dumps(name)}: {text_of(item)}" for name, item in value.items()) + "}"
    if is_table(value):
        return "[\n" + ",\n".join(map(text_of, value)) + "\n]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def write_set(vector_set: VectorSet, folder: str | Path) -> int:
    """Writes both files, each as a whole, and returns their bytes. RequestError if that can't be.

    The document names the tensors' SHA-256 and comes last: what an interrupt leaves between the two does not verify.
    """
    contents = {TENSORS: tensors_bytes(vector_set.tensors), DOCUMENT: document_text(vector_set.document).encode()}
    try:
        Path(folder).mkdir(exist_ok=True)
    except OSError as problem:
        raise RequestError(f"{folder}: can't be written: {problem.strerror or problem}") from None
    for name, content in contents.items():
        write_whole(Path(folder) / name, content)
    return sum(map(len, contents.values()))
