"""The most memory that this process has held."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak() -> None:
    """From now on `peak_bytes` counts anew; where the system can't (all but Linux), since the process began."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")


def peak_bytes() -> int:
    """Resident, pages of mapped files included."""
    return field_bytes(STATUS, "VmHWM") or own_peak()


def resident_bytes() -> int:
    """What is held now; 0 where the system does not say."""
    return field_bytes(STATUS, "VmRSS") or 0


def available_bytes() -> int | None:
    """What processes could still get without swapping; None where the system does not say."""
    return field_bytes(Path("/proc/meminfo"), "MemAvailable")


def field_bytes(path: Path, name: str) -> int | None:
    """The value of a line "name: number kB"."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def own_peak() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
