"""The house as the source shows it: rooms, their modules, docstrings, public names, and who imports whom.

A room is a folder with an `__init__.py`, or a module beside such folders in lfm2np/. Nothing is imported here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = ("lfm2np", "scheduler")


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module = field(repr=False)

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @property
    def public(self) -> list[str]:
        """Functions and classes that are defined here, in the order of the file."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return [node.name for node in self.tree.body if isinstance(node, kinds) and not node.name.startswith("_")]

    @property
    def offered(self) -> dict[str, str]:
        """What `__all__` names, or `_WHERE` by its modules: name -> where it comes from (its full name there)."""
        sources = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assigned = {
            target.id: node.value
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if "_WHERE" in assigned:
            return {name: f"{module}.{name}" for name, module in ast.literal_eval(assigned["_WHERE"]).items()}
        if "__all__" in assigned:
            return {name: sources.get(name, f"{self.name}.{name}") for name in ast.literal_eval(assigned["__all__"])}
        return {}


@dataclass
class Room:
    """A folder: its `__init__` first, then its modules."""

    name: str
    init: Module
    modules: list[Module] = field(default_factory=list)

    @property
    def title(self) -> str:
        return self.init.docstring.partition("\n")[0]


def summary(docstring: str) -> str:
    """The first paragraph, on one line."""
    return " ".join(docstring.partition("\n\n")[0].split())


def read_modules(top: Path = CHECKOUT) -> dict[str, Module]:
    modules = {}
    for package in PACKAGES:
        for path in sorted((top / package).rglob("*.py")):
            name = ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")
            modules[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    return modules


def rooms(modules: dict[str, Module]) -> list[Room]:
    """The folders, each with the modules that lie directly in it."""
    rooms_by_name = {
        module.name: Room(module.name, module) for module in modules.values() if module.path.name == "__init__.py"
    }
    for module in modules.values():
        if module.path.name != "__init__.py":
            rooms_by_name[module.name.rpartition(".")[0]].modules.append(module)
    return sorted(rooms_by_name.values(), key=lambda room: (room.name.split(".")[0] != "lfm2np", room.name))


def imports(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    """Ours that a module imports, wherever in the file, of types too. `lfm2np` imports a name when that is used."""
    for node in ast.walk(module.tree) if module.name != "lfm2np" else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from (name for name in (whole if whole in modules else node.module,) if name in modules)


def box_of(module: str, split: frozenset[str] = frozenset()) -> str:
    """Of the picture: scheduler, a folder in lfm2np/, a module there or in `split`; `lfm2np` is its `__init__`."""
    return module if module in split else ".".join(module.split(".")[: 1 if module.startswith("scheduler") else 2])


Arrows = dict[str, dict[str, list[str]]]  # box -> {box that it imports: the modules that it imports}


def arrows(modules: dict[str, Module]) -> Arrows:
    """Without a circle: of boxes that import each other, the modules of the thinnest arrow become boxes."""
    imported = {module.name: sorted(set(imports(module, modules))) for module in modules.values()}
    split: frozenset[str] = frozenset()
    while True:
        found: Arrows = {}
        for name, others in imported.items():
            mine = box_of(name, split)
            found.setdefault(mine, {})
            for other in others:
                if (theirs := box_of(other, split)) != mine and other not in found[mine].setdefault(theirs, []):
                    found[mine][theirs].append(other)
        try:
            TopologicalSorter(found).prepare()
        except CycleError as error:
            circle = error.args[1][::-1]  # each imports the next
            steps = [found[room][other] for room, other in pairwise(circle)]
            split |= frozenset(min(steps, key=len))
        else:
            return found
