"""What serving needs beside the package itself; this file needs nothing of it."""

from __future__ import annotations

import importlib.util

from lfm2np.errors import RequestError

NEEDED = ("starlette", "uvicorn", "pydantic")


def require_extra(command: str) -> None:
    """RequestError where a library of the extra `serve` is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        problem = f"{', '.join(missing)}: not installed; {command} needs the extra `serve`"
        raise RequestError(f"{problem}: pip install 'lfm2np[serve]'")
