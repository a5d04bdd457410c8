"""Windows of several requests as one, for the convolution."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def below_each_other(windows: Sequence[Array], history: int) -> tuple[Array, NDArray[np.int64] | None]:
    """All windows [history + t, D] as one, and which rows of its convolution are those of the t; None: all."""
    if len(windows) == 1:
        return windows[0], None
    starts = accumulate((len(one) for one in windows[:-1]), initial=0)
    kept = [np.arange(start, start + len(one) - history) for start, one in zip(starts, windows, strict=True)]
    return np.concatenate(windows), np.concatenate(kept)
