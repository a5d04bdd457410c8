"""The angles of the rotary embedding, the same for every arithmetic.

LFM2 defines them in float32, whatever the model computes in (transformers, Lfm2RotaryEmbedding):
inv_freq = 1 / theta**(arange(0, E, 2) / E), angle = float32(position) * inv_freq. At position 100,000 one unit in the
last place of an angle is 0.008 rad, so the float32 angle is the definition, and only its cosine and sine are computed
more precisely. The power is rounded correctly to float32; PyTorch's is, too, for every published LFM2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.errors import NumericsError
from lfm2np.truth import elementary

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Rope(NamedTuple):
    """How the queries and keys of a layer are rotated.

    share          of a head's pairs (i, i + E/2), from the first on; the others stay as they are
    float32_table  cosines and sines stay float32 in a model of fewer bits (LFM3; LFM2 rounds them)
    """

    theta: float
    share: float = 1.0
    float32_table: bool = False


RotaryTable = Callable[[NDArray[np.int64], int, Rope], tuple[Float64, Float64]]  # as rotary_table


def inverse_frequencies(head_dim: int, rope: Rope) -> Float32:
    """[E/2] float32, radians per position: 0 for pairs that are not rotated (transformers calls that proportional)."""
    powers = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = np.asarray(np.float32(rope.theta), np.float64)
    scale = elementary.exp(powers.astype(np.float64) * elementary.log(base)).astype(np.float32)
    rotated = np.arange(head_dim // 2) < int(rope.share * head_dim // 2)
    return np.where(rotated, np.float32(1.0) / scale, np.float32(0.0))


def angles(positions: NDArray[np.int64], head_dim: int, rope: Rope) -> Float32:
    """[T, E/2] float32 radians of positions [T]; NumericsError from position 2**20 on."""
    if positions.size and int(positions.max()) >= elementary.MAX_ANGLE:
        raise NumericsError(f"position {int(positions.max())}: rotary angles are computed below 2**20")
    return positions.astype(np.float32)[:, None] * inverse_frequencies(head_dim, rope)


def rotary_table(positions: NDArray[np.int64], head_dim: int, rope: Rope) -> tuple[Float64, Float64]:
    """Cosine and sine [T, E/2] float64 of the angles of positions [T]."""
    return elementary.cos_sin(angles(positions, head_dim, rope))
