"""Python and NumPy for browsers: Pyodide's release, each file known by its SHA-256, wherever it comes from.

The first four stand in the makers' npm package, the wheel, whose hash is the one that Pyodide's own pyodide-lock.json
names, on their CDN. For those who can't reach these a package of PyPI has them, too, as an archive of the release has.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path, PurePosixPath

from lfm2np.errors import RequestError
from lfm2np.system import cache_directory, write_whole

RELEASE = json.loads((resources.files(__package__) / "pyodide.json").read_text(encoding="utf-8"))
FILES: Mapping[str, tuple[int, str]] = RELEASE["files"]  # name -> bytes, SHA-256
LOCK = RELEASE["lock"]  # pyodide-lock.json, of what is loaded
VERSION: str = LOCK["info"]["version"]
NUMPY: str = LOCK["packages"]["numpy"]["file_name"]
SOURCES: Mapping[str, str] = RELEASE["sources"]  # folders of npm's package and of the wheel, and PyPI's package
SECONDS = 60.0  # that a server may be silent


def runtime_files(place: Path | None = None) -> dict[str, bytes]:
    """Name -> content, each as its SHA-256 says.

    place   a folder or archive (.zip, .whl, .tar.bz2) that holds them, at any depth; None: those kept from an earlier
            time, else downloaded
    RequestError for a file that is missing, or another one.
    """
    if place is not None:
        return checked(read_place(place), str(place))
    kept = cache_directory() / f"pyodide-{VERSION}"
    if all((kept / name).is_file() for name in FILES):
        return checked(read_place(kept), str(kept))
    files = checked(downloaded(), f"Pyodide {VERSION}, as downloaded")
    kept.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_whole(kept / name, content)
    return files


def downloaded() -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    with contextlib.suppress(OSError, http.client.HTTPException):
        for name in FILES:
            files[name] = fetched(SOURCES["numpy" if name == NUMPY else "npm"] + name)
    return files if len(files) == len(FILES) else by_pip() | files


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=SECONDS) as response:
        return bytes(response.read())


def by_pip() -> dict[str, bytes]:
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as place:
        words += ["--dest", place, SOURCES["pip"]]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return read_place(*Path(place).iterdir())
    problem = done.stderr.strip().rpartition("\n")[2]
    expected = f"expected it, {SOURCES['npm']} and {SOURCES['numpy']}, or --pyodide PATH of Pyodide's release {VERSION}"
    raise RequestError(f"pip download {SOURCES['pip']}: {problem}; {expected}")


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
