"""The table of GGUF's types: their numbers in a file, their blocks, and the float64 values of quantised rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lfm2np.checkpoint.gguf import blocks
from lfm2np.checkpoint.gguf.blocks import Bytes, Float64, Parts

CHUNK = 2**20  # bytes looked at together: keeps temporaries small
LARGEST_EXPONENT = 252  # of MXFP4: 2**(252 - 127) * 6 is the largest power whose values are all float32


@dataclass(frozen=True)
class Quantised:
    """A format of blocks: `weights` numbers in `size` bytes; `halves` says where the float16 of a block stand."""

    number: int  # enum ggml_type
    weights: int
    size: int
    parts: Callable[[Bytes], Parts]
    halves: tuple[int, ...]


QUANTISED = {
    "Q4_0": Quantised(2, 32, 18, blocks.q4_0, (0,)),
    "Q4_1": Quantised(3, 32, 20, blocks.q4_1, (0, 2)),
    "Q5_0": Quantised(6, 32, 22, blocks.q5_0, (0,)),
    "Q5_1": Quantised(7, 32, 24, blocks.q5_1, (0, 2)),
    "Q8_0": Quantised(8, 32, 34, blocks.q8_0, (0,)),
    "Q2_K": Quantised(10, 256, 84, blocks.q2_k, (80, 82)),
    "Q3_K": Quantised(11, 256, 110, blocks.q3_k, (108,)),
    "Q4_K": Quantised(12, 256, 144, blocks.q4_k, (0, 2)),
    "Q5_K": Quantised(13, 256, 176, blocks.q5_k, (0, 2)),
    "Q6_K": Quantised(14, 256, 210, blocks.q6_k, (208,)),
    "IQ4_NL": Quantised(20, 32, 18, blocks.iq4_nl, (0,)),
    "IQ4_XS": Quantised(23, 256, 136, blocks.iq4_xs, (0,)),
    "MXFP4": Quantised(39, 32, 17, blocks.mxfp4, ()),
}
PLAIN = {"F32": 0, "F16": 1, "BF16": 30}
NUMBERS = PLAIN | {name: kind.number for name, kind in QUANTISED.items()}
OTHERS = {  # that llama.cpp has and this package does not read
    "Q8_1": 9,
    "Q8_K": 15,
    "IQ2_XXS": 16,
    "IQ2_XS": 17,
    "IQ3_XXS": 18,
    "IQ1_S": 19,
    "IQ3_S": 21,
    "IQ2_S": 22,
    "I8": 24,
    "I16": 25,
    "I32": 26,
    "I64": 27,
    "F64": 28,
    "IQ1_M": 29,
    "TQ1_0": 34,
    "TQ2_0": 35,
    "NVFP4": 40,
    "Q1_0": 41,
    "Q2_0": 42,
}


def values_of(rows: Bytes, name: str) -> Float64:
    """The weights of rows [..., bytes] in a format of QUANTISED: [..., weights]. Nothing rounds: see blocks.py."""
    kind = QUANTISED[name]
    scale, codes, minimum = kind.parts(np.ascontiguousarray(rows).reshape(-1, kind.size))
    grouped = codes.reshape(*scale.shape, -1)  # [n, groups, weights of a group]
    values: Float64 = grouped * scale[..., None]
    if minimum is not None:
        values -= minimum[..., None]
    return values.reshape(*rows.shape[:-1], rows.shape[-1] // kind.size * kind.weights)


def bad_scale(rows: Bytes, name: str) -> tuple[int, float] | None:
    """The first block, counted over rows [..., bytes], with a scale that is no number, and that scale; None if all are.

    Infinities and NaN of float16; of MXFP4 a power of two whose weights no float32 holds, or 255, which is its NaN.
    """
    kind = QUANTISED[name]
    blocks_of_rows = np.ascontiguousarray(rows).reshape(-1, kind.size)
    if name == "MXFP4":
        exponents = blocks_of_rows[:, 0].astype(np.int32)
        scales = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127))[:, None]
        bad = (exponents > LARGEST_EXPONENT)[:, None]
    else:
        scales = np.concatenate([blocks.half(blocks_of_rows, at) for at in kind.halves], axis=1)
        bad = ~np.isfinite(scales)
    if not bad.any():
        return None
    block, which = np.argwhere(bad)[0]
    return int(block), float(scales[block, which])


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Rows in a format of QUANTISED, indexed as an array is. blocks: uint8 [..., bytes], a view of the file."""

    dtype: str
    blocks: Bytes

    @property
    def shape(self) -> tuple[int, ...]:
        kind = QUANTISED[self.dtype]
        return (*self.blocks.shape[:-1], self.blocks.shape[-1] // kind.size * kind.weights)

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    @property
    def form(self) -> tuple[object, ...]:
        return (self.dtype, self.shape)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: Any) -> BlockRows:
        return replace(self, blocks=self.blocks[index])

    def arrays(self) -> Iterator[Bytes]:
        yield self.blocks

    def widened(self) -> Float64:
        return values_of(self.blocks, self.dtype)

    def problem(self) -> str | None:
        rows, size = self.blocks.reshape(-1, self.blocks.shape[-1]), QUANTISED[self.dtype].size
        step = max(1, CHUNK // rows.shape[1])
        for start in range(0, len(rows), step):
            if bad := bad_scale(rows[start : start + step], self.dtype):
                row, block = divmod(bad[0], rows.shape[1] // size)
                return f"the scale {bad[1]} in block {block} of row {start + row}"
        return None
