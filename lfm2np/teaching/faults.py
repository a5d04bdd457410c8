"""Bugs of real engines, put into this one while a block runs: what the lessons and the suite's wrong engine need.

    with inject("convolution-crosses-requests"):
        ...                     # every engine of this process now has that bug

A fault is a patch of one or more functions. `inject` compiles the patched source and puts its code object into the
function. So the engine holds no hook, an unused fault costs nothing, and a patch whose text is not found is an error.
faults.txt holds the faults; a checkout has more of them in tests/faults, in files of the same form:

    section A

    slot-freed-twice
    A slot that is given back is free twice, so that two requests get it.
    seen in: mistral.rs 2306; mistral.rs 2357
    @@ scheduler.memory:Memory.release
    - self.free_slots.append(request.slot)
    + self.free_slots += [request.slot, request.slot]

A blank line ends a fault; `seen in`, which may be missing, names public issues. Behind @@ stands the function, below it
what goes (-), what comes (+) and what stays, from the third character of a line on. The text that goes and stays has to
be in that function exactly once; it may begin and end within a line. Lines that begin with # are comments.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
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
    """A real bug, imitated. `seen_in` names the public issues. `section` says what is broken:

    A convolution state, B paged and prefix cache, C scheduling, D sampling and text, E the model itself.
    """

    name: str
    section: str
    sentence: str  # what the engine then does
    seen_in: tuple[str, ...]
    edits: tuple[Edit, ...]


@contextlib.contextmanager
def inject(fault: str | Fault) -> Iterator[None]:
    """Runs the block with a fault, or with the one of FAULTS that has this name.

    RequestError for an unknown name, or an edit that does not fit the code.
    """
    if isinstance(fault, str) and fault not in FAULTS:
        raise RequestError(f"fault {fault!r}: expected one of {', '.join(FAULTS)}")
    chosen = FAULTS[fault] if isinstance(fault, str) else fault
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


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Those of a file, in its order. RequestError for what is no patch."""
    faults, section = [], ""
    for block in text.split("\n\n"):
        head, *patches = "\n".join(line for line in block.splitlines() if line[:1] != "#").split("\n@@ ")
        name, *lines = head.strip().splitlines() or [""]
        if name.startswith("section "):
            section = name.removeprefix("section ")
        elif name:
            sentence, _, reports = " ".join(lines).partition(" seen in: ")
            seen_in = tuple(reports.split("; ")) if reports else ()
            faults.append(Fault(name, section, sentence, seen_in, tuple(map(parse_patch, patches))))
    return tuple(faults)


def parse_patch(patch: str) -> Edit:
    """`patch` begins with what stands behind @@."""
    where, *lines = patch.splitlines()
    if not lines:
        raise RequestError(f"fault: @@ {where}: nothing below it, expected a patch")
    for line in lines:
        if line[:2] not in ("- ", "+ ", "  "):
            raise RequestError(f"fault: @@ {where}: {line!r}, expected '- ', '+ ' or two blanks before a line")
    old, new = ("\n".join(line[2:] for line in lines if line[0] != other) for other in "+-")
    return Edit(where, old, new)


FAULTS = {
    fault.name: fault
    for fault in parse_faults((resources.files("lfm2np.teaching") / "faults.txt").read_text(encoding="utf-8"))
}
