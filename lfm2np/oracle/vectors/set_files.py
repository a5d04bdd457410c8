"""A vector set as two files in a folder: vectors.json and vectors.safetensors. Read strictly, replaced as a whole.

Its form is what schemas/vectors.schema.json describes: checked are the keywords of JSON Schema that the file uses, and
what no schema can express, names that refer to others and lists of equal length. golden.py computes the values again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from lfm2np.checkpoint.strict_json import parse_object, read_bytes
from lfm2np.errors import Lfm2npError, RequestError
from lfm2np.values import plain, show
from scheduler.checksum import FIELD, damage, sealed

DOCUMENT, TENSORS = "vectors.json", "vectors.safetensors"
LIMITS = {DOCUMENT: 256 * 2**20, TENSORS: 4 * 2**30}  # bytes
Tensors = Mapping[str, NDArray[np.float32]]
Schema = Mapping[str, Any]
SCHEMA_FILE = Path(__file__).parents[1] / "schemas" / "vectors.schema.json"
TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "null": lambda value: value is None,
}
WORDS = {
    *("$schema", "title", "description", "$defs", "$ref", "oneOf", "type", "const", "enum", "pattern"),
    *("minimum", "exclusiveMinimum", "minItems", "maxItems", "items", "prefixItems"),
    *("properties", "required", "additionalProperties"),
}


class VectorsError(Lfm2npError):
    """A vector set is missing, can't be read, or is invalid."""

    exit_code = 3


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


# --- the form of the document


@cache
def schema() -> Schema:
    parsed: Schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return parsed


def require_form(document: Any, source: str) -> None:
    """VectorsError names the file and the path of the first violation."""
    try:
        check(document, schema(), "$")
        check_references(document)
    except VectorsError as problem:
        raise VectorsError(f"{source}: {problem}") from None


def check(value: Any, rule: Schema, path: str) -> None:
    """One value against one rule of the schema, recursively."""
    require(set(rule) <= WORDS, path, sorted(rule), "only words of JSON Schema that this check knows")
    if "$ref" in rule:
        check(value, schema()["$defs"][rule["$ref"].removeprefix("#/$defs/")], path)
        return
    if "oneOf" in rule:
        check_kind(value, rule["oneOf"], path)
        return
    if "type" in rule:
        types = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        require(any(TYPES[kind](value) for kind in types), path, value, " or ".join(types))
    if "const" in rule:
        require(type(value) is type(rule["const"]) and value == rule["const"], path, value, repr(rule["const"]))
    if "enum" in rule:
        require(isinstance(value, str) and value in rule["enum"], path, value, f"one of {', '.join(rule['enum'])}")
    if "pattern" in rule:
        require(re.search(rule["pattern"], value) is not None, path, value, f"text like {rule['pattern']}")
    if "minimum" in rule:
        require(value >= rule["minimum"], path, value, f"at least {rule['minimum']}")
    if "exclusiveMinimum" in rule:
        require(value > rule["exclusiveMinimum"], path, value, f"more than {rule['exclusiveMinimum']}")
    if isinstance(value, list):
        check_list(value, rule, path)
    if isinstance(value, dict):
        check_object(value, rule, path)


def check_list(value: list[Any], rule: Schema, path: str) -> None:
    least, most = rule.get("minItems", 0), rule.get("maxItems", len(value))
    require(least <= len(value) <= most, path, len(value), f"{least} or more, at most {most} entries")
    for index, item in enumerate(value):
        fixed = rule.get("prefixItems", [])
        check(item, fixed[index] if index < len(fixed) else rule.get("items", {}), f"{path}[{index}]")


def check_object(value: dict[str, Any], rule: Schema, path: str) -> None:
    properties, rest = rule.get("properties", {}), rule.get("additionalProperties", {})
    for name in rule.get("required", ()):
        if name not in value:
            raise VectorsError(f"{path}.{name}: missing, expected {', '.join(rule['required'])}")
    for name, item in value.items():
        if name not in properties and rest is False:
            raise VectorsError(f"{path}: field {show(name)}, expected only {', '.join(properties)}")
        check(item, properties.get(name, rest), f"{path}.{name}")


def check_kind(value: Any, rules: list[Schema], path: str) -> None:
    """One of several objects distinguished by their `kind`."""
    named = [schema()["$defs"][rule["$ref"].removeprefix("#/$defs/")] for rule in rules]
    kinds = {rule["properties"]["kind"]["const"]: rule for rule in named}
    kind = value.get("kind") if isinstance(value, dict) else value
    require(isinstance(kind, str) and kind in kinds, f"{path}.kind", kind, f"one of {', '.join(kinds)}")
    check(value, kinds[str(kind)], path)


def require(holds: bool, path: str, value: Any, expected: str) -> None:
    if not holds:
        raise VectorsError(f"{path}: {show(value)}, expected {expected}")


def check_references(document: dict[str, Any]) -> None:
    """Names that must occur elsewhere in the set, ids below vocab_size, one position per token."""
    names = [vector["id"] for vector in document["vectors"]]
    for index, vector in enumerate(document["vectors"]):
        path = f"$.vectors[{index}]"
        require(names.index(vector["id"]) == index, f"{path}.id", vector["id"], "another id: it is there twice")
        require_known(vector["flags"], document["notes"], f"{path}.flags", "the name of a note")
        for number, hint in enumerate(vector["schedule"]):
            where = f"{path}.schedule[{number}]"
            named = [*hint.get("with", ()), *([hint["id"]] if "id" in hint else ())]
            require_known(named, set(names) - {vector["id"]}, where, "the id of another vector")
        for field in ("prompt_token_ids", "token_ids"):
            require_ids(vector[field], document["model"]["vocab_size"], f"{path}.{field}")
        tokens, count = len(vector["token_ids"]), len(vector["positions"])
        require(count == tokens, f"{path}.positions", count, f"{tokens} entries, one for each of token_ids")
        for number, position in enumerate(vector["positions"]):
            check_position(position, document, f"{path}.positions[{number}]")


def check_position(position: dict[str, Any], document: dict[str, Any], path: str) -> None:
    formats = document["formats"]
    require_known(position["may_tie_in"], formats, f"{path}.may_tie_in", "the name of a format")
    require_ids([entry[0] for entry in position["top"]], document["model"]["vocab_size"], f"{path}.top")
    require(set(position["noise"]) == set(formats), f"{path}.noise", sorted(position["noise"]), ", ".join(formats))
    for name, bounds in position["noise"].items():
        others = len(position["top"]) - 1
        require(len(bounds["gaps"]) == others, f"{path}.noise.{name}.gaps", len(bounds["gaps"]), f"{others} entries")


def require_known(names: list[str], known: Collection[str], path: str, expected: str) -> None:
    for index, name in enumerate(names):
        require(name in known, f"{path}[{index}]", name, expected)


def require_ids(ids: list[int], vocab_size: int, path: str) -> None:
    for index, token_id in enumerate(ids):
        require(token_id < vocab_size, f"{path}[{index}]", token_id, f"less than vocab_size {vocab_size}")
