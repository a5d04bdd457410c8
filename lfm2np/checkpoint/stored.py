"""A tensor as a file holds it, widened exactly, and checked for numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lfm2np.checkpoint.gguf.ggml_types import QUANTISED, bad_scale, values_of
from lfm2np.checkpoint.packed.rows import PackedRows, bad_group
from lfm2np.errors import CheckpointError
from lfm2np.values import show

if TYPE_CHECKING:
    from lfm2np.truth.integers import Weights

DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
CHUNK = 2**20  # elements looked at together: keeps temporaries small
_EXPONENT_BITS = {"BF16": 0x7F80, "F16": 0x7C00}

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as the file holds it.

    dtype   "BF16", "F16", "F32", a format of ggml_types.QUANTISED, or the name of PackedRows, for people
    values  read-only view of the memory map: uint16 (the bits of BF16), float16 or float32, all in the file's byte
            order, little-endian, whatever the machine's own is; of a quantised tensor of GGUF uint8, the blocks of each
            row; of a quantised matrix of safetensors PackedRows, which are indexed as arrays are
    source  the file, for messages
    """

    name: str
    dtype: str
    values: Array | PackedRows
    source: str = ""

    @property
    def array(self) -> Array:
        """`values` of a tensor that is one array."""
        assert not isinstance(self.values, PackedRows), self.name
        return self.values

    @property
    def arrays(self) -> Iterator[Array]:
        return self.values.arrays() if isinstance(self.values, PackedRows) else iter([self.values])

    @property
    def is_quantised(self) -> bool:
        """Whether it widens to float64."""
        return isinstance(self.values, PackedRows) or self.dtype in QUANTISED

    @property
    def shape(self) -> tuple[int, ...]:
        kind, shape = QUANTISED.get(self.dtype), self.values.shape
        return shape if kind is None else (*shape[:-1], shape[-1] // kind.size * kind.weights)

    def wrong(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.name}: {text}")

    def rows(self, index: Any) -> Weights:
        """A copy of some rows, widened."""
        return widen(self.values[index], self.dtype)


def widen(values: Array | PackedRows, dtype: str) -> Weights:
    """A fresh array with exactly the stored values: float32, or float64 of rows of a quantised tensor.

    bfloat16 is the upper half of a float32. The one place where it is decided how rows are widened.
    """
    if isinstance(values, PackedRows):
        return values.widened()
    if dtype in QUANTISED:
        return values_of(values.view(np.uint8), dtype)
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {show(dtype)}, expected one of {', '.join([*DTYPES, *QUANTISED])}")
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def require_whole(tensor: StoredTensor) -> None:
    """Raises CheckpointError where the tensor's file is shorter by now than its map, which can't be read any more."""
    for array in tensor.arrays:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap) and base.size() < len(base):
            raise CheckpointError(
                f"{tensor.source}: {base.size()} bytes, expected {len(base)}, as when it was opened: "
                "it must not become shorter while it is read"
            )


def require_finite(tensor: StoredTensor) -> None:
    """Raises CheckpointError naming the tensor and the first index, or block, that holds NaN or an infinity."""
    where = f"{tensor.source}: " if tensor.source else ""
    if isinstance(tensor.values, PackedRows):
        if problem := bad_group(tensor.values):
            raise CheckpointError(
                f"{where}{tensor.name}: {tensor.dtype} with {problem}, expected finite numbers that float32 holds"
            )
        return
    if tensor.dtype in QUANTISED:
        _require_finite_scales(tensor.values, tensor, where)
        return
    flat = tensor.values.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        bad = _not_finite(flat[start : start + CHUNK], tensor.dtype)
        if not bad.any():
            continue
        first = start + int(bad.argmax())
        index = tuple(int(i) for i in np.unravel_index(first, tensor.values.shape))
        value = float(widen(flat[first : first + 1], tensor.dtype)[0])
        raise CheckpointError(f"{where}{tensor.name}: {value} at index {index}, expected finite numbers")


def _require_finite_scales(values: Array, tensor: StoredTensor, where: str) -> None:
    size = QUANTISED[tensor.dtype].size
    rows = values.reshape(-1, values.shape[-1]).view(np.uint8)
    step = max(1, CHUNK // rows.shape[1])
    for start in range(0, len(rows), step):
        bad = bad_scale(rows[start : start + step], tensor.dtype)
        if bad:
            row, block = divmod(bad[0], rows.shape[1] // size)
            raise CheckpointError(
                f"{where}{tensor.name}: {tensor.dtype} with the scale {bad[1]} in block {block} of row {start + row}"
                ", expected finite numbers that float32 holds"
            )


def _not_finite(chunk: Array, dtype: str) -> npt.NDArray[np.bool_]:
    if dtype == "F32":
        return np.logical_not(np.isfinite(chunk.astype(np.float32, copy=False)))
    mask = np.uint16(_EXPONENT_BITS[dtype])
    bits = chunk.view(np.dtype(np.uint16).newbyteorder(chunk.dtype.byteorder))  # the file's order, not the machine's
    all_ones: npt.NDArray[np.bool_] = (bits & mask) == mask
    return all_ones
