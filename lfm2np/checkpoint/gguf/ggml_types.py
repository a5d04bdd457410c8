"""GGUF's types: their numbers in a file, their blocks, and the float64 values of quantised rows, by the extra `gguf`.

Every format says that a weight is  scale * code - minimum  with an integer code; the package `gguf`, of llama.cpp's
authors, knows which. It computes in float32, in which only the difference is rounded:

    a float16 is an integer of 11 bits times a power of two. A scale of a superblock is one times an integer of at most
    8 bits, and times a code of at most 5 (Q6_K), or 6 and 7 bits (IQ4_XS): at most 24 bits, as float32 holds.
    MXFP4 is a power of two times an integer up to 12.

So of formats with minima the package decodes blocks whose minima are zero, and they are subtracted here, in float64,
which is exact: both are multiples of 2**-24, as the least subnormal of float16 is, and below 2**27 (Q5_K:
2**16 * (63 * 31 + 63)), 51 bits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.stored import QuantisedRows
from lfm2np.errors import CheckpointError

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
CHUNK = 2**20  # bytes looked at together: keeps temporaries small
LARGEST_EXPONENT = 252  # of MXFP4: 2**(252 - 127) * 6 is the largest power whose values are all float32
ZERO, NEGATIVE_ZERO = np.zeros(2, np.uint8), np.array([0, 0x80], np.uint8)  # float16


@dataclass(frozen=True)
class Quantised:
    """A format of blocks: `weights` numbers in `size` bytes.

    halves      where the float16 of a block stand; of two the first is the scale's, the second the minimum's
    no_minimum  the zero that changes nothing in its place, subtracted or, in Q4_1 and Q5_1, added
    others      where other numbers of several bytes stand: begin and end
    """

    number: int  # enum ggml_type
    weights: int
    size: int
    halves: tuple[int, ...]
    no_minimum: Bytes | None = None
    others: tuple[tuple[int, int], ...] = ()


QUANTISED = {
    "Q4_0": Quantised(2, 32, 18, (0,)),
    "Q4_1": Quantised(3, 32, 20, (0, 2), NEGATIVE_ZERO),
    "Q5_0": Quantised(6, 32, 22, (0,), others=((2, 6),)),
    "Q5_1": Quantised(7, 32, 24, (0, 2), NEGATIVE_ZERO, ((4, 8),)),
    "Q8_0": Quantised(8, 32, 34, (0,)),
    "Q2_K": Quantised(10, 256, 84, (80, 82), ZERO),
    "Q3_K": Quantised(11, 256, 110, (108,)),
    "Q4_K": Quantised(12, 256, 144, (0, 2), ZERO),
    "Q5_K": Quantised(13, 256, 176, (0, 2), ZERO),
    "Q6_K": Quantised(14, 256, 210, (208,)),
    "IQ4_NL": Quantised(20, 32, 18, (0,)),
    "IQ4_XS": Quantised(23, 256, 136, (0,), others=((2, 4),)),
    "MXFP4": Quantised(39, 32, 17, ()),
}
NUMBERS = {"F32": 0, "F16": 1, "BF16": 30, **{name: kind.number for name, kind in QUANTISED.items()}}


def package(what: str) -> Any:
    """The package `gguf`; CheckpointError names what needs it, and the extra that brings it."""
    try:
        import gguf  # here, as only quantised GGUF files need it
    except ImportError as problem:
        raise CheckpointError(f"{what} needs the extra `gguf`, pip install 'lfm2np[gguf]': {problem}") from None
    return gguf


def half(blocks: Bytes, at: int) -> Float64:
    """The float16 in two bytes of each block: [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float64)


def minima_of(blocks: Bytes, name: str) -> Float64:
    """Of blocks in a format with minima, that of each group: [n, groups]."""
    minimum = half(blocks, QUANTISED[name].halves[1])
    if name in ("Q4_1", "Q5_1"):
        return -minimum
    if name == "Q2_K":
        return minimum * (blocks[:, :16] >> 4)
    codes: Bytes = package(name).quants.Q4_K.get_scale_min(blocks[:, 4:16])[1]  # of Q5_K, too
    return minimum * codes


def values_of(rows: Bytes, name: str) -> Float64:
    """The weights of rows [..., bytes] in a format of QUANTISED: [..., weights]. Nothing rounds: see above."""
    kind = QUANTISED[name]
    blocks = np.ascontiguousarray(rows).reshape(-1, kind.size)
    shape = (*rows.shape[:-1], rows.shape[-1] // kind.size * kind.weights)
    if kind.no_minimum is None:
        return dequantised(blocks, name).astype(np.float64).reshape(shape)
    scaled, minima, at = blocks.copy(), minima_of(blocks, name), kind.halves[1]
    scaled[:, at : at + 2] = kind.no_minimum
    values = dequantised(scaled, name).astype(np.float64).reshape(*minima.shape, -1)
    values -= minima[..., None]
    return values.reshape(shape)


def dequantised(blocks: Bytes, name: str) -> Float32:
    """As one row, [1, weights]: the package takes few rows at a time. It reads numbers in the machine's order."""
    gguf, kind = package(name), QUANTISED[name]
    if sys.byteorder == "big":
        blocks = blocks.copy()
        for begin, end in (*((at, at + 2) for at in kind.halves), *kind.others):
            blocks[:, begin:end] = blocks[:, begin:end][:, ::-1].copy()
    values: Float32 = gguf.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[name])
    return values


@dataclass(frozen=True, eq=False)
class BlockRows(QuantisedRows):
    """Rows in a format of QUANTISED. blocks: uint8 [..., bytes], a view of the file."""

    dtype: str
    blocks: Bytes

    @property
    def shape(self) -> tuple[int, ...]:
        kind = QUANTISED[self.dtype]
        return (*self.blocks.shape[:-1], self.blocks.shape[-1] // kind.size * kind.weights)

    def widened(self) -> Float64:
        return values_of(self.blocks, self.dtype)

    def problem(self) -> str | None:
        """Scales that are infinite or NaN; of MXFP4 a power of two whose weights no float32 holds, or 255, its NaN."""
        rows, kind = self.blocks.reshape(-1, self.blocks.shape[-1]), QUANTISED[self.dtype]
        step = max(1, CHUNK // rows.shape[1])
        for start in range(0, len(rows), step):
            blocks = np.ascontiguousarray(rows[start : start + step]).reshape(-1, kind.size)
            if self.dtype == "MXFP4":
                exponents = blocks[:, :1].astype(np.int32)
                scales = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127))
                bad = exponents > LARGEST_EXPONENT
            else:
                scales = np.concatenate([half(blocks, at) for at in kind.halves], axis=1)
                bad = ~np.isfinite(scales)
            for number, which in np.argwhere(bad)[:1].tolist():
                row, block = divmod(number, rows.shape[1] // kind.size)
                return f"the scale {scales[number, which]} in block {block} of row {start + row}"
        return None
