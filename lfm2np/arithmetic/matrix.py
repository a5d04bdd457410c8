"""Prepared weights: a linear map in the form that one arithmetic wants, and the scales of an attention layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lfm2np.arithmetic.pieces import over_pieces, pieces
from lfm2np.truth.integers import AttentionScale as AttentionScale
from lfm2np.truth.integers import Weights as Weights

PREPARED = 2**17  # weights that a core prepares at a time: with fewer, threads wait for Python's lock
STREAMED = 2**17  # weights prepared for a product together, by one thread: two were slower beside BLAS's own


@dataclass(frozen=True, eq=False)
class Grid:
    """The proof that products with these weights are exact: no dot product exceeds 2**53 units."""

    columns: NDArray[np.int32]  # [inputs]: column i is divided by 2**columns[i], input i multiplied by it
    slices: int  # 2, 3: every weight is the sum of as many grid values, whose products are added at the end
    row_sum_bits: int  # the weights of any row of a slice sum, in absolute value, to at most 2**row_sum_bits units
    activation_bits: int  # |x| <= 2**activation_bits units of its row; activation_bits + row_sum_bits <= 53

    @cached_property
    def factors(self) -> NDArray[np.float64]:
        """[inputs]: 2**columns."""
        return np.asarray(np.ldexp(1.0, self.columns))


class Rows(Protocol):
    """Weights [outputs, inputs] of which a slice of rows can be read: an array, or what stays in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""

    def __getitem__(self, rows: slice, /) -> Weights: ...


@dataclass(frozen=True, eq=False)
class Streamed:
    """Weights that stay as they are stored and are prepared for each product anew, a piece of the rows at a time."""

    weight: Rows
    prepare: Callable[[Weights], NDArray[Any]]  # [rows, inputs] -> [slices, rows, inputs]
    dtype: DTypeLike  # of what is prepared
    slices: int = 1

    def prepared(self, rows: slice) -> NDArray[Any]:
        """Rows of the weights, prepared by all cores, to stay: [slices * rows, inputs]."""
        count, inputs = rows.stop - rows.start, self.weight.shape[1]
        values = np.empty((self.slices, count, inputs), self.dtype)

        def fill(piece: slice) -> None:
            values[:, piece] = self.prepare(self.weight[rows.start + piece.start : rows.start + piece.stop])

        over_pieces(fill, count, inputs, PREPARED)
        return values.reshape(-1, inputs)


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights [outputs, inputs]; in exact arithmetic [slices * outputs, inputs], with the proof."""

    values: NDArray[Any] | Streamed
    grid: Grid | None = None

    @property
    def outputs(self) -> int:
        if isinstance(self.values, Streamed):
            return self.values.weight.shape[0]
        return len(self.values) // (self.grid.slices if self.grid else 1)

    @property
    def inputs(self) -> int:
        return (self.values.weight if isinstance(self.values, Streamed) else self.values).shape[1]

    def pieces(self) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Slices of the outputs, and their weights [slices * rows, inputs]: all at once, or streamed by pieces."""
        if isinstance(self.values, Streamed):
            for rows in pieces(self.outputs, self.inputs, STREAMED):
                yield rows, self.values.prepare(self.values.weight[rows]).reshape(-1, self.inputs)
        else:
            yield slice(0, self.outputs), self.values
