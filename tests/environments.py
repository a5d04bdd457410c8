"""Pythons, NumPys and BLAS libraries beside those of the checkout, each in a folder of its own: for tests/kernels.py.

A virtual environment where this machine has the interpreter; else, and for netlib's BLAS, Debian packages unpacked into
a root folder (by machine_folders.py, which installs nothing here), in which Python runs by chroot.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from machine_folders import Failed, fetched, mirror, unpack

TOP = Path(__file__).resolve().parent.parent
SUITES = {"3.13": "trixie", "3.14": "forky"}  # of Debian, by the Python that it has
NETLIB = "/usr/lib/x86_64-linux-gnu/blas:/usr/lib/x86_64-linux-gnu/lapack"  # not OpenBLAS's folders beside them
BASE = ("coreutils", "dash", "libstdc++6")  # what Debian's Python and pip's wheels take for granted
MOUNTED = 'mount --rbind /dev "$0/dev" && mount --rbind /proc "$0/proc" && exec chroot "$0" "$@"'


class EnvironmentMissingError(Exception):
    """What can't be had here, and why."""


@dataclass(frozen=True)
class Python:
    """An interpreter with this package's dependencies, and the checkout that it tests."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    top: Path  # the checkout, as this process sees it


def ours() -> Python:
    return Python((sys.executable,), {"PYTHONPATH": str(TOP)}, TOP)


def called(*command: str | Path, **variables: str) -> str:
    """Standard output. EnvironmentMissingError with what the command said, if it failed."""
    words = [str(part) for part in command]
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise EnvironmentMissingError(f"{words[0]}: {error.strerror}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise EnvironmentMissingError(f"{' '.join(words[:4])} ...: exit code {done.returncode}: {' / '.join(last)}")
    return done.stdout


def requirements(oldest: bool) -> list[str]:
    """What the package and its tests need, by pyproject.toml; `oldest`: the oldest versions that it allows."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    return [requirement.replace(">=", "==") for requirement in wanted] if oldest else wanted


def interpreter(version: str) -> str | None:
    """A Python 3.x of this machine: on the path, or of pyenv."""
    places = [shutil.which(f"python{version}")]
    places += map(str, sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}")))
    for place in filter(None, places):
        done = subprocess.run([place, "-c", "import venv, ensurepip"], capture_output=True, check=False)  # no idle shim
        if done.returncode == 0:
            return place
    return None


def with_version(version: str, work: Path, more: Sequence[str] = ()) -> Python:
    """`oldest`: the lowest Python and the oldest packages allowed; else that Python and the newest."""
    lowest = re.search(r'requires-python = ">=([\d.]+)"', (TOP / "pyproject.toml").read_text())
    assert lowest is not None
    python = lowest[1] if version == "oldest" else version
    wanted = [*requirements(version == "oldest"), *more]
    executable = interpreter(python)
    if executable is None:
        return debian(python, work, wanted)
    folder = work / f"venv-{version}"
    if not (folder / "ready").exists():
        called(executable, "-m", "venv", "--clear", folder)
        called(folder / "bin" / "pip", "install", "--quiet", "--editable", TOP, *wanted)
        (folder / "ready").touch()
    return Python((str(folder / "bin" / "python"),), {"PYTHONPATH": str(TOP)}, TOP)


def netlib(work: Path, more: Sequence[str] = ()) -> Python:
    """Debian's Python and NumPy, linked against the BLAS of netlib."""
    return debian("3.13", work, [*requirements(False), *more], ("python3-numpy", "libblas3", "liblapack3"))


def debian(version: str, work: Path, wanted: Sequence[str], packages: Sequence[str] = ()) -> Python:
    """A root folder with Debian's Python, what pip has for it, and a copy of this checkout under /lfm2np."""
    if version not in SUITES:
        raise EnvironmentMissingError(f"Python {version}: neither on this machine nor in Debian {', '.join(SUITES)}")
    root = work / f"debian-{version}{'-netlib' if packages else ''}"
    if not (root / "ready").exists():
        shutil.rmtree(root, ignore_errors=True)
        try:
            files = fetched("amd64", SUITES[version], [f"python{version}", *BASE, *packages], root / "apt", mirror())
            unpack(files, root)
        except Failed as problem:
            raise EnvironmentMissingError(str(problem)) from None
        for name in ("dev", "proc", "tmp", "root"):
            (root / name).mkdir(exist_ok=True)
        into = (sys.executable, "-m", "pip", "install", "--quiet", "--target", root / "wheels")
        platforms = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")
        called(
            *(*into, "--only-binary=:all:", "--python-version", version, "--implementation", "cp"),
            *(word for platform in platforms for word in ("--platform", platform)),
            *wanted,
        )
        called(*into, "--no-deps", TOP)  # for its entry points; the modules are those of the copy below
        if packages:  # Debian's NumPy it has to be
            for path in (root / "wheels").glob("numpy*"):
                shutil.rmtree(path)
        (root / "ready").touch()
    top = root / "lfm2np"
    shutil.rmtree(top, ignore_errors=True)
    shutil.copytree(TOP, top, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis"))
    inside = ("unshare", "--mount", "--map-root-user", "sh", "-c", MOUNTED, str(root))
    command = (*inside, "/usr/bin/env", "-C", "/lfm2np", f"/usr/bin/python{version}")
    variables = {"PYTHONPATH": "/lfm2np:/wheels", "TMPDIR": "/tmp", "LD_LIBRARY_PATH": NETLIB, "HOME": "/root"}
    return Python(command, variables, top)
