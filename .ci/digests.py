"""Prints the digests of the trained fixtures and what computed them; exit code 1 unless the README states them.

Run it by the Python whose `lfm2np` is to be checked: `.venv/bin/python .ci/digests.py`.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np

import lfm2np
from lfm2np.arithmetic.products.blas import blas_kernel, blas_library

README = Path(__file__).parent.parent / "README.md"


def digest_of(model: Path) -> str:
    command = [sys.executable, "-m", "lfm2np", "info", "--digest", "--model", str(model)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> int:
    blas = f"{blas_library()}, kernels {blas_kernel() or 'not reported'}"
    print(f"{platform.platform()}, Python {platform.python_version()}, NumPy {np.__version__}, {blas}")
    stated = README.read_text(encoding="utf-8").splitlines()
    wrong = 0
    for name, model in (
        ("trained", lfm2np.trained_fixture()),
        ("moe", lfm2np.moe_fixture()),
        ("lfm3", lfm2np.lfm3_fixture()),
    ):
        digest = digest_of(model)
        is_stated = digest in stated
        print(f"digest of {name} {digest} {'as the README states it' if is_stated else 'is not in the README'}")
        wrong += not is_stated
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
