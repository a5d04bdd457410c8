"""Random numbers with the same bits on every machine.

`numpy.random.Generator` may change its streams between versions of NumPy, and the logarithms that it and NumPy compute
differ by machine in the last bit. Here the bits come from PCG64 and SeedSequence, whose streams NumPy keeps (NEP 19),
and all else is IEEE 754's addition, subtraction, multiplication, division and square root, one ufunc each, which round
correctly everywhere, in an order that is written out. Guaranteed: the same seed and stream give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.commands.simulate.traffic import NANOSECONDS

Floats = NDArray[np.float64]

BLOCK = 4096  # numbers drawn at once, always as many: a longer trace begins with the shorter
LN_2_HIGH, LN_2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10  # fdlibm's: k * LN_2_HIGH is exact
ATANH_TERMS = 13  # 2 * 0.1716**27 / 27 is below 1e-21
EXP_TERMS = 14  # 0.3466**15 / 15! is below 1e-19


def log(x: Floats) -> Floats:
    """Natural logarithm of positive numbers, within a few units in the last place."""
    fraction, exponent = np.frexp(x)  # exact
    below = fraction < math.sqrt(0.5)
    fraction, exponent = np.where(below, 2 * fraction, fraction), exponent - below
    ratio = (fraction - 1) / (fraction + 1)
    square, total = ratio * ratio, np.zeros_like(ratio)
    for term in range(ATANH_TERMS - 1, -1, -1):
        total = total * square + 1 / (2 * term + 1)
    logarithm: Floats = exponent * LN_2_HIGH + (exponent * LN_2_LOW + 2 * ratio * total)
    return logarithm


def exp(x: Floats) -> Floats:
    """e to numbers between -700 and 700, within a few units in the last place."""
    power = np.rint(x * (1 / (LN_2_HIGH + LN_2_LOW)))
    rest = (x - power * LN_2_HIGH) - power * LN_2_LOW
    total = np.ones_like(rest)
    for term in range(EXP_TERMS, 0, -1):
        total = 1 + rest * total / term
    return np.ldexp(total, power.astype(np.int32))


# Wichura's rational approximations of the normal quantile (Applied Statistics 1988, AS 241, PPND16), 1e-16 accurate.
CENTRAL = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457, 13731.693765509461125,
     1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852545925, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867, 5394.1960214247511077,
     687.1870074920579083, 42.313330701600911252, 1.0),
)  # fmt: skip
MIDDLE = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
     3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
     0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)  # fmt: skip
FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386, 0.026532189526576123093,
     0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4,
     0.0148753612908506148525, 0.13692988092273580531, 0.59983220655588793769, 1.0),
)  # fmt: skip


def rational(coefficients: tuple[tuple[float, ...], ...], x: Floats) -> Floats:
    """A quotient of two polynomials, the highest power first, by Horner's rule."""
    over, under = (np.zeros_like(x) for _ in range(2))
    for above, below in zip(*coefficients, strict=True):
        over, under = over * x + above, under * x + below
    return over / under


def normal_quantile(probability: Floats) -> Floats:
    centred = probability - 0.5
    central = centred * rational(CENTRAL, 0.180625 - centred * centred)
    depth = np.sqrt(-log(np.minimum(probability, 1 - probability)))
    tail = np.where(depth <= 5, rational(MIDDLE, depth - 1.6), rational(FAR, depth - 5))
    return np.where(np.abs(centred) <= 0.425, central, np.where(centred < 0, -tail, tail))


class Draws:
    """One stream of a seed; streams of other names are independent of it."""

    def __init__(self, seed: int, stream: str) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=tuple(stream.encode())))

    def uniform(self, size: int = BLOCK) -> Floats:
        """Odd multiples of 2**-53 between 0 and 1, which are none of these."""
        return ((self._bits.random_raw(size) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def exponential(self, size: int = BLOCK) -> Floats:
        return -log(self.uniform(size))

    def normal(self, size: int = BLOCK) -> Floats:
        return normal_quantile(self.uniform(size))

    def gamma(self, shape: float, size: int = BLOCK) -> Floats:
        """Of mean `shape`, by Marsaglia and Tsang's method (ACM TOMS 2000); a shape below 1 by one power more."""
        if shape < 1:
            return self.gamma(shape + 1, size) * exp(np.maximum(log(self.uniform(size)) / shape, -700.0))
        accepted = np.empty(0)
        while len(accepted) < size:
            accepted = np.concatenate([accepted, self._gamma_candidates(shape)])
        return accepted[:size]

    def _gamma_candidates(self, shape: float) -> Floats:
        scale = shape - 1 / 3
        normal, uniform = self.normal(), self.uniform()
        root = 1 + normal * (1 / math.sqrt(9 * scale))
        cube = np.where(root > 0, root * root * root, 1.0)
        accepted = (root > 0) & (log(uniform) < 0.5 * normal * normal + scale * (1 - cube + log(cube)))
        return scale * cube[accepted]


def each(draw: Callable[[], NDArray[Any]]) -> Iterator[Any]:
    """The numbers of block after block, for ever, as Python's."""
    while True:
        yield from draw().tolist()


def time_blocks(seconds: Callable[[], Floats]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """From blocks of gaps: when the block begins, and nanoseconds from there to each gap's end."""
    begin = 0
    while True:
        block = np.cumsum(np.rint(seconds() * NANOSECONDS).astype(np.int64))
        yield begin, block
        begin += int(block[-1])


def times(seconds: Callable[[], Floats]) -> Iterator[int]:
    """The ends of all gaps, in nanoseconds."""
    for begin, block in time_blocks(seconds):
        yield from (begin + at for at in block.tolist())
