"""What the numbers were measured on: they mean nothing without it."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

import lfm2np
from lfm2np.numerics.products.blas import blas_kernel, blas_library


def describe_machine() -> dict[str, Any]:
    """Processor, cores, and the libraries of this process that compute."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas_library(),
        "blas_kernel": blas_kernel(),
        "lfm2np": lfm2np.__version__,
    }


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
