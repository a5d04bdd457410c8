"""Products with quantised weights as llama.cpp's CPU kernels compute them: inputs are first rounded to 8 bits.

Before it multiplies, llama.cpp rounds a row of activations by blocks, to a scale times integers from -127 to 127, so
that it can add up products of integers. Which blocks depends on the type of the weights (the `vec_dot_type` of
ggml-cpu.c; the rounding is in ggml-quants.c):

Q8_0  blocks of 32, scale float16(max / 127), where max is of magnitudes
Q8_1  the same, and the block's sum as float16, by which minima are multiplied
Q8_K  blocks of 256, scale float32(max / 127)
F16   weights of float16: inputs in float16; of bfloat16: in bfloat16

This is no noise: the dumped inputs determine the integers. Each rounding is evaluated again with its argument moved by
what float32 or the format may lose in it; the spread is the step to the other result, if it is another.

T tokens, D inputs, B blocks in them, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.ieee import round_to_bfloat16
from lfm2np.arithmetic.matrix import Weights
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED, BlockRows
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.oracle.judging.formats import round_to_float16
from lfm2np.oracle.locate import spread
from lfm2np.oracle.locate.spread import LIMIT, SUM_UNIT, Measured, Precision, together

Array = NDArray[Any]
STEPS = 127.0
BLOCK, SUPERBLOCK = 32, 256
WITH_SUMS = ("Q4_1", "Q5_1")  # their inputs are Q8_1
NEAR = 2.0**-21  # relative: how far off float32 quotients and products of two or three operations may be
HALVES = {"F16": round_to_float16, "BF16": round_to_bfloat16}


def rounds(tensor: StoredTensor) -> bool:
    """Whether a product with such weights rounds its inputs."""
    return tensor.dtype in QUANTISED or tensor.dtype in HALVES


def linear(x: Measured, weight: Weights, bias: Weights | None, tensor: StoredTensor, precision: Precision) -> Measured:
    """x [T, D], weight [O, D], the tensor's -> [T, O], of inputs rounded as the tensor's type requires."""
    if tensor.dtype in HALVES:
        return spread.linear(at_ends(HALVES[tensor.dtype], x.values, LIMIT * x.spread), weight, bias, precision)
    is_large = QUANTISED[tensor.dtype].weights == SUPERBLOCK
    inputs = in_blocks(x, SUPERBLOCK if is_large else BLOCK, is_half=not is_large)
    output = spread.linear(inputs, weight, bias, precision)
    if tensor.dtype not in WITH_SUMS:
        return output
    sums, minima = sums_of(x, inputs), minima_of(tensor)  # [T, B], [O, B]
    moves = np.sqrt(np.square(sums.spread) @ np.square(minima).T)
    return Measured(output.values - sums.values @ minima.T, together(output.spread, moves))


def at_ends(function: Callable[[Array], Array], values: Array, off: Array) -> Measured:
    """A rounding of values, and the distance between what it gives at both ends of values +- off."""
    low, kept, high = (function(values + sign * off).astype(np.float64) for sign in (-1.0, 0.0, 1.0))
    return Measured(kept, high - low)


def in_blocks(x: Measured, size: int, is_half: bool) -> Measured:
    """x [T, D] -> integers times scales; is_half: of float16."""
    values, noise = (array.reshape(len(array), -1, size) for array in (x.values, x.spread))
    largest = np.abs(values).max(axis=-1, keepdims=True)  # [T, B, 1]
    scale, loud = largest / STEPS, ratio(noise.max(axis=-1, keepdims=True), largest)
    quotient = ratio(values, scale)
    integers = at_ends(np.rint, quotient, np.abs(quotient) * (NEAR + LIMIT * loud) + LIMIT * ratio(noise, scale))
    kept = Measured(scale, (SUM_UNIT + loud) * scale)
    if is_half:
        kept = at_ends(round_to_float16, scale, (NEAR + LIMIT * loud) * scale)
    step = np.minimum(integers.spread, 1.0 + ratio(noise, scale))
    moves = together(step * kept.values, integers.values * kept.spread)
    return Measured((integers.values * kept.values).reshape(x.values.shape), moves.reshape(x.values.shape))


def sums_of(x: Measured, inputs: Measured) -> Measured:
    """[T, B]: by how much float16 block sums differ from sums of the rounded inputs."""
    values, rounded = (array.reshape(len(array), -1, BLOCK) for array in (x.values, inputs.values))
    scale = np.abs(values).max(axis=-1) / STEPS
    wide = ratio(rounded.sum(axis=-1) * scale, round_to_float16(scale).astype(np.float64))
    noise = LIMIT * np.sqrt(np.square(inputs.spread).reshape(values.shape).sum(axis=-1)) + NEAR * np.abs(wide)
    sums = at_ends(round_to_float16, wide, noise)
    return Measured(sums.values - rounded.sum(axis=-1), sums.spread)


def ratio(values: Array, by: Array) -> Array:
    """0 where `by` is 0."""
    shape = np.broadcast_shapes(values.shape, by.shape)
    return np.divide(values, by, out=np.zeros(shape), where=np.broadcast_to(by > 0, shape))


def minima_of(tensor: StoredTensor) -> Array:
    """[O, B] of a tensor in a format with a minimum for each block of 32."""
    assert isinstance(tensor.values, BlockRows), tensor.name
    kind, blocks = QUANTISED[tensor.dtype], np.ascontiguousarray(tensor.values.blocks)
    minimum = kind.parts(blocks.reshape(-1, kind.size)).minimum
    assert minimum is not None, tensor.dtype
    return minimum.reshape(len(blocks), -1)
