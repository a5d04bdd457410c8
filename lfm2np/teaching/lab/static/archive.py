"""The package as a browser gets it: the files that the laboratory imports, and the fixtures, in archives.

The same files make the same bytes.
"""

from __future__ import annotations

import ast
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import lfm2np
import scheduler
from lfm2np.teaching.lab.static import plain_safetensors, plain_tokenizers

ROOT = "lfm2np.teaching.lab.static.browser"
TOPS = {"lfm2np": Path(lfm2np.__file__).parent, "scheduler": Path(scheduler.__file__).parent}
EARLY = ("trained", "hand")  # that the first page needs
DATA = (
    ".txt",
    ".css",
    ".js",
    ".json",
    ".toml",
)  # what a package reads of its own, beside its code or in a folder there


def code() -> dict[str, bytes]:
    """Name in the archive -> content: ROOT, all that it imports wherever in a file, and what lies beside that."""
    modules = imported_modules(ROOT)
    files = {name_of(path): path.read_bytes() for path in modules.values()}
    for folder in {path.parent for path in modules.values()}:
        inner = [each for each in folder.iterdir() if each.is_dir() and not any(each.glob("*.py"))]
        for path in (path for place in (folder, *inner) for path in place.iterdir() if path.suffix in DATA):
            files[name_of(path)] = path.read_bytes()
    stand_ins = {"safetensors.py": plain_safetensors, "tokenizers.py": plain_tokenizers}
    return files | {name: Path(str(module.__file__)).read_bytes() for name, module in stand_ins.items()}


def fixture(name: str) -> dict[str, bytes]:
    """The same of a fixture, where an installed package has it."""
    folder = lfm2np.trained_fixture().parent / name
    return {
        f"lfm2np/_fixtures/{name}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def packed(files: Mapping[str, bytes]) -> bytes:
    """A zip."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name], zipfile.ZIP_DEFLATED)
    return content.getvalue()


def imported_modules(root: str) -> dict[str, Path]:
    """Module -> file, of our own packages; a module's packages are among them."""
    waiting, paths = [root], dict[str, Path]()
    while waiting:
        module = waiting.pop()
        path = file_of(module)
        if path is None or module in paths:
            continue
        paths[module] = path
        waiting.append(module.rpartition(".")[0])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return paths


def file_of(module: str) -> Path | None:
    top, *inner = module.split(".")
    if top not in TOPS:
        return None
    path = TOPS[top].joinpath(*inner)
    files = [path / "__init__.py", path.with_suffix(".py")]
    return next((file for file in files if file.is_file()), None)


def name_of(path: Path) -> str:
    top = next(name for name, folder in TOPS.items() if path.is_relative_to(folder))
    return f"{top}/{path.relative_to(TOPS[top]).as_posix()}"
