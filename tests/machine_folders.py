"""Folders with another architecture's Python, put together from Debian's packages and wheels. See machines.py."""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
SUITES = ("trixie", "forky")  # the next where a mirror's lists of one are not those that its signature names
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
WHOLE = "whole.json"  # stands in a folder that is put together
PACKAGES = ["python3", "python3-numpy", "libblas3", "liblapack3", "libopenblas0-pthread"]
PACKAGES += [f"python3-{name}" for name in ("hypothesis", "mpmath", "pytest", "tqdm", "requests", "yaml", "jsonschema")]
WHEELS = ["safetensors", "tokenizers", "gguf"]  # of pyproject.toml's, those that Debian has not or not everywhere
GLIBC = range(5, 42)  # minor versions of the glibc 2 of manylinux wheels, up to trixie's own
BLAS = {"netlib": "blas", "OpenBLAS": "openblas-pthread"}  # folders of the libraries under usr/lib/TRIPLET


@dataclass(frozen=True)
class Machine:
    """As Debian calls it, and as the others do."""

    name: str
    qemu: str
    triplet: str  # of its folder of libraries
    wheel: str  # as wheels' platforms end
    order: str = "little"


MACHINES = {
    one.name: one
    for one in (
        Machine("arm64", "aarch64", "aarch64-linux-gnu", "aarch64"),
        Machine("ppc64el", "ppc64le", "powerpc64le-linux-gnu", "ppc64le"),
        Machine("riscv64", "riscv64", "riscv64-linux-gnu", "riscv64"),
        Machine("s390x", "s390x", "s390x-linux-gnu", "s390x", "big"),
        Machine("i386", "i386", "i386-linux-gnu", "i686"),
    )
}


class Failed(Exception):
    """Something that keeps a machine from being run."""


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def called(command: Sequence[str | Path], **options: Any) -> str:
    """Its standard output. Failed, with the end of what it said, if it ends otherwise than with 0."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))[:200]}: exit code {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.stdout


def mirror() -> str:
    """Where this system's apt gets its own packages. Failed if it is no Debian."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', Path("/etc/os-release").read_text(), re.MULTILINE))
    suite = release.get("VERSION_CODENAME", "")
    uris: list[str] = []
    if release.get("ID") == "debian":
        command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", f"Release: {suite}"]
        uris = called(command).split()
    if not uris:
        raise Failed(f"apt: no source of the suite {suite!r}, expected a Debian")
    return uris[0]


def fetched_of_first(architecture: str, path: Path, source: str) -> tuple[str, list[Path]]:
    """The first suite that the mirror has whole, and its packages. Failed, with every reason, if it has none.

    Mirrors renew a suite's signed list of files and its architectures' files apart; apt takes neither until they agree.
    """
    problems = []
    for suite in SUITES:
        try:
            return suite, fetched(architecture, suite, path, source)
        except Failed as problem:
            problems.append(f"{suite}: {problem}")
            tell(f"{architecture}: {problems[-1]}")
    raise Failed("\n".join(problems))


def fetched(architecture: str, suite: str, path: Path, source: str) -> list[Path]:
    """The packages and all that they depend on, in the folder `own`, by an apt that knows none of the system's."""
    if not KEYRING.is_file():
        raise Failed(f"{KEYRING}: not there, expected the keys of Debian's archive: apt-get install {KEYRING.stem}")
    settings = apt_settings(architecture, suite, path, source)
    called(["apt-get", "-c", settings, "update", "--error-on=any"])
    called(["apt-get", "-c", settings, "install", "--yes", "--download-only", "--no-install-recommends", *PACKAGES])
    return sorted((path / "cache" / "archives").glob("*.deb"))


def apt_settings(architecture: str, suite: str, path: Path, source: str) -> Path:
    """apt.conf of such an apt; it is read behind the system's own settings."""
    shutil.rmtree(path, ignore_errors=True)
    for folder in ("state/lists/partial", "cache/archives/partial", "none"):
        (path / folder).mkdir(parents=True)
    (path / "state" / "status").touch()
    (path / "sources.list").write_text(f"deb [signed-by={KEYRING}] {source} {suite} main\n")
    settings = {
        "APT::Architecture": architecture,
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
        "Acquire::Languages": "none",
        "Dir::State": path / "state",
        "Dir::State::status": path / "state" / "status",
        "Dir::Cache": path / "cache",
        "Dir::Etc::sourcelist": path / "sources.list",
        "Dir::Etc::sourceparts": path / "none",
        "Dir::Etc::preferences": path / "none",
        "Dir::Etc::preferencesparts": path / "none",
    }
    hooks = ("APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success", "DPkg::Post-Invoke", "APT::Architectures")
    lines = [f"#clear {name};" for name in hooks] + [f'{name} "{value}";' for name, value in settings.items()]
    (path / "apt.conf").write_text("\n".join([*lines, f'APT::Architectures {{ "{architecture}"; }};']) + "\n")
    return path / "apt.conf"


def put_together(machine: Machine, work: Path) -> Path:
    """The folder with the machine's root and wheels: made unless it is there, whole or not at all."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / f"{machine.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be at it
        return made(machine, work / machine.name)


def made(machine: Machine, folder: Path) -> Path:
    """The same, while no other run does it. Failed for what can't be fetched or unpacked."""
    recipe = {"suites": list(SUITES), "packages": PACKAGES, "wheels": WHEELS}
    if (folder / WHOLE).is_file() and json.loads((folder / WHOLE).read_text())["recipe"] == recipe:
        return folder
    began = time.monotonic()
    tell(f"{machine.name}: fetching Debian's packages and wheels")
    apt_folder = folder.parent / "apt" / machine.name
    suite, packages = fetched_of_first(machine.name, apt_folder, mirror())
    part = folder.with_name(f"{machine.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    unpack(packages, part / "root")
    add_wheels(machine, part)
    held = {"recipe": recipe, "suite": suite, "packages": [package.stem for package in packages]}
    (part / WHOLE).write_text(json.dumps(held, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    shutil.rmtree(apt_folder)
    tell(f"{machine.name}: {len(packages)} packages of {suite} in {folder} ({time.monotonic() - began:.0f} s)")
    return folder


def unpack(packages: Sequence[Path], root: Path) -> None:
    """Into a root folder; none of their installation scripts runs."""
    for name in ("bin", "lib", "lib64", "sbin"):  # as base-files has them, which is not among the packages
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for package in packages:
        called(["dpkg", "--extract", package, root])


def add_wheels(machine: Machine, folder: Path) -> None:
    """Into a folder of their own, in the versions that pip chooses by pyproject.toml."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["gguf"]]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += ["--disable-pip-version-check", "--implementation", "cp", "--abi", "abi3"]
    pip += ["--python-version", python_of(folder).name.removeprefix("python"), "--target", str(folder / "wheels")]
    platforms = [f"manylinux_2_{minor}_{machine.wheel}" for minor in GLIBC] + [f"manylinux2014_{machine.wheel}"]
    pip += [word for platform in platforms for word in ("--platform", platform)]
    called([*pip, *(need for need in needs if need.startswith(tuple(WHEELS)))])


def python_of(folder: Path) -> Path:
    """Of the root's Python, as /usr/bin/python3.13."""
    (library,) = (folder / "root" / "usr" / "lib").glob("python3.*/os.py")
    return folder / "root" / "usr" / "bin" / library.parent.name


def launcher(machine: Machine, folder: Path, blas: str, target: Path) -> Path:
    """A program in `own` that is the other machine's Python, and is so for the processes that Python starts, too."""
    names = (f"qemu-{machine.qemu}-static", f"qemu-{machine.qemu}")
    qemu = next(filter(None, map(shutil.which, names)), None)
    if qemu is None:
        raise Failed(f"{names[0]}: not there: apt-get install qemu-user-static")
    root, path = folder / "root", target / "python3"
    libraries = root / "usr" / "lib" / machine.triplet
    variables = {
        "PYTHONHOME": root / "usr",
        "PYTHONPATH": f"{TOP}:{folder / 'wheels'}",
        "PYTHONNOUSERSITE": "1",
        "LD_LIBRARY_PATH": f"{libraries / BLAS[blas]}:{libraries / 'lapack'}",
        "OPENBLAS_NUM_THREADS": "1",  # several machines run at once
        "HYPOTHESIS_PROFILE": "few",
    }
    given = (word for item in variables.items() for word in ("-E", "{}={}".format(*item)))
    words = [qemu, "-L", root, "-0", path, *given]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, [*words, python_of(folder)]))} "$@"\n')
    path.chmod(0o755)
    return path
