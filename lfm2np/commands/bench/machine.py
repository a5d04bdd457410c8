"""What the numbers were measured on, and how much of its time other processes took."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

import lfm2np
from lfm2np.arithmetic.products.blas import blas_kernel, blas_library


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


STAT = Path("/proc/stat")
IDLE = (3, 4)  # fields of its first line: idle, and waiting for a disk


class Elsewhere:
    """Counts from when it is made; the processes that were started meanwhile count once they have ended."""

    def __init__(self) -> None:
        self._busy, self._own, self._began = busy_seconds(), own_seconds(), time.perf_counter()

    def share(self) -> float | None:
        """Of all processor time, that of others, from 0 to 1; None where the system does not say."""
        busy = busy_seconds()
        if busy is None or self._busy is None:
            return None
        passed = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        others = (busy - self._busy) - (own_seconds() - self._own)
        return min(1.0, max(0.0, others / passed))


def busy_seconds() -> float | None:
    """Of all processors together, since the system started."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = [int(field) for field in STAT.read_text().splitlines()[0].split()[1:9]]
        return (sum(fields) - sum(fields[index] for index in IDLE)) / os.sysconf("SC_CLK_TCK")
    return None


def own_seconds() -> float:
    """Of this process and of those of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
