"""Rows of a quantised matrix, which several arrays of a file may hold together, as one array of numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


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

    def widened(self) -> NDArray[np.float64]:
        """[..., columns], exactly the stored values."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """In words, the first number that is not finite, or that no float32 holds."""
        raise NotImplementedError
