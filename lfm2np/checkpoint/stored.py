"""A tensor as a file holds it, widened exactly, and checked for numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from mmap import mmap
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lfm2np.errors import CheckpointError
from lfm2np.values import show

if TYPE_CHECKING:
    from lfm2np.truth.integers import Weights

DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
PARTS: dict[str, np.dtype[Any]] = {  # of what makes a quantised matrix in safetensors
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
}
CHUNK = 2**20  # elements looked at together: keeps temporaries small
_EXPONENT_BITS = {"BF16": 0x7F80, "F16": 0x7C00}

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class QuantisedRows:
    """Rows of a quantised matrix, indexed as an array is: PackedRows of safetensors, BlockRows of GGUF.

    Its fields are arrays, which an index is applied to, but for those of `SHARED`; and what says how they are read.
    """

    SHARED: ClassVar[tuple[str, ...]] = ()

    @property
    def by_field(self) -> dict[str, Array]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.by_field.values())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Self:
        """Of the first axis: a number of experts, a slice or an array of rows."""
        parts: Any = {name: array[index] for name, array in self.by_field.items() if name not in self.SHARED}
        return replace(self, **parts)

    def widened(self) -> npt.NDArray[np.float64]:
        """[..., columns], exactly the stored values."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """In words, the first number that is not finite, or that no float32 holds."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as the file holds it.

    dtype   "BF16", "F16", "F32", or the name of a quantised format, for people
    values  read-only view of the memory map: uint16 (the bits of BF16), float16 or float32, all in the file's byte
            order, little-endian, whatever the machine's own is; or QuantisedRows
    source  the file, for messages
    """

    name: str
    dtype: str
    values: Array | QuantisedRows
    source: str = ""

    @property
    def array(self) -> Array:
        """`values` of a tensor that is one array."""
        assert isinstance(self.values, np.ndarray), self.name
        return self.values

    @property
    def arrays(self) -> Iterator[Array]:
        return iter([self.values] if isinstance(self.values, np.ndarray) else self.values.by_field.values())

    @property
    def is_quantised(self) -> bool:
        """Whether it widens to float64."""
        return not isinstance(self.values, np.ndarray)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def wrong(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.name}: {text}")

    def rows(self, index: Any) -> Weights:
        """A copy of some rows, widened."""
        return widen(self.values[index], self.dtype)


def widen(values: Array | QuantisedRows, dtype: str) -> Weights:
    """A fresh array with exactly the stored values: float32, or float64 of rows of a quantised tensor.

    bfloat16 is the upper half of a float32. The one place where it is decided how rows are widened.
    """
    if not isinstance(values, np.ndarray):
        return values.widened()
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {show(dtype)}, expected one of {', '.join(DTYPES)}")
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
    """Raises CheckpointError naming the tensor and the first index, group or block that holds NaN or an infinity."""
    where = f"{tensor.source}: " if tensor.source else ""
    if not isinstance(tensor.values, np.ndarray):
        if problem := tensor.values.problem():
            raise CheckpointError(
                f"{where}{tensor.name}: {tensor.dtype} with {problem}, expected finite numbers that float32 holds"
            )
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


def _not_finite(chunk: Array, dtype: str) -> npt.NDArray[np.bool_]:
    if dtype == "F32":
        return np.logical_not(np.isfinite(chunk.astype(np.float32, copy=False)))
    mask = np.uint16(_EXPONENT_BITS[dtype])
    bits = chunk.view(np.dtype(np.uint16).newbyteorder(chunk.dtype.byteorder))  # the file's order, not the machine's
    all_ones: npt.NDArray[np.bool_] = (bits & mask) == mask
    return all_ones
