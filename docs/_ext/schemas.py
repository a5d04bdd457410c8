"""A JSON Schema as tables: one an object, a row a name, with its value in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rooms import PACKAGES

Row = tuple[str, str, str]  # name, value, meaning


def files(checkout: Path) -> list[Path]:
    """Those of our packages: a .venv in the checkout may hold copies."""
    return sorted(path for package in PACKAGES for path in (checkout / package).rglob("*.schema.json"))


def objects(schema: dict[str, Any]) -> Iterator[tuple[str, str, list[Row]]]:
    """(name in $defs or "", description, rows) of each object that has properties, the whole first."""
    for name, definition in {"": schema, **schema.get("$defs", {})}.items():
        if "properties" in definition:
            required = definition.get("required", ())
            rows = [
                (
                    field,
                    in_words(value) + ("" if field in required else " (may be missing)"),
                    value.get("description", "") if isinstance(value, dict) else "",
                )
                for field, value in definition["properties"].items()
            ]
            yield name, definition.get("description", "") if name else "", rows


def in_words(value: Any) -> str:
    """What a value may be, in a few words; `code` in backticks."""
    if not isinstance(value, dict) or not value:
        return "anything"
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "enum" in value:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in value["enum"])
    if "$ref" in value:
        return value["$ref"].rpartition("/")[2]
    for key, word in (("anyOf", " or "), ("oneOf", " or "), ("allOf", " and ")):
        if key in value:
            return word.join(in_words(option) for option in value[key])
    kinds = value.get("type", "anything")
    return " or ".join(of_type(kind, value) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def of_type(kind: str, value: dict[str, Any]) -> str:
    if kind == "array":
        first = [in_words(item) for item in value.get("prefixItems", ())]
        if value.get("items") is False:
            return f"[{', '.join(first)}]"
        return "list of " + ", then ".join([*first, in_words(value.get("items", {}))])
    if kind == "object" and isinstance(value.get("additionalProperties"), dict):
        return f"object of {in_words(value['additionalProperties'])}"
    if kind in ("integer", "number"):
        lowest, highest = (value.get(key) for key in ("minimum", "maximum"))
        limits = [f"{lowest} or more"] if lowest is not None else []
        limits += [f"at most {highest}"] if highest is not None else []
        return ", ".join([kind, *limits])
    return f"{kind} like `{value['pattern']}`" if kind == "string" and "pattern" in value else kind
