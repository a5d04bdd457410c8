"""A file of prepared matrices: of one checkpoint, one arithmetic and one way to prepare, which are its name.

    line 1   SHA-256 of line 2, in hex
    line 2   JSON: whose matrices these are, and of each the first tensor, shape, dtype, grid, where it begins, and the
             SHA-256 of each CHUNK of its bytes
    then     the matrices, each at a multiple of PAGE bytes, as they lie in memory

It is mapped, so processes that read the same file share its pages. Each byte is checked before it is used, by all
cores; the hash of the checkpoint, which the name begins with, is computed anew by whoever asks. So what was prepared
from other weights, for another arithmetic or by another version is never found, and a file that is damaged is an error.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.matrix import Grid, Matrix
from lfm2np.arithmetic.pieces import over_pieces
from lfm2np.checkpoint.strict_json import is_present, parse_object
from lfm2np.errors import CheckpointError, RequestError
from lfm2np.system import replaced

VERSION = 1  # raised with any change of this format, or of a bit or the grid of a prepared matrix
PAGE = 2**12  # bytes
CHUNK = 2**22  # bytes that a core hashes at a time
MAX_HEADER = 2**28  # bytes
Array = NDArray[Any]


@dataclass(frozen=True)
class Origin:
    """What matrices were prepared from, for what, and by which version."""

    checkpoint: str  # SHA-256: LoadedModel.sha256
    numerics: str
    version: int = VERSION
    byteorder: str = sys.byteorder

    @property
    def file_name(self) -> str:
        return f"{self.checkpoint}-{self.numerics}-{self.version}-{self.byteorder}.prepared"


def kept_matrices(
    directory: Path, origin: Origin, hash_again: Callable[[], str], make: Callable[[], Mapping[str, Matrix]]
) -> dict[str, Matrix]:
    """The matrices in the file of this origin, which is written first if it is not there. See read and write.

    hash_again  the checkpoint, after its weights were read: CheckpointError, and no file, if it is another one by then
    """
    file = directory / origin.file_name
    if not is_present(file, CheckpointError):
        make_directory(file)
        matrices = make()
        if (now := hash_again()) != origin.checkpoint:
            raise CheckpointError(f"{file}: not written: the checkpoint changed meanwhile, it is now of SHA-256 {now}")
        write(file, origin, matrices)
    return read(file, origin)


def make_directory(file: Path) -> None:
    """Before matrices are prepared for nothing. RequestError if nothing can be written there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as problem:
        raise RequestError(f"{file}: can't be written: {problem.strerror or problem}") from None


def write(file: Path, origin: Origin, matrices: Mapping[str, Matrix]) -> None:
    """Puts the file there as a whole, whoever else does the same. RequestError if it can't be written."""
    arrays = [array_of(matrix) for matrix in matrices.values()]
    begins = list(accumulate((rounded_up(array.nbytes) for array in arrays), initial=0))
    entries = [
        entry_of(name, matrix.grid, array, begin)
        for (name, matrix), array, begin in zip(matrices.items(), arrays, begins[:-1], strict=True)
    ]
    line = json.dumps({**asdict(origin), "bytes": begins[-1], "matrices": entries}).encode() + b"\n"
    head = hashlib.sha256(line).hexdigest().encode() + b"\n" + line
    try:
        with replaced(file) as out:
            for content in (memoryview(head), *map(bytes_of, arrays)):
                out.write(content)
                out.write(bytes(-len(content) % PAGE))
    except OSError as problem:
        raise RequestError(f"{file}: can't be written: {problem.strerror or problem}") from None


def array_of(matrix: Matrix) -> Array:
    assert isinstance(matrix.values, np.ndarray), "streamed matrices are not kept"
    return np.ascontiguousarray(matrix.values)


def entry_of(name: str, grid: Grid | None, array: Array, begin: int) -> dict[str, Any]:
    fields = None if grid is None else {**asdict(grid), "columns": grid.columns.tolist()}
    hashes = chunk_hashes(bytes_of(array))
    return {
        "name": name,
        "dtype": array.dtype.name,
        "shape": array.shape,
        "grid": fields,
        "begin": begin,
        "sha256": hashes,
    }


def read(file: Path, origin: Origin) -> dict[str, Matrix]:
    """Read-only views of the mapped file; CheckpointError for one that is damaged, cut off or of another origin.

    The file must not shrink while the views live: that is a bus error in any memory map.
    """
    try:
        with file.open("rb") as opened:
            checksum, line = opened.readline(65), opened.readline(MAX_HEADER)
        if hashlib.sha256(line).hexdigest().encode() + b"\n" != checksum:
            raise damaged(file, "its header is not of the SHA-256 that it begins with")
        raw: Any = parse_object(line, str(file), CheckpointError)
        expected = asdict(origin)
        if (stated := {name: raw.get(name) for name in expected}) != expected:
            raise CheckpointError(f"{file}: prepared weights of {stated}, expected {expected}, as its name says")
        first, size = rounded_up(len(checksum) + len(line)), file.stat().st_size
        if size != first + raw["bytes"]:
            raise damaged(file, f"{size} bytes, expected {first + raw['bytes']}")
        content = np.memmap(file, np.uint8, "r", first).view(np.ndarray)
    except OSError as problem:
        raise CheckpointError(f"{file}: cannot be read: {problem.strerror or problem}") from None
    return {entry["name"]: matrix_of(entry, content, file) for entry in raw["matrices"]}


def matrix_of(entry: Mapping[str, Any], content: Array, file: Path) -> Matrix:
    dtype, shape, grid_fields = np.dtype(entry["dtype"]), tuple(entry["shape"]), entry["grid"]
    stored = content[entry["begin"] :][: dtype.itemsize * math.prod(shape)]
    if chunk_hashes(bytes_of(stored)) != entry["sha256"]:
        raise damaged(file, f"the bytes of {entry['name']} are not of their SHA-256")
    grid = (
        None if grid_fields is None else Grid(**{**grid_fields, "columns": np.array(grid_fields["columns"], np.int32)})
    )
    return Matrix(stored.view(dtype).reshape(shape), grid)


def damaged(file: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{file}: damaged: {how}; once it is deleted, the weights are prepared anew")


def chunk_hashes(content: memoryview) -> list[str]:
    """SHA-256, in hex, of each CHUNK bytes, by all cores."""
    hashes = [""] * -(-len(content) // CHUNK)

    def fill(chunks: slice) -> None:
        for index in range(chunks.start, chunks.stop):
            hashes[index] = hashlib.sha256(content[index * CHUNK : (index + 1) * CHUNK]).hexdigest()

    over_pieces(fill, len(hashes), CHUNK, CHUNK)
    return hashes


def bytes_of(array: Array) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def rounded_up(position: int) -> int:
    return -(-position // PAGE) * PAGE
