"""The generated pages, as text: reference and design of each room, command line, errors, file formats, the picture."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import house_picture
import rooms
import schemas
from docstrings import as_rest, escaped, literal
from rooms import CHECKOUT, Module, Room

import lfm2np.commands.cli
import scheduler
from lfm2np.errors import Lfm2npError

NOT_IMPORTED = ("__main__", "test_conformance")  # they run when they are imported


def pages() -> dict[str, str]:
    """Path below docs/ -> reStructuredText."""
    modules = rooms.read_modules()
    pages_by_path = {
        "design/generated/house.rst": house(modules),
        "reference/generated/command-line.rst": command_line(),
        "reference/generated/errors.rst": errors(modules),
        "reference/generated/formats.rst": formats(),
    }
    uses = room_imports(modules)
    for room in rooms.rooms(modules):
        pages_by_path[f"reference/generated/{room.name}.rst"] = reference_of(room)
        pages_by_path[f"design/generated/{room.name}.rst"] = design_of(room, uses)
    return pages_by_path


# --- reStructuredText


def page(*parts: str | Iterable[str]) -> str:
    lines = [line for part in parts for line in ([part, ""] if isinstance(part, str) else part)]
    return "\n".join(lines) + "\n"


def heading(text: str, line: str = "=", label: str = "") -> list[str]:
    shown = escaped(text)
    return [*([f".. _{label}:", ""] if label else []), shown, line * max(3, len(shown)), ""]


def table(names: Sequence[str], rows: Iterable[Sequence[str]], widths: str) -> list[str]:
    """A list table; cells are reStructuredText on one line."""
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
    for row in (names, *rows):
        for i, cell in enumerate(row):
            lines.append(f"   {'* -' if i == 0 else '  -'} {cell}")
    return [*lines, ""]


def code(text: str) -> str:
    return f"``{text}``" if text else ""


# --- rooms


def reference_of(room: Room) -> str:
    """What `__all__` offers, then what else the modules define."""
    offered = room.init.offered
    parts: list[str | Iterable[str]] = [heading(room.name), f".. py:module:: {room.name}", as_rest(room_text(room))]
    if offered:
        parts += [heading(f"What {room.name} offers", "-"), f".. py:currentmodule:: {room.name}"]
        parts += [directive(f"{room.name}.{name}") for name in offered]
    elif room.init.public:
        parts += [directive(f"{room.name}.{name}") for name in room.init.public]
    for module in room.modules:
        if module.name.endswith(NOT_IMPORTED):
            continue
        names = [name for name in module.public if f"{module.name}.{name}" not in offered.values()]
        if names:
            parts += [heading(module.name.rpartition(".")[2] + ".py", "-", f"module {module.name}")]
            is_taken = module.name.rpartition(".")[2] in offered  # by a function of the room
            hidden = "\n   :no-index:" if is_taken else ""
            parts += [f".. py:module:: {module.name}{hidden}", as_rest(module.docstring.split("\n"))]
            parts += [directive(f"{module.name}.{name}") for name in names]
    return page(*parts)


def room_text(room: Room) -> list[str]:
    return room.init.docstring.split("\n")


def directive(name: str) -> str:
    """The autodoc directive of a public name."""
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    if isinstance(thing, type):
        kind, options = ("autoexception" if issubclass(thing, Exception) else "autoclass"), "\n   :members:"
    else:
        kind, options = ("autofunction", "") if callable(thing) else ("autodata", "\n   :no-value:")
    return f".. {kind}:: {name}{options}"


def design_of(room: Room, uses: Mapping[str, set[str]]) -> str:
    users = sorted(other for other, names in uses.items() if room.name in names)
    rows = [(code(module.path.name), escaped(rooms.summary(module.docstring))) for module in room.modules]
    below = sorted(name for name in uses if name.rpartition(".")[0] == room.name)
    return page(
        heading(room.name),
        as_rest(room_text(room)),
        table(("Module", "What it is"), rows, "25 75") if rows else [],
        *([f"Rooms in it: {links(below)}."] if below else []),
        f"Imports: {links(sorted(uses[room.name]))}.",
        f"Imported by: {links(users)}.",
        f"Names and signatures: :doc:`/reference/generated/{room.name}`.",
    )


def links(names: Sequence[str]) -> str:
    return ", ".join(f":doc:`{name} </design/generated/{name}>`" for name in names) or "nothing of ours"


def room_imports(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Folder -> folders that its own modules import."""

    def folder(name: str) -> str:
        return name if modules[name].path.name == "__init__.py" else name.rpartition(".")[0]

    imports: dict[str, set[str]] = {}
    for module in modules.values():
        imports.setdefault(folder(module.name), set()).update(map(folder, rooms.imports(module, dict(modules))))
    return {name: others - {name} for name, others in imports.items()}


def house(modules: dict[str, Module]) -> str:
    arrows = rooms.arrows(modules)
    folders = {room.name for room in rooms.rooms(modules)}
    addresses = {box: f"{box}.html" for box in arrows if box in folders}
    rows = [(code(name), imported, users) for name, imported, users in house_picture.table(arrows)]
    return page(
        heading("The house"),
        "A box is a room: a folder of lfm2np, a module beside the folders, or the scheduler. An arrow goes from a room "
        "to one that it imports. What an arrow over other rooms implies is left out; the table has every import. Both "
        "are made from the source's imports whenever these pages are built.",
        [".. raw:: html", "", f"   {house_picture.picture(arrows, addresses)}", ""],
        table(("Room", "imports", "is imported by"), rows, "16 42 42"),
        heading("Room by room", "-"),
        [".. toctree::", "   :maxdepth: 1", "", *(f"   {room.name}" for room in rooms.rooms(modules)), ""],
    )


# --- the command line


def build_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = importlib.import_module("lfm2np.commands.cli.program").build_parser()
    return parser


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The program, then its commands and theirs, in the order of the help."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in dict.fromkeys(action.choices.values()):
                yield from parsers(sub)


def command_line() -> str:
    parts: list[str | Iterable[str]] = [
        heading("The command line"),
        "Each command, as ``--help`` tells it.",
    ]
    for parser in parsers(build_parser()):
        parts += [heading(parser.prog, "-", f"command {parser.prog}"), literal(parser.format_help().split("\n"))]
    return page(*parts)


# --- errors


def errors(modules: Mapping[str, Module]) -> str:
    for package in (lfm2np, scheduler):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if info.name in modules and modules[info.name].public and not info.name.endswith(NOT_IMPORTED):
                importlib.import_module(info.name)  # so that every subclass is known
    parts: list[str | Iterable[str]] = [
        heading("Errors and exit codes"),
        "Every error of lfm2np is an ``Lfm2npError``. Its message names the thing, its value, what was expected and "
        "where it stands; the command line prints it as one line on standard error and ends with its exit code.",
        table(
            ("Error", "Exit code", "What it says"),
            [
                (code(f"{kind.__module__}.{kind.__name__}"), str(kind.exit_code), escaped(rooms.summary(kind.__doc__)))
                for kind in kinds(Lfm2npError)
            ],
            "35 10 55",
        ),
        "The scheduler, which imports nothing of lfm2np, has its own:",
        table(
            ("Error", "What it says"),
            [
                (code(f"{kind.__module__}.{kind.__name__}"), escaped(rooms.summary(kind.__doc__ or "")))
                for kind in kinds(scheduler.SchedulerError)
            ],
            "35 65",
        ),
        heading("Exit codes", "-"),
        "A command that judges an engine ends with 2 where nothing that it judges was reported: log-probabilities for "
        "``check``, token ids for ``fuzz`` and ``vectors verify``, which say where only tokens were compared. What "
        "can't be read or run is 3 there.",
    ]
    return page(*parts, literal(build_parser().epilog.split("\n")))


def kinds(base: type[Any]) -> Iterator[type[Any]]:
    """The class and all below it that are the package's own, once each."""
    classes = [base]
    for kind in classes:
        classes += [subclass for subclass in kind.__subclasses__() if subclass not in classes]
    yield from (kind for kind in classes if kind.__module__.partition(".")[0] in ("lfm2np", "scheduler"))


# --- file formats


def formats() -> str:
    parts: list[str | Iterable[str]] = [
        heading("File formats"),
        "What the commands read and write, each with a JSON Schema (draft 2020-12) that lies in the package; the tests "
        "hold real files against it. A format that changes its meaning changes its version.",
    ]
    for path in schemas.files(CHECKOUT):
        schema = json.loads(path.read_text(encoding="utf-8"))
        name = path.name.removesuffix(".schema.json")
        parts += [heading(schema["title"], "-", f"format {name}"), f":repo:`{path.relative_to(CHECKOUT)}`"]
        parts += [escaped(schema.get("description", ""))]
        for title, description, rows in schemas.objects(schema):
            parts += [heading(f"{name}: {title}", "~")] if title else []
            parts += [escaped(description)]
            cells = [(code(field), escaped(kind), escaped(meaning)) for field, kind, meaning in rows]
            parts += [table(("Name", "Value", "Meaning"), cells, "22 33 45")]
        for example in schema.get("examples", ()):
            parts += ["An example:", literal(json.dumps(example).split("\n"), "json")]
    return page(*parts)
