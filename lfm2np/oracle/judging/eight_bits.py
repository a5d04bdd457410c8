"""What engines round numbers to before a product or in a cache: float16, integers by block or by row, float8.

Each function takes float32 [..., n] and returns the rounded numbers as float32 of the same shape.
Sources: quantize_row_q8_0_ref, quantize_row_q8_K_ref, quantize_row_q4_0_ref in ggml-quants.c (llama.cpp);
scaled_int8_quant and scaled_fp8_quant in vllm/_custom_ops.py; the format E4M3 in OCP's "8-bit floating point".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MOST_FLOAT8 = 448.0  # of E4M3
SMALL_BLOCK, LARGE_BLOCK = 32, 256
TURNED = 64


def round_to_float16(x: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(np.float16).astype(np.float32)


def q8_0(x: Array) -> Array:
    """Blocks of 32 in whole steps of their largest / 127; codes by the step in float32, values by it in float16.

    Q8_1, of CUDA and of weights with a minimum, rounds the same. The float16 sum of a block that it also stores is not
    modelled: its relative error is at most 2**-11, while each code is off by up to half a step.
    """
    blocks = in_blocks(x, SMALL_BLOCK)
    step = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    return out_of_blocks(whole_steps(blocks, step) * round_to_float16(step), x)


def q8_k(x: Array) -> Array:
    """Blocks of 256 in whole steps of their largest / 127; the step stays float32."""
    blocks = in_blocks(x, LARGE_BLOCK)
    step = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    return out_of_blocks(whole_steps(blocks, step) * step, x)


def q4_0(x: Array) -> Array:
    """Blocks of 32 with codes -8 to 7, in steps of the number of largest magnitude / -8."""
    blocks = in_blocks(x, SMALL_BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
    step = largest / np.float32(-8)
    codes = np.minimum(np.floor(quotients(blocks, step) + np.float32(8.5)), 15) - 8
    return out_of_blocks(codes.astype(np.float32) * round_to_float16(step), x)


def int8_rows(x: Array) -> Array:
    """Each row in whole steps of its largest / 127."""
    step = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.asarray(whole_steps(x, step) * step)


def int8_rows_asymmetric(x: Array) -> Array:
    """Each row in 255 steps from its least to its largest, 0 included."""
    least, largest = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
    step = (largest - least) / np.float32(255)
    zero = np.rint(quotients(least, step))
    return np.asarray(((whole_steps(x, step) - zero).clip(0, 255) + zero) * step, np.float32)


def int8_static(x: Array, step: float, zero: int = 0) -> Array:
    """In whole steps stated by the checkpoint, codes -128 to 127 with `zero` for 0; others saturate."""
    codes = (np.rint(x / np.float32(step)) + zero).clip(-128, 127)
    return np.asarray((codes - zero) * np.float32(step), np.float32)


def float8(x: Array) -> Array:
    """The nearest E4M3: 4 significant bits down to 2**-6, multiples of 2**-9 below; larger numbers saturate."""
    clipped = x.clip(-MOST_FLOAT8, MOST_FLOAT8)
    step = np.ldexp(np.float32(1), np.maximum(np.frexp(clipped)[1] - 1, -6) - 3)
    return np.asarray(np.rint(clipped / step) * step, np.float32)


def float8_rows(x: Array) -> Array:
    """Each row scaled so that its largest becomes float8's largest."""
    return float8_scaled(x, np.abs(x).max(-1, keepdims=True) / np.float32(MOST_FLOAT8))


def by_tensor(x: Array, by_row: Callable[[Array], Array]) -> Array:
    """All rows by one scale, their largest's; how many rows a step has depends on the engine."""
    return by_row(x.reshape(1, -1)).reshape(x.shape)


def by_group(x: Array, size: int, by_row: Callable[[Array], Array]) -> Array:
    """Columns of a row in groups, each with its scale."""
    return out_of_blocks(by_row(in_blocks(x, size)), x)


def float8_static(x: Array, scale: float) -> Array:
    """With a scale that the checkpoint states."""
    return float8_scaled(x, np.full((1,) * x.ndim, scale, np.float32))


def float8_scaled(x: Array, scale: Array) -> Array:
    return float8(quotients(x, scale)) * scale


def turned(heads: Array) -> Array:
    """Heads [..., E] with every TURNED numbers multiplied by the Walsh-Hadamard matrix, which is its own inverse.

    llama.cpp (ggml_gen_hadamard in llama-kv-cache.cpp) so spreads outliers before rounding keys, values and queries.
    """
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < TURNED:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.float32(np.sqrt(TURNED))
    return np.asarray((heads.reshape(-1, TURNED) @ matrix).reshape(heads.shape))


def whole_steps(x: Array, step: Array) -> Array:
    return np.rint(quotients(x, step))


def quotients(x: Array, step: Array) -> Array:
    """x / step; 0 where the step is 0, as are then all numbers it was computed from."""
    return np.asarray(x / np.where(step == 0, np.float32(1), step) * (step != 0))


def in_blocks(x: Array, size: int) -> Array:
    """[..., n] -> [..., n / size, size], the last block padded with zeros."""
    inputs = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-inputs // size) * size), np.float32)
    padded[..., :inputs] = x
    return padded.reshape(*x.shape[:-1], -1, size)


def out_of_blocks(blocks: Array, like: Array) -> Array:
    return np.asarray(blocks.reshape(*like.shape[:-1], -1)[..., : like.shape[-1]])
