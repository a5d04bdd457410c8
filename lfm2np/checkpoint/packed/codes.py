"""Numbers as quantised tensors hold them: codes of 1 to 8 bits, float8, float4, and scales of any of their types.

Everything here is exact: an integer of at most 8 bits, or a float of at most 24 bits with an exponent far from
float64's ends. Sources: mlx's quantized.h (`pack_factor`, `fp4.h`, `fp8.h`), compressed-tensors' `pack_to_int32`, the
OCP specifications of 8-bit floating point and of microscaling formats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.gguf.blocks import FP4_VALUES

Array = NDArray[np.generic]
Float64 = NDArray[np.float64]

DTYPES: dict[str, np.dtype[Any]] = {  # of safetensors, beside those of stored.DTYPES
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
}
BITS = {f"{width} bits": width for width in range(1, 9)}
LARGEST = {"int8": 256.0, "float8": 448.0, "float4": 6.0}  # of a code less its zero; of n bits 2**n


def float8_values() -> Float64:
    """[256] of E4M3: sign, 4 bits of exponent with bias 7, 3 of fraction; 0x7F and 0xFF are NaN, infinity has none."""
    found = []
    for byte in range(256):
        exponent, fraction = byte >> 3 & 15, byte & 7
        size = np.ldexp(8.0 + fraction, exponent - 10) if exponent else np.ldexp(float(fraction), -9)
        found.append(np.copysign(np.nan if byte & 127 == 127 else size, -1.0 if byte > 127 else 1.0))
    return np.array(found)


FLOAT8 = float8_values()
FLOAT4 = np.where(np.arange(16) < 8, 1.0, -1.0) * np.abs(FP4_VALUES) / 2  # E2M1; code 8 is -0.0
E8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)  # powers of two


def bytes_of(words: Array) -> NDArray[np.uint8]:
    """The bytes of the last axis in the file's order, which is little-endian."""
    return np.ascontiguousarray(words).view(np.uint8)


def unpacked(words: Array, width: int) -> NDArray[np.uint8]:
    """Codes of `width` bits from the lowest bit of the first word on, over the borders of words: [..., codes].

    Eight codes are `width` bytes, whatever the width is.
    """
    packed = bytes_of(words)
    if width == 8:
        return packed
    if 8 % width == 0:  # the same, faster: no code lies in two bytes
        codes = packed[..., None] >> np.arange(0, 8, width, dtype=np.uint8) & np.uint8(2**width - 1)
        return codes.reshape(*packed.shape[:-1], -1)
    eights = packed.reshape(*packed.shape[:-1], -1, width).astype(np.uint64)
    joined = np.zeros(eights.shape[:-1], np.uint64)
    for place in range(width):
        joined |= eights[..., place] << np.uint64(8 * place)
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(width)
    codes = (joined[..., None] >> shifts & np.uint64(2**width - 1)).astype(np.uint8)
    return codes.reshape(*packed.shape[:-1], -1)


def packed_words(width: int, columns: int) -> int:
    """32-bit words of a row of so many codes."""
    return -(-width * columns // 32)


def codes_of(words: Array, coding: str) -> Float64:
    """[..., codes] of "n bits", "int8", "float8" or "float4"."""
    if coding in BITS:
        return unpacked(words, BITS[coding]).astype(np.float64)
    if coding == "int8":
        return words.astype(np.float64)
    if coding == "float8":
        return FLOAT8[bytes_of(words)]
    return FLOAT4[unpacked(words, 4)]


def numbers(values: Array, dtype: str) -> Float64:
    """Of scales and biases in one of BF16, F16, F32, F8_E4M3, F8_E8M0."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if dtype == "F8_E4M3":
        return FLOAT8[values.astype(np.uint8)]
    if dtype == "F8_E8M0":
        return E8M0[values.astype(np.uint8)]
    return values.astype(np.float64)
