"""exp, log, sin and cos from IEEE basic operations only: the same bits on every machine.

NumPy's own exp, log, sin and cos take another code path per CPU and per build, and their last bits differ. Here each
function is a fixed sequence of elementwise +, -, *, /, rint, ldexp and frexp on float64, each of which IEEE 754
defines to the last bit. Two facts are used throughout:

- a product of two float64 whose significands have a and b bits, a + b <= 53, is exact;
- Taylor's remainder bounds the truncation, and each rounding of a Horner step is at most 2**-53 of that step.

Tests compare every bound below with arbitrary-precision arithmetic (tests/truth/test_elementary.py).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]

EXP_MIN, EXP_MAX = -746.0, 709.78
MAX_ANGLE = float(2**20)
BLOCK = 2**16  # numbers of which exp goes over its temporaries while they are in a core's cache

TO_INTEGER = 1.5 * 2.0**52
LOG2_E = float.fromhex("0x1.71547652b82fep+0")
LN2_HIGH = float.fromhex("0x1.62e42fep-1")  # ln 2 to 28 bits: k * LN2_HIGH is exact for |k| < 2**25
LN2_LOW = float.fromhex("0x1.f473de6af278fp-30")  # ln 2 - LN2_HIGH to 53 bits
SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")

TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
HALF_PI_HIGH = float.fromhex("0x1.921fb544p+0")  # pi/2 to 33 bits: n * HALF_PI_HIGH is exact for n < 2**20
HALF_PI_MIDDLE = float.fromhex("0x1.0b4611a6p-34")  # the next 33 bits
HALF_PI_LOW = float.fromhex("0x1.3198a2e037073p-69")  # the rest to 53 bits

EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(12, -1, -1))
SIN_TERMS = tuple((-1.0) ** n / math.factorial(2 * n + 1) for n in range(8, -1, -1))
COS_TERMS = tuple((-1.0) ** n / math.factorial(2 * n) for n in range(8, -1, -1))
ATANH_TERMS = tuple(1.0 / (2 * n + 1) for n in range(10, -1, -1))


def polynomial(terms: tuple[float, ...], x: Float64, out: Float64 | None = None) -> Float64:
    """Horner's rule, highest power first; two elementwise operations a term."""
    total = np.multiply(terms[0], x, out=out)
    total += terms[1]
    for term in terms[2:]:
        total *= x
        total += term
    return total


def exp(x: Float64) -> Float64:
    """e**x, float64 of any shape; relative error below 2**-50, absolute below 2**-1074 where the result is subnormal.

    x = k ln 2 + r with |r| < 0.3466; k LN2_HIGH is exact, so r is off by less than 2**-53 of itself plus 2**-71;
    Taylor to r**12 leaves 1.7e-16. A sum with 1.5 * 2**52 is rounded to an integer, ties to even, and ends in the bits
    of k (of NaN, in those of any number). Scaling by 2**k rounds only a subnormal result
    (on some systems' ldexp wrongly, but nothing in exact.py can tell subnormals from 0). Arguments are clipped to
    [EXP_MIN, EXP_MAX]: below, the result is 0; above it stays finite (softmax and SiLU can't tell). NaN stays NaN.
    """
    values = np.asarray(x, np.float64, order="C")
    powers = np.empty(values.shape)
    flat, result = values.reshape(-1), powers.reshape(-1)
    used = np.empty((2, min(BLOCK, values.size))), np.empty(min(BLOCK, values.size), np.int32)
    with np.errstate(under="ignore"):  # a caller's np.seterr(all="raise") is not meant
        for start in range(0, values.size, BLOCK):
            block = slice(start, start + BLOCK)
            exp_into(result[block], flat[block], *used)
    return powers


def exp_into(result: Float64, x: Float64, used: Float64, exponents: NDArray[np.int32]) -> None:
    """exp of x [n] into result [n], in memory that is used again: used [2, n or more], exponents [n or more]."""
    r, shifted, exponent = used[0, : len(x)], used[1, : len(x)], exponents[: len(x)]
    np.clip(x, EXP_MIN, EXP_MAX, out=r)
    np.multiply(r, LOG2_E, out=shifted)
    shifted += TO_INTEGER
    np.copyto(exponent, shifted.view(np.int64), casting="unsafe")  # the last 32 bits
    shifted -= TO_INTEGER  # k
    r -= np.multiply(shifted, LN2_HIGH, out=result)
    r -= np.multiply(shifted, LN2_LOW, out=result)
    np.ldexp(polynomial(EXP_TERMS, r, out=result), exponent, out=result)


def log(x: Float64) -> Float64:
    """Natural logarithm of normal positive float64; relative error below 2**-49 (also near 1, where the result is 0).

    x = m 2**e with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.1716, and the
    series to s**21 leaves less than 2**-60 of s; e LN2_HIGH is exact. For e != 0 the sum is at least 0.34.
    """
    m, e = np.frexp(np.asarray(x, np.float64))
    small = m < SQRT_HALF
    m = np.where(small, 2.0 * m, m)
    e = np.where(small, e - 1, e).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    log_m = 2.0 * s * polynomial(ATANH_TERMS, s * s)
    return e * LN2_HIGH + (e * LN2_LOW + log_m)


def cos_sin(x: Float32) -> tuple[Float64, Float64]:
    """Cosine and sine of float32 angles with |x| < 2**20; relative error below 2**-49; sin keeps the sign of zero.

    x = n pi/2 + r. n has at most 20 bits, so n times the first 33 bits of pi/2 is exact, and so is its difference to
    x (both are multiples of 2**-32, or n = 0). The next 33 bits likewise leave one rounding of r itself, the rest is
    below 2**-98. For float32 angles of that size |r| > 2**-28, so r is right to 2**-52. Taylor to r**17 (sin) and
    r**16 (cos) leaves less than 2**-58 for |r| <= pi/4.
    """
    angle = np.asarray(x, np.float32).astype(np.float64)
    n = np.rint(angle * TWO_OVER_PI)
    r = ((angle - n * HALF_PI_HIGH) - n * HALF_PI_MIDDLE) - n * HALF_PI_LOW
    square = r * r
    sine, cosine = r * polynomial(SIN_TERMS, square), polynomial(COS_TERMS, square)
    quadrant = n.astype(np.int64) & 3
    swap = (quadrant & 1) == 1
    cos = np.where(swap, sine, cosine)
    sin = np.where(swap, cosine, sine)
    cos = np.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    sin = np.where(quadrant >= 2, -sin, sin)
    return cos, np.where(angle == 0.0, angle, sin)
