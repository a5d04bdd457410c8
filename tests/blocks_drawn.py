"""Blocks to try, drawn by Hypothesis, and whole models of random ones; all of them of finite scales."""

from __future__ import annotations

import struct

import numpy as np
from gguf_file import Tensor, model_tensors
from hypothesis import strategies as st

from lfm2np.checkpoint.gguf.ggml_types import LARGEST_EXPONENT, QUANTISED, Bytes
from lfm2np.truth.config import ModelConfig

# Of float16: zeros, the least and largest subnormal, the least normal, one, the largest; each of either sign.
HALVES = [0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF]
EDGES = [sign | bits for sign in (0x0000, 0x8000) for bits in HALVES]
finite_halves = st.integers(0, 0x7BFF) | st.integers(0x8000, 0xFBFF) | st.sampled_from(EDGES)


@st.composite
def blocks(draw: st.DrawFn, name: str) -> bytes:
    """One block; all of its other bits may be 0 or 1."""
    kind = QUANTISED[name]
    content = bytearray(
        draw(
            st.binary(min_size=kind.size, max_size=kind.size)
            | st.sampled_from([0, 255]).map(lambda b: bytes([b]) * kind.size)
        )
    )
    for at in kind.halves:
        struct.pack_into("<H", content, at, draw(finite_halves))
    if name == "MXFP4":
        content[0] = draw(st.integers(0, LARGEST_EXPONENT) | st.sampled_from([0, 1, LARGEST_EXPONENT]))
    return bytes(content)


def random_rows(name: str, shape: tuple[int, int], seed: int, exponents: tuple[int, int] = (1, 30)) -> Bytes:
    """Rows of weights [outputs, inputs] as bytes: random codes, scales of random float16 with these exponent fields."""
    kind, random = QUANTISED[name], np.random.default_rng(seed)
    block_rows = random.integers(0, 256, (shape[0] * shape[1] // kind.weights, kind.size), np.uint8)
    for at in kind.halves:
        halves = (
            random.integers(*exponents, len(block_rows)) << 10 | random.integers(0, 2**16, len(block_rows)) & 0x83FF
        )
        block_rows[:, at : at + 2] = halves.astype("<u2")[:, None].view(np.uint8)
    if name == "MXFP4":
        block_rows[:, 0] = 127 + random.integers(*exponents, len(block_rows)) - 15
    return block_rows.reshape(shape[0], -1)


def quantised_tensors(
    config: ModelConfig, dtype: str, seed: int = 0, exponents: tuple[int, int] = (8, 11)
) -> dict[str, Tensor]:
    """Random blocks for every matrix, random float32 near 1 for all else; routers are float32 as llama.cpp has them."""
    random = np.random.default_rng(seed)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor_seed = int(random.integers(2**31))
        if len(shape) == 2 and "gate.weight" not in name and dtype in QUANTISED:
            return Tensor(dtype, shape, random_rows(dtype, shape, tensor_seed, exponents).tobytes())
        values = np.random.default_rng(tensor_seed).normal(0.0 if "gate" in name else 1.0, 0.1, shape)
        return Tensor("F32", shape, values.astype("<f4").tobytes())

    return model_tensors(config, made)
