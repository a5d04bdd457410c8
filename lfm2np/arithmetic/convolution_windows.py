"""Windows of several requests as one, for the convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def below_each_other(windows: Sequence[Array], history: int) -> tuple[Array, NDArray[np.int64] | None]:
    """All windows [history + t, D] as one, and where in it what each of the T tokens sees begins; None: at its row."""
    if len(windows) == 1:
        return windows[0], None
    tokens = [len(window) - history for window in windows]
    before = np.repeat(history * np.arange(len(windows)), tokens)  # rows of history, not tokens, above each token
    return np.concatenate(windows), np.arange(len(before)) + before


def seen_by_tap(stacked: Array, begins: NDArray[np.int64] | None, rows: slice, tap: int) -> Array:
    """Of some of the T tokens the rows [t, D] that one tap sees, from what `below_each_other` returned."""
    if begins is None:
        return stacked[rows.start + tap : rows.stop + tap]
    return np.asarray(stacked[begins[rows] + tap])
