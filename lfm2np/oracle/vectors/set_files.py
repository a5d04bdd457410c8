"""A vector set as one file, vectors.json, which schemas/vectors.schema.json describes.

Its checksum shows that it is as it was written; golden.py computes the values again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lfm2np.errors import Lfm2npError
from lfm2np.oracle import vectors_plain
from scheduler.checksum import sealed

FILE = "vectors.json"
PACKAGED = ("trained", "moe", "lfm3")  # sets of the fixtures of these names


class VectorsError(Lfm2npError):
    """A vector set is missing, can't be read, or is invalid."""

    exit_code = 3


def packaged_set(name: str = PACKAGED[0]) -> Path:
    """The packaged set of that fixture."""
    here = Path(__file__).parents[2]
    packaged = here / "_fixtures" / "vectors" / name / FILE
    for path in (packaged, here.parent / "fixtures" / "vectors" / name / FILE):
        if path.is_file():
            return path
    raise VectorsError(f"{packaged}: the packaged vectors are not in this installation; name a file")


@contextlib.contextmanager
def sound(source: object) -> Iterator[None]:
    """Whatever the form of a document makes fail inside is a VectorsError."""
    try:
        yield
    except vectors_plain.PlainError as problem:
        raise VectorsError(str(problem)) from None
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as problem:
        raise VectorsError(f"{source}: not a sound vector set: {type(problem).__name__}: {problem}") from None


def read_set(path: str | Path) -> dict[str, Any]:
    """Without its checksum. VectorsError if it can't be read, or was changed since it was written."""
    with sound(path):
        return vectors_plain.read_document(str(path))


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
