"""Quantised formats in blocks of 32 or 256 weights: what number each weight is, exactly.

Every format says a weight is  scale * code - minimum  with an integer code. Sources: the
structs of ggml-common.h and the functions dequantize_row_* of ggml-quants.c (llama.cpp). There, and in the package
`gguf` (0.19), the three steps are float32, and the last rounds in formats with minima (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K);
here they are float64, and none does:

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


# --- blocks of 256 weights, whose groups of 16 or 32 have integer scales: K-quants and IQ4_XS
#
# The scale of a group is a float16 d times an integer, its minimum a float16 dmin times an integer. By the argument
# above all of it is a multiple of 2**-24, and float64 holds what is below 2**29:
#
#    Q2_K   2**16 * (15 * 3 + 15)     < 2**22      Q3_K     2**16 * 32 * 4     = 2**23
#    Q4_K   2**16 * (63 * 15 + 63)    < 2**26      Q6_K     2**16 * 128 * 32   = 2**28
#    Q5_K   2**16 * (63 * 31 + 63)    < 2**27      IQ4_XS   2**16 * 32 * 127   < 2**28


def q2_k(blocks: Bytes) -> Parts:
    """16 bytes of scales (low 4 bits) and minima (high), 64 bytes of codes, d, dmin; groups of 16."""
    n = len(blocks)
    codes = bits(blocks[:, 16:80].reshape(n, 2, 32), 2)  # [n, 2, 4, 32]
    scales = bits(blocks[:, :16], 4)  # [n, 2, 16]
    return Parts(half(blocks, 80) * scales[:, 0], codes.reshape(n, 256), half(blocks, 82) * scales[:, 1])


def q3_k(blocks: Bytes) -> Parts:
    """32 bytes of third bits, 64 bytes of the lower two, 12 bytes of scales, d; groups of 16. Codes are -4 to 3.

    Of the 16 scales of 6 bits, -32 to 31, 8 bytes have the lower four bits, 4 bytes the upper two.
    """
    n = len(blocks)
    low = bits(blocks[:, 32:96].reshape(n, 2, 32), 2).reshape(n, 256)
    high = bits(blocks[:, :32], 1).reshape(n, 256)
    scales = bits(blocks[:, 96:104], 4).reshape(n, 16) | bits(blocks[:, 104:108], 2).reshape(n, 16) << np.uint8(4)
    return Parts(half(blocks, 108) * signed(scales, 32), signed(low | high << np.uint8(2), 4))


def q4_k(blocks: Bytes) -> Parts:
    """d, dmin, 12 bytes of scales and minima, 128 bytes of codes; groups of 32."""
    n = len(blocks)
    scales, minima = packed_scales(blocks[:, 4:16])
    codes = bits(blocks[:, 16:].reshape(n, 4, 32), 4)  # [n, 4, 2, 32]
    return Parts(half(blocks, 0) * scales, codes.reshape(n, 256), half(blocks, 2) * minima)


def q5_k(blocks: Bytes) -> Parts:
    """d, dmin, 12 bytes of scales and minima, 32 bytes of fifth bits, 128 bytes of the lower four; groups of 32."""
    n = len(blocks)
    scales, minima = packed_scales(blocks[:, 4:16])
    low = bits(blocks[:, 48:].reshape(n, 4, 32), 4).reshape(n, 256)
    high = bits(blocks[:, 16:48], 1).reshape(n, 256)
    return Parts(half(blocks, 0) * scales, low | high << np.uint8(4), half(blocks, 2) * minima)


def packed_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Scales and minima of 8 groups, 6 bits each, of 12 bytes: [n, 8] and [n, 8] (get_scale_min_k4).

    Bytes 0 to 3 have scales 0 to 3, bytes 4 to 7 minima 0 to 3, in their lower six bits; bytes 8 to 11 the lower four
    bits of scales 4 to 7 and of minima 4 to 7, whose upper two are the upper two of the bytes before.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], bits(packed[:, 8:], 4)  # third [n, 2, 4]
    six, top = np.uint8(63), np.uint8(2)
    scales = [first & six, third[:, 0] | (first & ~six) >> top]
    minima = [second & six, third[:, 1] | (second & ~six) >> top]
    return np.concatenate(scales, axis=1), np.concatenate(minima, axis=1)


def q6_k(blocks: Bytes) -> Parts:
    """128 bytes of the lower four bits, 64 bytes of the upper two, 16 scales of 8 bits, d; groups of 16."""
    n = len(blocks)
    low = bits(blocks[:, :128].reshape(n, 2, 64), 4).reshape(n, 256)
    high = bits(blocks[:, 128:192].reshape(n, 2, 32), 2).reshape(n, 256)
    scales = blocks[:, 192:208].view(np.int8)
    return Parts(half(blocks, 208) * scales, signed(low | high << np.uint8(4), 32))


def iq4_xs(blocks: Bytes) -> Parts:
    """d, 2 bytes and 4 bytes of scales, 128 bytes of places in IQ4_VALUES; groups of 32.

    Of the 8 scales of 6 bits, -32 to 31, the 4 bytes have the lower four bits, the 2 bytes the upper two.
    """
    n = len(blocks)
    low = bits(blocks[:, 4:8], 4).swapaxes(1, 2).reshape(n, 8)
    high = bits(blocks[:, 2:4], 2).swapaxes(1, 2).reshape(n, 8)
    codes = bits(blocks[:, 8:].reshape(n, 8, 16), 4)  # [n, 8, 2, 16]
    return Parts(half(blocks, 0) * signed(low | high << np.uint8(4), 32), IQ4_VALUES[codes].reshape(n, 256))
