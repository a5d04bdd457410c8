"""What multiplies matrices in this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

CORE_NAMES = ("scipy_openblas_get_corename64_", "scipy_openblas_get_corename", "openblas_get_corename")


@cache
def blas_kernel() -> str | None:
    """The kernels that OpenBLAS chose for this processor; None for another library, or where it can't be asked."""
    with contextlib.suppress(OSError):
        for path in sorted(openblas_files(), key=lambda path: "numpy" not in path):  # SciPy has one of its own
            library = ctypes.CDLL(path)
            for name in CORE_NAMES:
                ask = getattr(library, name, None)
                if ask is not None:
                    ask.restype = ctypes.c_char_p
                    return str(ask().decode())
    return None


def blas_library() -> str:
    """Name and version of what NumPy was built with."""
    built = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return f"{built.get('name', 'unknown')} {built.get('version', '')}".strip()


def openblas_files() -> Iterator[str]:
    """Those of this process, by Linux's list of what is mapped: addresses, rights, offset, device, inode, path."""
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
        if "openblas" in line.rpartition("/")[2].lower():
            yield line.split(maxsplit=5)[-1]
