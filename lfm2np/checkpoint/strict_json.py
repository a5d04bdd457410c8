"""JSON as the loaders read it: bounded, an object at the top, no duplicate key, no NaN and no Infinity."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lfm2np.errors import ConfigError, Lfm2npError
from lfm2np.values import show_json

MAX_JSON_BYTES = 16 * 2**20
KINDS = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def is_present(path: Path, error: type[Lfm2npError]) -> bool:
    """Whether there is such an entry, a dangling link included: what was meant to be there must not count as absent."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as problem:
        raise error(f"{path}: cannot be read: {problem}") from None
    return True


def is_directory(path: Path, error: type[Lfm2npError]) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError) as problem:
        raise error(f"{path}: cannot be read: {problem}") from None


def read_bytes(path: Path, limit: int, error: type[Lfm2npError]) -> bytes:
    """The whole of a regular file of at most `limit` bytes; raises `error` naming it otherwise."""
    try:
        if not path.is_file():
            state = "is not a regular file" if path.exists() else "does not exist"
            raise error(f"{path}: {state}")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the path
        raise error(f"{path}: cannot be read: {problem}") from None
    if len(content) > limit:
        raise error(f"{path}: more than {limit} bytes, expected at most {limit}")
    return content


def decode_text(content: bytes, source: str, error: type[Lfm2npError]) -> str:
    """UTF-8 text, or `error` naming the source and the first bad byte."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{source}: not UTF-8: byte {problem.start}: {problem.reason}") from None


def decode_json(content: bytes, source: str, error: type[Lfm2npError]) -> str:
    """As decode_text; JSON has no byte order mark before it, which some editors write."""
    text = decode_text(content, source, error)
    if text.startswith("\ufeff"):
        raise error(f"{source}: begins with a byte order mark (BOM), expected UTF-8 without one")
    return text


def parse_object(content: bytes, source: str, error: type[Lfm2npError]) -> dict[str, object]:
    """A JSON object, strictly: `json` alone would keep the last of two equal keys and accept NaN."""

    def no_constant(name: str) -> object:
        raise error(f"{source}: {name} is not JSON, expected a finite number")

    def finite(text: str) -> float:
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise error(f"{source}: the number {text[:40]} overflows, expected a finite number")
        return number

    parsed = _parsed(content, source, error, parse_constant=no_constant, parse_float=finite)
    if not isinstance(parsed, dict):
        raise error(f"{source}: a JSON {KINDS[type(parsed)]}, expected an object")
    return parsed


def parse_value(content: bytes, source: str, error: type[Lfm2npError]) -> object:
    """Any JSON value, with NaN, Infinity and -Infinity as Python's json writes them; `error` for a duplicate key."""
    return _parsed(content, source, error)


def read_object(path: Path, error: type[Lfm2npError]) -> dict[str, object]:
    """The JSON object in a file of at most MAX_JSON_BYTES; raises `error` naming the file."""
    return parse_object(read_bytes(path, MAX_JSON_BYTES, error), str(path), error)


def _parsed(content: bytes, source: str, error: type[Lfm2npError], **hooks: Any) -> object:
    text = decode_json(content, source, error)
    try:
        return json.loads(text, object_pairs_hook=_unique_keys(source, error), **hooks)
    except RecursionError:
        raise error(f"{source}: JSON nested too deeply") from None
    except ValueError as problem:  # also an integer of more than 4300 digits
        raise error(f"{source}: not JSON: {problem}") from None


def _unique_keys(source: str, error: type[Lfm2npError]) -> Callable[[list[tuple[str, object]]], dict[str, object]]:
    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise error(f"{source}: the key {twice[:80]!r} stands twice in one object, expected once")
        return fields

    return build


@contextlib.contextmanager
def naming(source: object, joint: str = ": ") -> Iterator[None]:
    """A ConfigError from inside begins with the file or the key that it comes from."""
    try:
        yield
    except ConfigError as problem:
        text, prefix = str(problem), f"{source}{joint}"
        raise ConfigError(text if text.startswith(prefix) else prefix + text) from None


def require(is_right: bool, key: str, value: object, expected: str) -> None:
    """ConfigError names the key, the value and what was expected."""
    if not is_right:
        raise ConfigError(f"{key}: {show_json(value)}, expected {expected}")
