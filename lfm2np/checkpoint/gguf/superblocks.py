"""Quantised formats in blocks of 256 weights, whose groups of 16 or 32 have integer scales: K-quants and IQ4_XS.

The scale of a group is a float16 d times an integer, its minimum a float16 dmin times an integer. By the argument of
blocks.py all of it is a multiple of 2**-24, and float64 holds what is below 2**29:

    Q2_K   2**16 * (15 * 3 + 15)     < 2**22      Q3_K     2**16 * 32 * 4     = 2**23
    Q4_K   2**16 * (63 * 15 + 63)    < 2**26      Q6_K     2**16 * 128 * 32   = 2**28
    Q5_K   2**16 * (63 * 31 + 63)    < 2**27      IQ4_XS   2**16 * 32 * 127   < 2**28

Sources: as in blocks.py. n blocks; a block's bytes lie in one row of uint8.
"""

from __future__ import annotations

import numpy as np

from lfm2np.checkpoint.gguf.blocks import IQ4_VALUES, Bytes, Parts, bits, half, signed


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
