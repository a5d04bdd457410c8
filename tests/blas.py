"""What this process computes float32 and float64 with: asked of the libraries that are loaded, not of the variables.

OpenBLAS has other kernels for each kind of CPU, of which `OPENBLAS_CORETYPE` chooses one; NumPy has vector code of its
own, which `NPY_DISABLE_CPU_FEATURES` switches off. Both round sums in their own order.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

# OpenBLAS's families for x86 and what a CPU needs for each, any of the names (which depend on NumPy's version).
# What OpenBLAS does with one that the CPU lacks depends on its version: use it all the same, or another.
KERNELS = {
    "SkylakeX": ("AVX512_SKX", "X86_V4"),
    "Haswell": ("AVX2", "X86_V3"),
    "Zen": ("AVX2", "X86_V3"),
    "Sandybridge": ("AVX", "X86_V3"),
    "Nehalem": ("SSE42", "X86_V2"),
    "Prescott": ("SSE3", "X86_V2"),
}
HEADER = "computes with: "


@dataclass(frozen=True)
class Machine:
    """What sums are rounded by."""

    blas: str  # OpenBLAS, or the name of the library's file
    kernel: str | None  # None: a library without kernels to choose, or one that does not tell
    threads: int | None
    features: str  # of the CPU, used by NumPy's own vector code beyond what it was built for
    numpy: str
    python: str

    def line(self) -> str:
        values = (self.blas, self.kernel or "", str(self.threads or ""), self.features, self.numpy, self.python)
        return HEADER + " | ".join(values)


def machine_of(line: str) -> Machine:
    """The reverse of Machine.line."""
    blas, kernel, threads, features, numpy, python = line.removeprefix(HEADER).split(" | ")
    return Machine(blas, kernel or None, int(threads) if threads else None, features, numpy, python)


@cache
def here() -> Machine:
    features = " ".join(dispatched_features())
    versions = (np.__version__, platform.python_version())
    for path in libraries():
        library = ctypes.CDLL(str(path))
        for prefix, suffix in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
            name = getattr(library, f"{prefix}openblas_get_corename{suffix}", None)
            if name is not None:
                name.restype = ctypes.c_char_p
                threads = getattr(library, f"{prefix}openblas_get_num_threads{suffix}")()
                return Machine("OpenBLAS", name().decode(), threads, features, *versions)
    others = [path.name for path in libraries()]
    return Machine(others[0] if others else "unknown", None, None, features, *versions)


def libraries() -> Iterator[Path]:
    """Shared libraries of this process, by Linux, whose names say that they are a BLAS."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        names = dict.fromkeys(re.findall(r"/\S*blas\S*\.so\S*", maps.read_text()))
        yield from map(Path, names)


def dispatched_features() -> list[str]:
    """Every feature that this NumPy dispatches on and this CPU has, unless it is switched off."""
    return [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]


def can_run(kernel: str) -> bool:
    """Whether this CPU has what the family needs and this BLAS has families to choose."""
    return here().kernel is not None and any(__cpu_features__.get(name) for name in KERNELS.get(kernel, ()))
