"""Which engines are installed, and whether a recorder was run with them: it knows where these keep what."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from lfm2np.oracle.targets.target import TargetError


def require_version(package: str, known: Sequence[str]) -> None:
    """TargetError if a package is not installed, or is of another version than those that a recorder was run with."""
    try:
        found = version(package)
    except PackageNotFoundError:
        raise TargetError(f"{package}: not installed, expected {package}=={known[-1]}") from None
    if found not in known:
        raise TargetError(f"{package}: version {found}, expected {' or '.join(known)}: no other is known here")
