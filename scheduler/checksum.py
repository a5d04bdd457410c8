"""The checksum of plain data, in its own field `sha256`: results, traces, answers, vector sets and findings carry it.

It is the SHA-256 of all other fields, as JSON with sorted names and without spaces. So it holds what was written, not
how: spaces and the order of names may change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FIELD = "sha256"


def json_sha256(value: Any) -> str:
    """Of plain data as JSON reads it: names are strings; floats count by their shortest digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def sealed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, and their checksum in the place of any that they had."""
    unsealed = {name: value for name, value in fields.items() if name != FIELD}
    return {**unsealed, FIELD: json_sha256(unsealed)}


def damage(fields: Mapping[str, Any]) -> str | None:
    """What is wrong with the checksum that the fields carry; None if it is theirs."""
    stated, expected = fields.get(FIELD), sealed(fields)[FIELD]
    if stated == expected:
        return None
    return f"{FIELD} {repr(stated)[:66]}, expected {expected} of its other fields: changed since it was written"
