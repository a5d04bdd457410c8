"""What a fault is: edits of functions, as plain data. inject.py puts them into the running program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Edit:
    """In the function `where`, the text `old`, which must stand there exactly once, becomes `new`.

    where  "module:function" or "module:Class.method"; a property by its name
    """

    where: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A real bug, imitated. `seen_in` names the public issues; `section` is that of the catalogue of such bugs, A to E:

    A convolution state, B paged and prefix cache, C scheduling, D sampling and text, E the model itself.
    """

    name: str
    section: str
    sentence: str  # what the engine then does
    seen_in: tuple[str, ...]
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Variant:
    """A change that must not change any answer: edits, sizes that override those asked for, or the environment."""

    name: str
    sentence: str
    edits: tuple[Edit, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)  # needs a fresh process
