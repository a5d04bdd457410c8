"""Products with quantised weights as llama.cpp's CPU kernels compute them: inputs are first rounded to 8 bits.

Before it multiplies, llama.cpp rounds a row of activations by blocks, to a scale times integers from -127 to 127, in a
way that depends on the type of the weights (see oracle/judging/formats.py). This is no noise: the dumped inputs
determine the integers. The rounding is evaluated again with each number and the largest of its block moved by LIMIT
spreads, up or down; the spread is the farthest that it goes, a whole step where it may be another.

T tokens, D inputs, B blocks in them, O outputs.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from lfm2np.arithmetic.matrix import Weights
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED, BlockRows, minima_of
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.oracle.judging.formats import SMALL_BLOCK, in_blocks_for
from lfm2np.oracle.locate import spread
from lfm2np.oracle.locate.spread import LIMIT, Measured, Precision, together

HALVES = ("F16", "BF16")  # of weights with inputs of the same format
WITH_SUMS = ("Q4_1", "Q5_1")  # have a minimum for each block, by which the block's sum is multiplied, a float16


def rounds(tensor: StoredTensor) -> bool:
    """Whether a product with such weights rounds its inputs."""
    return tensor.dtype in QUANTISED or tensor.dtype in HALVES


def linear(x: Measured, weight: Weights, bias: Weights | None, tensor: StoredTensor, precision: Precision) -> Measured:
    """x [T, D], weight [O, D], the tensor's -> [T, O], of inputs rounded as the tensor's type requires."""
    inputs = rounded(x, tensor.dtype)
    output = spread.linear(inputs, weight, bias, precision)
    if tensor.dtype not in WITH_SUMS:
        return output
    assert isinstance(tensor.values, BlockRows), tensor.name
    blocks = tensor.values.blocks.reshape(-1, QUANTISED[tensor.dtype].size)
    minima = minima_of(blocks, tensor.dtype)[0, ::SMALL_BLOCK].reshape(len(weight), -1)  # [O, B]
    sums = 2.0**-11 * inputs.values.reshape(len(x), -1, SMALL_BLOCK).sum(axis=-1)  # [T, B]: what float16 may lose
    return Measured(output.values, together(output.spread, np.sqrt(np.square(sums) @ np.square(minima).T)))


def rounded(x: Measured, dtype: str) -> Measured:
    """x [T, D] as it meets weights of this type."""
    rounding, is_largest = in_blocks_for(dtype, 0), np.zeros(x.values.shape, bool)
    if dtype in QUANTISED:
        blocks = np.abs(x.values).reshape(len(x), -1, QUANTISED[dtype].weights)
        is_largest = (blocks == blocks.max(axis=-1, keepdims=True)).reshape(x.values.shape)
    kept, off = rounding(x.values.astype(np.float32)).astype(np.float64), np.zeros(x.values.shape)
    for own, of_largest in product((-1.0, 1.0), repeat=2):
        ends = x.values + LIMIT * np.where(is_largest, of_largest, own) * x.spread
        off = np.maximum(off, np.abs(rounding(ends.astype(np.float32)) - kept))
    return Measured(kept, off)
