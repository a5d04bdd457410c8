"""How a fault gets into the running program: one function's code object is replaced, and put back."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from lfm2np.errors import RequestError


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


@contextlib.contextmanager
def inject(fault: str | Fault | Variant) -> Iterator[None]:
    """Runs the block with a fault. RequestError for an unknown name, or an edit that does not fit the code."""
    from lfm2np.faults.catalogue import by_name

    chosen = by_name(fault) if isinstance(fault, str) else fault
    replaced: list[tuple[FunctionType, CodeType]] = []
    try:
        for edit in chosen.edits:
            function = find(edit.where)
            replaced.append((function, function.__code__))
            function.__code__ = edited_code(function, edit)
        yield
    finally:
        for function, code in reversed(replaced):
            function.__code__ = code


def find(where: str) -> FunctionType:
    """The function that "module:qualified.name" names; of a property, its getter."""
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    try:
        for part in path.split("."):
            found = inspect.getattr_static(found, part)
    except AttributeError:
        raise RequestError(f"fault: {where}: there is no such function") from None
    found = found.fget if isinstance(found, property) else found
    found = getattr(found, "func", found)  # a cached property
    if not isinstance(found, FunctionType):
        raise RequestError(f"fault: {where}: {type(found).__name__}, expected a function")
    return found


def edited_code(function: FunctionType, edit: Edit) -> CodeType:
    """The code object of the function's source with the edit. RequestError unless the text stands there once."""
    source = textwrap.dedent(inspect.getsource(function))
    if (count := source.count(edit.old)) != 1:
        raise RequestError(f"fault: {edit.where}: {edit.old!r} stands there {count} times, expected once")
    tree = ast.parse(source.replace(edit.old, edit.new))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    tree.body = [*future, definition]
    namespace: dict[str, Any] = {}
    exec(compile(tree, f"<fault in {edit.where}>", "exec"), function.__globals__, namespace)
    made: FunctionType = namespace[definition.name]
    if made.__code__.co_freevars != function.__code__.co_freevars:
        raise RequestError(f"fault: {edit.where}: the edit needs variables from outside the function")
    return made.__code__
