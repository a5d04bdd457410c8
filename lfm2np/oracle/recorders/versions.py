"""The versions of an engine that its recorder was run with: it reaches into insides that others may not have."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from lfm2np.oracle.targets.target import TargetError


def require_version(package: str, known: Sequence[str]) -> str:
    """The installed version, which is one of `known` or begins with one and a dot. TargetError for others, and none."""
    try:
        found = version(package)
    except PackageNotFoundError:
        raise TargetError(
            f"{package}: not installed in this environment, expected version {' or '.join(known)}"
        ) from None
    if not any(found == one or found.startswith(f"{one}.") for one in known):
        raise TargetError(f"{package} {found}: its recorder was run with {' and '.join(known)}, and knows no other")
    return found
