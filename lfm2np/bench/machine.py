"""What the numbers were measured on: they mean nothing without it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

import lfm2np

CORE_NAMES = ("scipy_openblas_get_corename64_", "scipy_openblas_get_corename", "openblas_get_corename")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, and the libraries of this process that compute."""
    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
        "blas_kernel": blas_kernel(),
        "lfm2np": lfm2np.__version__,
    }


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def blas_kernel() -> str | None:
    """The kernels that OpenBLAS chose for this processor; None for another library, or where it can't be asked."""
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "openblas" in line.rpartition("/")[2].lower():
                library = ctypes.CDLL(line.split(maxsplit=5)[5])
                for name in CORE_NAMES:
                    ask = getattr(library, name, None)
                    if ask is not None:
                        ask.restype = ctypes.c_char_p
                        return str(ask().decode())
    return None
