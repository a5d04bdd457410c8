"""The JSON Schemas of lfm2np/oracle/schemas."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from jsonschema import Draft202012Validator

import lfm2np


@cache
def validator(name: str) -> Draft202012Validator:
    path = Path(lfm2np.__file__).with_name("oracle") / "schemas" / f"{name}.schema.json"
    return Draft202012Validator(json.loads(path.read_text(encoding="utf-8")))
