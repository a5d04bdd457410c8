"""Products with quantised weights as llama.cpp's CPU kernels compute them: inputs are first rounded to 8 bits.

Before it multiplies, llama.cpp rounds a row of activations by blocks, to a scale times integers from -127 to 127, so
that it can add up products of integers. Which blocks depends on the type of the weights (the `vec_dot_type` of
ggml-cpu.c; the rounding is in ggml-quants.c):

Q8_0  blocks of 32, scale float16(max / 127), where max is of magnitudes
Q8_1  the same, and the block's sum as float16, by which minima are multiplied
Q8_K  blocks of 256, scale float32(max / 127)
F16   weights of float16: inputs in float16; of bfloat16: in bfloat16

This is no noise: the dumped inputs determine the integers. Noise remains where an input is so near to the middle
between two integers that the order of operations decides, or what the format may lose in it; there the spread is one
whole integer, and likewise for scales and sums that are rounded to float16.

T tokens, D inputs, B blocks in them, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.ieee import round_to_bfloat16
from lfm2np.arithmetic.matrix import Weights
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.oracle.judging.formats import round_to_float16
from lfm2np.oracle.locate import spread
from lfm2np.oracle.locate.spread import LIMIT, Measured, Precision, together

Array = NDArray[Any]
Float32 = NDArray[np.float32]
STEPS = 127.0
BLOCK, SUPERBLOCK = 32, 256
WITH_SUMS = ("Q4_1", "Q5_1")  # their inputs are Q8_1
NEAR = 2.0**-21  # relative: how far off float32 quotients and products of two or three operations may be
HALVES = {"F16": round_to_float16, "BF16": round_to_bfloat16}


@dataclass(frozen=True, eq=False)
class Rounded:
    """Inputs [T, D] as integers times scales; `sums` [T, B]: the error of block sums, where they matter."""

    inputs: Measured
    sums: Measured | None = None


def rounds(tensor: StoredTensor) -> bool:
    """Whether a product with such weights rounds its inputs."""
    return tensor.dtype in QUANTISED or tensor.dtype in HALVES


def linear(x: Measured, weight: Weights, bias: Float32 | None, tensor: StoredTensor, precision: Precision) -> Measured:
    """x [T, D], weight [O, D], the tensor's -> [T, O], of inputs rounded as the tensor's type requires."""
    rounded = rounded_inputs(x, tensor.dtype)
    product = spread.linear(rounded.inputs, weight, bias, precision)
    if rounded.sums is None:
        return product
    minima = minima_of(tensor)  # [O, B]
    return Measured(
        product.values - rounded.sums.values @ minima.T,
        together(product.spread, np.sqrt(np.square(rounded.sums.spread) @ np.square(minima).T)),
    )


def rounded_inputs(x: Measured, dtype: str) -> Rounded:
    if dtype in HALVES:
        keep = HALVES[dtype]
        low, high = (keep(x.values + sign * LIMIT * x.spread).astype(np.float64) for sign in (-1.0, 1.0))
        return Rounded(Measured(keep(x.values).astype(np.float64), high - low))
    if QUANTISED[dtype].weights == SUPERBLOCK:
        return Rounded(in_blocks(x, SUPERBLOCK, is_half=False))
    blocks = in_blocks(x, BLOCK, is_half=True)
    return Rounded(blocks, sums_of(x, blocks) if dtype in WITH_SUMS else None)


def in_blocks(x: Measured, size: int, is_half: bool) -> Measured:
    """x [T, D] -> integers times scales, with doubt as a spread."""
    values, noise = (array.reshape(len(array), -1, size) for array in (x.values, x.spread))
    largest = np.abs(values).max(axis=-1, keepdims=True)  # [T, B, 1]
    scale = largest / STEPS
    loud = ratio(noise.max(axis=-1, keepdims=True), largest)
    quotient = ratio(values, scale)
    integers = np.rint(quotient)
    doubt = np.abs(quotient) * (NEAR + LIMIT * loud) + LIMIT * ratio(noise, scale)
    near = (np.abs(np.abs(quotient - integers) - 0.5) <= doubt) & (scale > 0)
    kept, loose = as_float16(scale, NEAR + LIMIT * loud) if is_half else (scale, (spread.SUM_UNIT + loud) * scale)
    moved = together(np.where(near, kept, 0.0), np.abs(integers) * loose)
    return Measured((integers * kept).reshape(x.values.shape), moved.reshape(x.values.shape))


def sums_of(x: Measured, rounded_x: Measured) -> Measured:
    """[T, B]: by how much float16 block sums differ from sums of the rounded inputs."""
    values, rounded = (array.reshape(len(array), -1, BLOCK) for array in (x.values, rounded_x.values))
    scale = np.abs(values).max(axis=-1) / STEPS
    held = round_to_float16(scale).astype(np.float64)
    wide = ratio(rounded.sum(axis=-1) * scale, held)
    noise = LIMIT * np.sqrt(np.square(rounded_x.spread).reshape(values.shape).sum(axis=-1)) + NEAR * np.abs(wide)
    half = round_to_float16(wide).astype(np.float64)
    low, high = (round_to_float16(wide + sign * noise).astype(np.float64) for sign in (-1.0, 1.0))
    return Measured(half - rounded.sum(axis=-1), high - low)


def as_float16(scale: Array, off: Array) -> tuple[Array, Array]:
    """Scales as they are stored, and the distance to the next float16 where their error `off` (relative) may reach
    it.
    """
    low, kept, high = (round_to_float16(scale * (1.0 + sign * off)).astype(np.float64) for sign in (-1.0, 0.0, 1.0))
    return kept, high - low


def ratio(values: Array, by: Array) -> Array:
    """0 where `by` is 0."""
    shape = np.broadcast_shapes(values.shape, by.shape)
    return np.divide(values, by, out=np.zeros(shape), where=np.broadcast_to(by > 0, shape))


def minima_of(tensor: StoredTensor) -> Array:
    """[O, B] of a tensor in a format with a minimum for each block of 32."""
    kind, blocks = QUANTISED[tensor.dtype], np.ascontiguousarray(tensor.values, np.uint8)
    minimum = kind.parts(blocks.reshape(-1, kind.size)).minimum
    assert minimum is not None, tensor.dtype
    return minimum.reshape(len(tensor.values), -1)
