"""What recorders of engines need, as they depend on internals: a version that they were run with, or a newer one; and
functions that run between an engine's functions and those who call them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest.mock import patch

from lfm2np.oracle.engines.target import TargetError


def require_version(package: str, known: Sequence[str], installed: str | None = None) -> None:
    """TargetError if a package is missing, or older than the versions that the recorder was run with (`known`, the
    newest last); a warning if it is newer.

    installed  its version, if the package itself says it; else as it was installed
    """
    try:
        installed = installed or version(package)
    except PackageNotFoundError:
        raise TargetError(f"{package}: not installed, expected {package}=={known[-1]}") from None
    if installed.partition("+")[0] in known:
        return
    if numbers(installed) <= numbers(known[-1]):
        raise TargetError(f"{package}: version {installed}, expected {' or '.join(known)}, or newer")
    warnings.warn(
        f"{package}: version {installed} is newer than {known[-1]}, which it was last recorded with: if its operations "
        f"have other names now, the dump holds fewer of them; install {package}=={known[-1]} to be sure",
        stacklevel=3,
    )


def numbers(version: str) -> list[int]:
    """Those before what marks a build or a pre-release."""
    return [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Any:
    """A context manager: while it lasts, owner.name(...) is wrapper(original, ...)."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        return wrapper(original, *arguments, **options)

    return patch.object(owner, name, wrapped)
