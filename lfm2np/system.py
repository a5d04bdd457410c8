"""What the system under Python has. In a browser (WebAssembly) it has neither processes nor threads.

The one place that decides; who needs either asks here, and has another way.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

IS_WASM = sys.platform in ("emscripten", "wasi")
HAS_PROCESSES = HAS_THREADS = not IS_WASM


def cache_directory() -> Path:
    """Where this program keeps what it can make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lfm2np"
