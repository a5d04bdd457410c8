"""What the C library does with memory that arrays leave."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os

from lfm2np import system

ENVIRONMENT = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")  # by which a user decides it
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST, LARGEST_BEFORE, MOST_KEPT = 2**28, 2**25, 2**29  # bytes: of an array, with a glibc before 2.35, at the end


def keep_freed_memory() -> bool:
    """Lets glibc keep what arrays leave for the next ones, at its heap's end up to half a gigabyte; whether it does.

    Otherwise it gives the memory of a step's large arrays back, and the system maps and clears it anew in each step: a
    tenth of the time of a short prefill in float32. For a whole process, so whoever owns it calls this: the command
    line does, a program that imports the package may. Nothing happens where the environment has a word on it, or with
    another C library; a browser's is not asked.

    Source: mallopt(3).
    """
    if system.IS_WASM or any(name in os.environ for name in ENVIRONMENT):
        return False
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no such library, or no such function in it
        mallopt = ctypes.CDLL(None).mallopt
        kept = mallopt(M_MMAP_THRESHOLD, LARGEST) or mallopt(M_MMAP_THRESHOLD, LARGEST_BEFORE)
        return bool(kept and mallopt(M_TRIM_THRESHOLD, MOST_KEPT))
    return False


def trim_memory() -> None:
    """Gives what is free back to the system, whatever is kept otherwise. Source: malloc_trim(3)."""
    gc.collect()  # an exception that ended a thread's work keeps what its frames held, in a cycle
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
