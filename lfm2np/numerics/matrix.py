"""Prepared weights: a linear map in the form that one arithmetic wants, and the scales of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Grid:
    """The proof that products with these weights are exact: no dot product exceeds 2**53 units."""

    columns: NDArray[np.int32]  # [inputs]: column i is divided by 2**columns[i], input i multiplied by it
    slices: int  # 2: every weight is the sum of two grid values, whose products are added at the end
    row_sum_bits: int  # the weights of any row of a slice sum, in absolute value, to at most 2**row_sum_bits units
    activation_bits: int  # |x| <= 2**activation_bits units of its row; activation_bits + row_sum_bits <= 53

    @cached_property
    def factors(self) -> NDArray[np.float64]:
        """[inputs]: 2**columns."""
        return np.asarray(np.ldexp(1.0, self.columns))


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights [outputs, inputs]; in exact arithmetic [slices * outputs, inputs], with the proof."""

    values: NDArray[Any]
    grid: Grid | None = None


@dataclass(frozen=True, eq=False)
class AttentionScale:
    """Powers of two that bring the channels of one attention layer to a common size; used by exact arithmetic.

    They come from the weights, not from the activations, so every token has the same, and scaling by them is exact:
    a channel that is always large must not coarsen the grid of the others.
    """

    keys: NDArray[np.int32]  # [E]: keys are multiplied by 2**keys, queries divided by it
    values: NDArray[np.int32]  # [G, E]: values are divided by 2**values, outputs multiplied by it
