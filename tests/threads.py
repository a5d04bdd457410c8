"""Pieces on several threads, however small the work is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lfm2np.arithmetic import pieces


@contextmanager
def threads(count: int, least: int = 8) -> Iterator[None]:
    """So many, for work of `least` elements each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "THREADS", count)
        patch.setattr(pieces, "LEAST_PIECE", least)
        patch.setattr(pieces, "THREAD_PIECE", 2 * least)
        yield
