"""What has to be believed of a plain safetensors checkpoint: the reference in integers and the reading of its files.

Read off their import statements. Everything else computes faster, and is compared with them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[2]
ROOTS = ("truth/reference.py", "truth/integers.py", "checkpoint/plain.py", "checkpoint/weights.py")
READING = (
    "checkpoint/",
    "truth/config.py",
    "truth/config_values.py",
    "truth/layers.py",
    "truth/weights.py",
    "errors.py",
    "values.py",
)


@dataclass(frozen=True)
class TrustedFile:
    """`file` relative to lfm2np/; `is_reading`: for models, files and errors; it computes nothing."""

    file: str
    lines: int
    is_reading: bool


def trusted_files() -> list[TrustedFile]:
    """ROOTS and all that they import, the base first; not what is imported for types only."""
    waiting, known = list(ROOTS), set(ROOTS)
    while waiting:
        for file in imported_files(waiting.pop()):
            if file not in known:
                known.add(file)
                waiting.append(file)
    lines = {file: len((TOP / file).read_text(encoding="utf-8").splitlines()) for file in known}
    files = [TrustedFile(file, count, file.startswith(READING)) for file, count in lines.items()]
    position = {file: index for index, file in enumerate(ROOTS)}
    return sorted(files, key=lambda each: (each.is_reading, position.get(each.file, len(ROOTS)), each.file))


def imported_files(file: str) -> Iterator[str]:
    """The files of lfm2np that one imports, wherever in it, but for types."""
    for node in nodes(ast.parse((TOP / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == TOP.name:
            for alias in node.names:
                if imported := file_of(f"{node.module}.{alias.name}") or file_of(node.module):
                    yield imported


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All of a tree, without what stands under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from nodes(child)


def file_of(module: str) -> str | None:
    """Of a module of lfm2np, relative to it; None if it is a package, or none of them."""
    file = "/".join(module.split(".")[1:]) + ".py"
    return file if (TOP / file).is_file() else None
