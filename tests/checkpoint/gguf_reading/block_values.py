"""The weights of one block by Python's integers and fractions, as dequantize_row_* of llama.cpp has them.

Written after the loops of ggml-quants.c (llama.cpp), not after the code that is tested: `y[i] = ...` in their order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = tuple(Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
Values = list[Fraction]


def half(block: bytes, at: int) -> Fraction:
    return Fraction(struct.unpack_from("<e", block, at)[0])


def int8(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def in_halves(low: Callable[[int], Fraction], high: Callable[[int], Fraction], count: int = 16) -> Values:
    """y[j] and y[j + count] of byte j."""
    return [low(j) for j in range(count)] + [high(j) for j in range(count)]


def q4_0(b: bytes) -> Values:
    d, qs = half(b, 0), b[2:]
    return in_halves(lambda j: d * ((qs[j] & 15) - 8), lambda j: d * ((qs[j] >> 4) - 8))


def q4_1(b: bytes) -> Values:
    d, m, qs = half(b, 0), half(b, 2), b[4:]
    return in_halves(lambda j: d * (qs[j] & 15) + m, lambda j: d * (qs[j] >> 4) + m)


def q5_0(b: bytes) -> Values:
    d, qh, qs = half(b, 0), int.from_bytes(b[2:6], "little"), b[6:]
    return in_halves(
        lambda j: d * ((qs[j] & 15 | ((qh >> j) << 4) & 16) - 16),
        lambda j: d * ((qs[j] >> 4 | (qh >> (j + 12)) & 16) - 16),
    )


def q5_1(b: bytes) -> Values:
    d, m, qh, qs = half(b, 0), half(b, 2), int.from_bytes(b[4:8], "little"), b[8:]
    return in_halves(
        lambda j: d * (qs[j] & 15 | ((qh >> j) << 4) & 16) + m,
        lambda j: d * (qs[j] >> 4 | (qh >> (j + 12)) & 16) + m,
    )


def q8_0(b: bytes) -> Values:
    return [half(b, 0) * int8(q) for q in b[2:]]


def iq4_nl(b: bytes) -> Values:
    d, qs = half(b, 0), b[2:]
    return in_halves(lambda j: d * IQ4[qs[j] & 15], lambda j: d * IQ4[qs[j] >> 4])


def mxfp4(b: bytes) -> Values:
    d, qs = Fraction(2) ** (b[0] - 127), b[1:]
    return in_halves(lambda j: d * FP4[qs[j] & 15], lambda j: d * FP4[qs[j] >> 4])


def q2_k(b: bytes) -> Values:
    scales, qs, d, dmin = b[:16], b[16:80], half(b, 80), half(b, 82)
    y, group = [], 0
    for n in (0, 32):
        for shift in (0, 2, 4, 6):
            for start in (0, 16):
                sc, group = scales[group], group + 1
                y += [d * (sc & 15) * (q >> shift & 3) - dmin * (sc >> 4) for q in qs[n + start : n + start + 16]]
    return y


def q3_k(b: bytes) -> Values:
    """aux: sixteen scales of 6 bits, by the masks of the original."""
    hm, q, d = b[:32], b[32:96], half(b, 108)
    a0, a1, tmp = struct.unpack("<III", b[96:108])
    k1, k2 = 0x03030303, 0x0F0F0F0F
    words = [
        (a0 & k2) | (((tmp >> 0) & k1) << 4),
        (a1 & k2) | (((tmp >> 2) & k1) << 4),
        ((a0 >> 4) & k2) | (((tmp >> 4) & k1) << 4),
        ((a1 >> 4) & k2) | (((tmp >> 6) & k1) << 4),
    ]
    scales = struct.pack("<IIII", *words)
    y, group, mask = [], 0, 1
    for n in (0, 32):
        for shift in (0, 2, 4, 6):
            for start in (0, 16):
                dl, group = d * (int8(scales[group]) - 32), group + 1
                for i in range(start, start + 16):
                    y.append(dl * ((q[n + i] >> shift & 3) - (0 if hm[i] & mask else 4)))
            mask <<= 1
    return y


def scale_min_k4(j: int, q: bytes) -> tuple[int, int]:
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4)


def q4_k(b: bytes) -> Values:
    d, dmin, scales, qs = half(b, 0), half(b, 2), b[4:16], b[16:]
    y: Values = []
    for chunk in range(4):
        for part in (0, 1):
            sc, m = scale_min_k4(2 * chunk + part, scales)
            y += [d * sc * (q >> 4 * part & 15) - dmin * m for q in qs[32 * chunk : 32 * chunk + 32]]
    return y


def q5_k(b: bytes) -> Values:
    d, dmin, scales, qh, ql = half(b, 0), half(b, 2), b[4:16], b[16:48], b[48:]
    y: Values = []
    for group in range(8):
        sc, m = scale_min_k4(group, scales)
        for i in range(32):
            low = ql[32 * (group // 2) + i] >> 4 * (group % 2) & 15
            y.append(d * sc * (low + (16 if qh[i] & (1 << group) else 0)) - dmin * m)
    return y


def q6_k(b: bytes) -> Values:
    ql, qh, sc, d = b[:128], b[128:192], [int8(one) for one in b[192:208]], half(b, 208)
    y = [Fraction(0)] * 256
    for n in (0, 1):
        for i in range(32):
            low, high, is_ = ql[64 * n + i], ql[64 * n + i + 32], 8 * n + i // 16
            top = qh[32 * n + i]
            q = [low & 15, high & 15, low >> 4, high >> 4]
            for part in range(4):
                code = (q[part] | (top >> 2 * part & 3) << 4) - 32
                y[128 * n + 32 * part + i] = d * sc[is_ + 2 * part] * code
    return y


def iq4_xs(b: bytes) -> Values:
    d, scales_h, scales_l, qs = half(b, 0), int.from_bytes(b[2:4], "little"), b[4:8], b[8:]
    y: Values = []
    for ib in range(8):
        ls = (scales_l[ib // 2] >> 4 * (ib % 2) & 15) | ((scales_h >> 2 * ib & 3) << 4)
        codes = qs[16 * ib : 16 * ib + 16]
        dl = d * (ls - 32)
        y += [dl * IQ4[q & 15] for q in codes] + [dl * IQ4[q >> 4] for q in codes]
    return y


VALUES: dict[str, Callable[[bytes], Values]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}
