"""Tests under every way to round: python tests/kernels.py [-- PYTEST...]

Those marked `rounding`, and those marked `kernels`, whose bits are the same everywhere. What float32 makes of a sum
depends on the BLAS, its kernels and threads, and on NumPy's vector code. Each row of the table is one run of pytest in
a process of its own: under each of OpenBLAS's kernels that this CPU can run, on one and on two threads; without
NumPy's vector code; and with another `OPENBLAS_L2_SIZE`.
"Taken" is what the library itself said in that process. A kernel that is another's by another name is run once.

--quick takes of the marked tests those that judge numbers and are over soon. What stands behind -- goes to pytest.
Exit code 1 if any row has a failure, or computed with less than was asked for.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import blas

VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "OPENBLAS_L2_SIZE", "NPY_DISABLE_CPU_FEATURES")
L2_SIZE = "512"  # KiB; some families divide it, and under 128 they hang
TOP = Path(__file__).resolve().parent.parent
QUICK = (
    *("tests/oracle/test_check.py", "tests/oracle/judging/test_noise.py"),
    *("tests/oracle/vectors/test_vectors_answers.py", "tests/oracle/locate/test_locate.py"),
    *("tests/oracle/locate/test_locate_faults.py", "tests/arithmetic", "tests/test_goldens.py"),
    "tests/truth/test_integers.py",
    *("tests/commands/cli/test_cli_generate.py", "tests/suite/test_plain.py"),
)


@dataclass(frozen=True)
class Asked:
    """One row: what is asked for."""

    kernel: str = "unset"
    threads: int | None = None
    features: str = "all"  # or "none"
    l2_size: str = "unset"

    def variables(self) -> dict[str, str]:
        chosen = {
            "OPENBLAS_CORETYPE": "" if self.kernel == "unset" else self.kernel,
            "OPENBLAS_NUM_THREADS": str(self.threads or ""),
            "OPENBLAS_L2_SIZE": "" if self.l2_size == "unset" else self.l2_size,
            "NPY_DISABLE_CPU_FEATURES": "" if self.features == "all" else " ".join(blas.dispatched_features()),
        }
        return {name: value for name, value in chosen.items() if value}


@dataclass
class Row:
    """And what came of it."""

    asked: Asked
    taken: blas.Machine | None = None
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    error: str = ""  # why nothing ran, or not as asked

    @property
    def is_right(self) -> bool:
        return not self.failed and not self.error and self.passed > 0

    def cells(self) -> list[str]:
        case, got = self.asked, self.taken
        if got is None:
            return ["-", case.kernel, "-", "-", "-", case.l2_size, "-", "-", f"{self.seconds:.0f}"]
        versions = f"{got.python}, {got.numpy}"
        kernel, features = got.kernel or got.blas, (got.features.split() or ["none"])[-1]
        threads = str(got.threads or "-")
        return [
            *(versions, case.kernel, kernel, threads, features, case.l2_size),
            *(str(self.passed), str(self.failed), f"{self.seconds:.0f}"),
        ]


TITLES = [
    *("Python, NumPy", "kernel asked", "kernel taken", "threads", "vector code up to", "L2 size"),
    *("passed", "failed", "seconds"),
]


def environment(asked: Asked) -> dict[str, str]:
    """Without what this process was started with, so that a row depends on nothing but itself."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return {**inherited, "PYTHONPATH": str(TOP), **asked.variables()}


def run(asked: Asked, arguments: Sequence[str]) -> Row:
    """pytest with these arguments, in the checkout."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=TOP,
        env=environment(asked),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines() or [""]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", lines[-1])}
    row = Row(asked, passed=counts.get("passed", 0), failed=counts.get("failed", 0) + counts.get("error", 0))
    row.seconds = time.monotonic() - began
    row.failures = [line.partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    row.taken = next((blas.machine_of(line) for line in lines if line.startswith(blas.HEADER)), None)
    if done.returncode not in (0, 1) or row.taken is None:
        row.error = f"pytest: exit code {done.returncode}: {' / '.join((done.stderr or done.stdout).splitlines()[-3:])}"
    elif wrong := not_as_asked(row):
        row.error = wrong
    return row


def not_as_asked(row: Row) -> str:
    """What a row asked for and did not get: its numbers then say nothing."""
    asked, got = row.asked, row.taken
    assert got is not None
    if asked.threads and got.threads not in (asked.threads, None):
        return f"asked for {asked.threads} threads, got {got.threads}"
    if asked.features == "none" and got.features:
        return f"asked for no vector code, got {got.features}"
    return ""


def kernel_of(asked: Asked) -> str | None:
    """What this Python's BLAS takes when it is asked for a kernel, by itself."""
    words = [sys.executable, "-c", "import blas; print(blas.here().line())"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {**environment(asked), "PYTHONPATH": paths}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    return blas.machine_of(done.stdout.strip()).kernel


def kernel_rows(names: Sequence[str], threads: Sequence[int]) -> Iterator[Asked]:
    """Each kernel once; those that are another's by another name, and those that can't run here, are told of."""
    known: dict[str | None, str] = {}
    for name in names:
        if name != "unset" and not blas.can_run(name):
            print(f"{name}: this CPU or this BLAS ({blas.here().blas}) does not have it", file=sys.stderr)
            continue
        taken = kernel_of(Asked(name))
        if taken in known:
            print(f"{name}: takes {taken}, as {known[taken]} does", file=sys.stderr)
            continue
        known[taken] = name
        yield from (Asked(name, count) for count in threads)


def rows_of(arguments: argparse.Namespace) -> Iterator[Asked]:
    yield from kernel_rows(arguments.kernels, arguments.threads)
    if not arguments.only_kernels:
        if blas.dispatched_features():
            yield Asked(threads=arguments.threads[0], features="none")
        yield Asked(threads=arguments.threads[0], l2_size=L2_SIZE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["unset", *blas.KERNELS]
    parser.add_argument("--kernels", nargs="*", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--only-kernels", action="store_true", help="not the rows of vector code and of the L2 size")
    parser.add_argument("--quick", action="store_true", help="only the marked tests of some files")
    parser.add_argument("rest", nargs="*", metavar="PYTEST", help="arguments of pytest, behind --")
    arguments = parser.parse_args()
    quick = " and not night" if arguments.quick else ""
    marked = ["-m", f"(rounding or kernels) and not peers{quick}"]
    given = [*marked, *(QUICK if arguments.quick else ()), *arguments.rest]
    rows: list[Row] = []
    asked = list(rows_of(arguments))
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}", flush=True)
    for number, case in enumerate(asked, start=1):
        print(f"[{number}/{len(asked)}] {case}", file=sys.stderr)
        rows.append(row := run(case, given))
        print(f"| {' | '.join(row.cells())} |", flush=True)
        for line in [*row.failures, *filter(None, [row.error])]:
            print(f"    {line}", file=sys.stderr)
    return int(not rows or not all(row.is_right for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
