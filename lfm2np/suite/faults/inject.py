"""How a fault gets into the running program: one function's code object is replaced, and put back."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.suite.faults.catalogue import read_faults
from lfm2np.suite.faults.edits import Edit, Fault, Variant
from lfm2np.suite.faults.variants import VARIANTS


@contextlib.contextmanager
def inject(fault: str | Fault | Variant) -> Iterator[None]:
    """Runs the block with a fault. RequestError for an unknown name, or an edit that does not fit the code."""
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
    target: Any = importlib.import_module(module)
    try:
        for part in path.split("."):
            target = inspect.getattr_static(target, part)
    except AttributeError:
        raise RequestError(f"fault: {where}: there is no such function") from None
    target = target.fget if isinstance(target, property) else target
    target = getattr(target, "func", target)  # a cached property
    if not isinstance(target, FunctionType):
        raise RequestError(f"fault: {where}: {type(target).__name__}, expected a function")
    return target


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
    edited: FunctionType = namespace[definition.name]
    if edited.__code__.co_freevars != function.__code__.co_freevars:
        raise RequestError(f"fault: {edit.where}: the edit needs variables from outside the function")
    return edited.__code__


__all__ = ["FAULTS", "VARIANTS", "by_name"]

FAULTS = read_faults()


def by_name(name: str) -> Fault | Variant:
    """RequestError for a name that is neither a fault's nor a variant's."""
    everything: tuple[Fault | Variant, ...] = (*FAULTS, *VARIANTS)
    for each in everything:
        if each.name == name:
            return each
    raise RequestError(f"fault {name!r}: not known; `lfm2np faults --list` prints them all")
