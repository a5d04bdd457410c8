"""Writes the laboratory as a folder that any static server can serve, from any path."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

from lfm2np.engine.loading import load
from lfm2np.errors import RequestError
from lfm2np.system import write_whole
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.all_views import draw
from lfm2np.teaching.drawings.runs.recorded_run import read_run
from lfm2np.teaching.lab.page import compute
from lfm2np.teaching.lab.run import chosen
from lfm2np.teaching.lab.static import archive, release
from lfm2np.teaching.lab.static.browser import FIXTURES, HOST, PAGE
from lfm2np.values import ProgressOf

SERVICE = "service.js"
SCRIPTS = ("pyodide.js", "pyodide.asm.js")  # which the worker runs
WASM = "pyodide.asm.wasm"
LOCK, PLAN = "pyodide-lock.json", "files.json"
VERSION_NAME = re.compile("[0-9a-f]{12}")


def write_static(directory: Path, runtime: Path | None, progress: ProgressOf) -> dict[str, int]:
    """Name -> bytes of the files that it writes; an earlier version's are removed, and what else is there stays.

    runtime   where Pyodide's release lies; None: see release.runtime_files
    RequestError for what can't be read or written. An interrupt or a full disk leaves the earlier version whole: the
    page is replaced when all that it needs is there.
    """
    require_ours(directory)
    files = site_files(runtime, progress)
    try:
        for name, content in sorted(files.items(), key=lambda item: "/" not in item[0]):  # a version's files first
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(directory / name, content)
        versions = {name.partition("/")[0] for name in files}
        for old in directory.iterdir():
            if VERSION_NAME.fullmatch(old.name) and old.name not in versions and (old / PLAN).is_file():
                shutil.rmtree(old)
    except OSError as problem:
        raise RequestError(f"--static {directory}: can't be written: {problem}") from None
    return {name: len(content) for name, content in files.items()}


def require_ours(directory: Path) -> None:
    """RequestError unless it is a folder that holds a laboratory, or nothing (but hidden files), or can be made."""
    try:
        if directory.is_dir():
            entries = [path for path in directory.iterdir() if not path.name.startswith(".")]
            service = directory / SERVICE
            is_fit = not entries or (service.is_file() and service.read_bytes().startswith(b"const VERSION = "))
        else:
            is_fit = not directory.exists() and not directory.is_symlink()
            directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RequestError(f"--static {directory}: can't be written: {problem}") from None
    if not is_fit:
        expected = "an empty or new one, or one that this command wrote"
        raise RequestError(f"--static {directory}: is no folder for this, expected {expected}")


def site_files(runtime: Path | None, progress: ProgressOf) -> dict[str, bytes]:
    """Path in the folder -> content."""
    progress("Pyodide", 0, 1)
    of_pyodide = release.runtime_files(runtime)
    progress("Pyodide", 1, 1)
    late = {f"{name}.zip": archive.packed(archive.fixture(name)) for name in FIXTURES if name not in archive.EARLY}
    early = {
        "lfm2np.zip": archive.packed(archive.code()),
        "fixtures.zip": archive.packed({k: v for name in archive.EARLY for k, v in archive.fixture(name).items()}),
    }
    served = {release.NUMPY: of_pyodide[release.NUMPY], "python_stdlib.zip": of_pyodide["python_stdlib.zip"]}
    served[LOCK] = json.dumps(release.LOCK).encode()
    scripts = {name: of_pyodide[name] for name in SCRIPTS}
    checked = early | served | scripts | {f"{WASM}.gz": gzip.compress(of_pyodide[WASM], mtime=0)} | late
    plan = {
        "files": [entry(name, content, name in late) for name, content in checked.items()],
        "early": list(early),
        "served": list(served),
        "digests": digests(progress),
    }
    versioned = checked | {PLAN: json.dumps(plan, indent=1).encode(), "worker.js": script("worker.js")}
    version = hashlib.sha256(
        b"".join(name.encode() + content for name, content in sorted(versioned.items()))
    ).hexdigest()[:12]
    constants = f"const VERSION = {json.dumps(version)};\n"
    files = pages(constants, progress) | {SERVICE: constants.encode() + script(SERVICE)}
    return files | {f"{version}/{name}": content for name, content in versioned.items()}


def pages(constants: str, progress: ProgressOf) -> dict[str, bytes]:
    """The laboratory with its default run, and `lfm2np draw --demo`."""
    trained = chosen("trained").model
    run = read_run(demo.main_lines(trained))
    texts = {"index.html": compute("", replace(HOST, constants=constants))[1]}
    progress("pages", 1, 2)
    texts[PAGE] = draw(run, trained, "the demo's run on the trained fixture", f"lfm2np draw --demo -o {PAGE}")
    progress("pages", 2, 2)
    return {name: text.encode() for name, text in texts.items()}


def entry(name: str, content: bytes, is_late: bool) -> Mapping[str, object]:
    return {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "late": is_late}


def digests(progress: ProgressOf) -> dict[str, str]:
    """Of each fixture, computed on this machine."""
    values = {}
    for done, (name, place) in enumerate(FIXTURES.items(), start=1):
        values[name] = load(place()).digest()
        progress("digests", done, len(FIXTURES))
    return values


def script(name: str) -> bytes:
    return (resources.files("lfm2np.teaching.lab.static") / name).read_bytes()
