"""Errors of the weights themselves: relative root mean squares, tensor by tensor; the same bits on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lfm2np.checkpoint.stored import require_finite, widen
from lfm2np.numerics.pieces import pieces
from lfm2np.oracle.compare.pair import Files, Part
from lfm2np.oracle.compare.positions import sum_of_squares
from lfm2np.progress import Progress


@dataclass(frozen=True)
class WeightError:
    """Of one tensor, or a layer's experts together.

    error: root of the sum of the differences' squares over that of the base's; of the former alone where that is 0.
    """

    name: str
    base_type: str
    type: str
    weights: int
    error: float


def weight_errors(
    base: Files, other: Files, tensors: Sequence[Part], progress: Progress | None = None
) -> list[WeightError]:
    """Of each part by tensor; `progress(done, total)` counts them.

    CheckpointError names the first weight, or scale, that is not a number.
    """
    errors = []
    for done, part in enumerate(tensors, 1):
        differences, squares, weights = list[float](), list[float](), 0
        names = part.tensors[:1] if part.layer is None else part.tensors  # a tied head is the embedding again
        for name in names:
            ours, theirs = base.tensors[name], other.tensors[name]
            require_finite(ours)
            require_finite(theirs)
            weights += math.prod(ours.shape)
            for rows in pieces(ours.shape[0], math.prod(ours.shape[1:])):
                base_values, other_values = (
                    widen(side.values[rows], side.dtype).astype(np.float64).reshape(rows.stop - rows.start, -1)
                    * files.factor(name)
                    for side, files in ((ours, base), (theirs, other))
                )
                squares += sum_of_squares(base_values).tolist()
                differences += sum_of_squares(other_values - base_values).tolist()
        size = math.fsum(squares)
        error = math.sqrt(math.fsum(differences) / (size or 1.0))
        errors.append(WeightError(part.name, types_of(base, names), types_of(other, names), weights, error))
        if progress:
            progress(done, len(tensors))
    return errors


def types_of(files: Files, names: Sequence[str]) -> str:
    return ", ".join(sorted({files.tensors[name].dtype for name in names}))


def stored_bits(files: Files) -> float:
    """Bits of the file per weight, over all tensors; a tied head counts once."""
    tensors = {id(tensor.values): tensor for tensor in files.tensors.values()}.values()
    return 8 * sum(tensor.values.nbytes for tensor in tensors) / sum(math.prod(tensor.shape) for tensor in tensors)
