"""A tensor as a file holds it, widened to float32 exactly, and checked for numbers that are not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lfm2np.errors import CheckpointError
from lfm2np.values import show

DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
CHUNK = 2**20  # elements looked at together: keeps temporaries small
_EXPONENT_BITS = {"BF16": 0x7F80, "F16": 0x7C00}

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as the file holds it.

    dtype   "BF16", "F16" or "F32"
    values  read-only view of the memory map: uint16 (the bits of BF16), float16 or float32, all in the file's byte
            order, little-endian, whatever the machine's own is
    source  the file, for messages
    """

    name: str
    dtype: str
    values: Array
    source: str = ""


def widen(values: Array, dtype: str) -> npt.NDArray[np.float32]:
    """A fresh float32 array with exactly the stored values: bfloat16 is the upper half of a float32."""
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {show(dtype)}, expected one of {', '.join(DTYPES)}")
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def require_finite(tensor: StoredTensor) -> None:
    """Raises CheckpointError naming the tensor and the first index that holds NaN or an infinity."""
    flat = tensor.values.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        chunk = flat[start : start + CHUNK]
        bad = np.flatnonzero(_not_finite(chunk, tensor.dtype))
        if bad.size:
            index = tuple(int(i) for i in np.unravel_index(start + int(bad[0]), tensor.values.shape))
            value = float(widen(chunk[bad[:1]], tensor.dtype)[0])
            where = f"{tensor.source}: " if tensor.source else ""
            raise CheckpointError(f"{where}{tensor.name}: {value} at index {index}, expected finite numbers")


def _not_finite(chunk: Array, dtype: str) -> npt.NDArray[np.bool_]:
    if dtype == "F32":
        return np.logical_not(np.isfinite(chunk.astype(np.float32, copy=False)))
    mask = np.uint16(_EXPONENT_BITS[dtype])
    bits = chunk.view(np.dtype(np.uint16).newbyteorder(chunk.dtype.byteorder))  # the file's order, not the machine's
    all_ones: npt.NDArray[np.bool_] = (bits & mask) == mask
    return all_ones
