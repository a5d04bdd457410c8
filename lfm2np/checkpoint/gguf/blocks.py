"""Quantised formats in blocks of 32 weights: what number each weight is, exactly.

Every format, here and in superblocks.py, says a weight is  scale * code - minimum  with an integer code. Sources: the
structs of ggml-common.h and the functions dequantize_row_* of ggml-quants.c (llama.cpp). There the three steps are
float32, and the last may round; here they are float64, and none does:

    a scale d or a minimum m is a float16: an integer of 11 bits times a power of two, a multiple of 2**-24 (the least
    subnormal), below 2**16. A code is an integer, so scale * code and the minimum are multiples of 2**-24, too, and so
    is their difference: where it is below 2**(53 - 24), it is a float64, and so is everything before it.

    Q4_0   |code| <= 8    Q5_0   |code| <= 16   Q8_0, IQ4_NL   |code| <= 128      no minimum: below 2**23
    Q4_1   code <= 15     Q5_1   code <= 31                                       with one:   below 2**21
    MXFP4  |code| <= 12 times a power of two: below 2**128, a float32

n blocks; a block's bytes lie in one row of uint8.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Codes = NDArray[np.int8] | NDArray[np.uint8]
Float64 = NDArray[np.float64]

IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # kvalues_iq4nl
FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice those of E2M1


class Parts(NamedTuple):
    """Of n blocks in groups that share a scale: weight = scale * code - minimum."""

    scale: Float64  # [n, groups]
    codes: Codes  # [n, weights of a block]
    minimum: Float64 | None = None  # [n, groups]


def bits(packed: Bytes, width: int) -> Bytes:
    """The fields of `width` bits of each byte, the lowest first: [..., bytes] -> [..., 8 // width, bytes]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return np.asarray((packed[..., None, :] >> shifts) & np.uint8(2**width - 1))


def half(blocks: Bytes, at: int) -> Float64:
    """The float16 in two bytes of each block: [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float64)


def nibbles(packed: Bytes) -> Bytes:
    """Codes of 4 bits, 16 bytes of each block: the low ones are the first 16 weights, the high ones the last."""
    return bits(packed, 4).reshape(len(packed), 32)


def fifth_bits(packed: Bytes) -> Bytes:
    """Bit i of 4 bytes of each block, times 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def signed(codes: Bytes, zero: int) -> NDArray[np.int8]:
    """Codes that count from -zero on."""
    return codes.astype(np.int8) - np.int8(zero)


def q4_0(blocks: Bytes) -> Parts:
    """d, then 16 bytes of codes."""
    return Parts(half(blocks, 0), signed(nibbles(blocks[:, 2:]), 8))


def q4_1(blocks: Bytes) -> Parts:
    """d, m, then 16 bytes of codes; a weight is d * code + m."""
    return Parts(half(blocks, 0), nibbles(blocks[:, 4:]), -half(blocks, 2))


def q5_0(blocks: Bytes) -> Parts:
    """d, 4 bytes of fifth bits, then 16 bytes of the lower four."""
    return Parts(half(blocks, 0), signed(nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6]), 16))


def q5_1(blocks: Bytes) -> Parts:
    """d, m, 4 bytes of fifth bits, then 16 bytes of the lower four; a weight is d * code + m."""
    return Parts(half(blocks, 0), nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8]), -half(blocks, 2))


def q8_0(blocks: Bytes) -> Parts:
    """d, then 32 codes of 8 bits."""
    return Parts(half(blocks, 0), blocks[:, 2:].view(np.int8))


def iq4_nl(blocks: Bytes) -> Parts:
    """d, then 16 bytes of places in IQ4_VALUES."""
    return Parts(half(blocks, 0), IQ4_VALUES[nibbles(blocks[:, 2:])])


def mxfp4(blocks: Bytes) -> Parts:
    """e, the scale 2**(e - 127), then 16 bytes of E2M1, whose halves are integers."""
    return Parts(np.ldexp(1.0, blocks[:, :1].astype(np.int32) - 128), FP4_VALUES[nibbles(blocks[:, 1:])])
