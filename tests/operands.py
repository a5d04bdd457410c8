"""Operands that break careless sums, and arithmetic on them by Python's integers: shared by the tests of exact.py."""

from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from lfm2np.arithmetic import grids
from lfm2np.arithmetic.ieee import round_to_bfloat16
from lfm2np.arithmetic.matrix import Matrix

LARGEST_WIDTH = 11776
LONGEST_CONTEXT = 262_144


def float32_of(value: Fraction) -> np.float32:
    """Correct rounding of a fraction to float32, by integers only (ties to even)."""
    if value == 0:
        return np.float32(0.0)
    sign, value = (-1, -value) if value < 0 else (1, value)
    exponent = max(value.numerator.bit_length() - value.denominator.bit_length(), -126)
    while value < Fraction(2) ** exponent and exponent > -126:
        exponent -= 1
    if value >= Fraction(2) ** (exponent + 1):
        exponent += 1
    units = value / Fraction(2) ** (exponent - 23)
    whole, rest = divmod(units.numerator, units.denominator)
    twice = 2 * rest - units.denominator
    whole += 1 if twice > 0 or (twice == 0 and whole % 2) else 0
    with np.errstate(over="ignore"):
        return np.float32(sign * float(Fraction(whole) * Fraction(2) ** (exponent - 23)))


def integer_dot(x: np.ndarray, w: np.ndarray) -> Fraction:
    """sum x*w of float64 vectors in arbitrary precision: integers of 53 bits, their products shifted to one unit."""
    (left, of_left), (right, of_right) = mantissas(x), mantissas(w)
    exponents = of_left + of_right
    least = int(exponents.min())
    terms = zip(left.tolist(), right.tolist(), (exponents - least).tolist(), strict=True)
    return Fraction(sum(a * b << shift for a, b, shift in terms)) * Fraction(2) ** least


def mantissas(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers and exponents of two that float64 values are the products of."""
    fractions, exponents = np.frexp(x.astype(np.float64))
    return np.ldexp(fractions, 53).astype(np.int64), exponents.astype(np.int64) - 53


def adversarial(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """float32 operands of the magnitudes that break careless sums."""
    normal = rng.normal(size=shape)
    values = {
        "normal": normal,
        "wide": normal * np.exp2(rng.integers(-40, 40, shape)),
        "outlier": np.where(rng.random(shape) < 0.02, normal * 2.0**12, normal),
        "constant": np.full(shape, 1.9999999),
        "alternating": np.where(np.indices(shape).sum(0) % 2 == 0, 1.9999999, -1.9999998),
        "zeros": np.where(rng.random(shape) < 0.9, 0.0, normal),
        "negative zeros": np.full(shape, -0.0),
        "subnormal": normal * 2.0**-140,
        "huge": normal * 2.0**60,
        "powers": np.sign(normal) * 2.0 ** int(rng.integers(-3, 4)),  # sums and ties that are powers of two
    }[kind]
    return values.astype(np.float32)


KINDS = (
    *("normal", "wide", "outlier", "constant", "alternating", "zeros", "negative zeros", "subnormal", "huge"),
    "powers",
)
FORMS = ("bfloat16", "nearly bfloat16", "float32", "quantised")
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**32 - 1)


def stored_as(rng: np.random.Generator, shape: tuple[int, ...], kind: str, form: str) -> np.ndarray:
    """Weights of bfloat16, one of them with one bit more, of float32, or quantised: float64, a row's up to 63 bits."""
    if form == "quantised":
        bits = int(rng.integers(1, 52))
        shift = rng.integers(0, int(rng.integers(1, 13)), shape) - int(rng.integers(0, 60))
        return np.ldexp(rng.integers(-(2**bits), 2**bits, shape).astype(np.float64), shift)
    weight = adversarial(rng, shape, kind)
    if form == "float32":
        return weight
    short = round_to_bfloat16(weight)
    if form != "bfloat16":
        short.reshape(-1).view(np.uint32)[rng.integers(short.size)] ^= np.uint32(1 << rng.integers(16))
    return short


def rounded_operands(x: np.ndarray, matrix: Matrix) -> np.ndarray:
    assert matrix.grid is not None
    return grids.round_to_grid(np.ldexp(x.astype(np.float64), matrix.grid.columns), matrix.grid.activation_bits)


def expected_products(x: np.ndarray, matrix: Matrix) -> np.ndarray:
    """What `linear` has to give for x [T, inputs], by integers: slices summed exactly, added in float64, rounded."""
    assert matrix.grid is not None
    outputs = len(matrix.values) // matrix.grid.slices
    result = np.empty((len(x), outputs), np.float32)
    for t, operand in enumerate(rounded_operands(x, matrix)):
        sums = [integer_dot(operand, row) for row in matrix.values]
        for o in range(outputs):
            total = sum(float(part) for part in sums[o::outputs])
            assert matrix.grid.slices > 1 or Fraction(total) == sums[o], "one slice is not rounded at all"
            result[t, o] = float32_of(Fraction(total))
    return result


class StartsWithTheFirstProduct(np.ndarray):
    """A legitimate BLAS: it adds nothing to the first product, so a sum of -0 stays -0."""

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        plain = np.asarray(self)
        first, rest = x[..., :1] * plain[..., :1, :], x[..., 1:] @ plain[..., 1:, :]
        return np.where(rest == 0.0, first, first + rest)
