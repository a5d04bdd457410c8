"""Whether a vector set has the form that schemas/vectors.schema.json describes; each error names its JSON path.

Checks the keywords of JSON Schema that the file uses, and what no schema can express: names that refer to others, lists
of equal length. Values are not recomputed here: golden.py does that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lfm2np.errors import Lfm2npError
from lfm2np.values import show

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
