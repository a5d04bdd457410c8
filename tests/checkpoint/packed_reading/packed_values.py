"""Numbers of quantised tensors by Python's integers and fractions, and rows packed bit by bit.

Written after the definitions (mlx.core.quantize, compressed-tensors' `pack_to_int32`, OCP's 8-bit and 4-bit floats),
not after the code that is tested.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np
from builders import Stored, stored

from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors

FORMATS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4", "F8_E4M3": "u1", "F8_E8M0": "u1"}
FP4 = tuple(Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12))
Rows = Sequence[Sequence[int]]
Exact = Callable[[], list[list[Fraction]]]  # when they are asked for: fractions take their time
Made = tuple[dict[str, Stored], dict[str, Exact]]  # tensors by name, and what the numbers of a weight are


def fractions(values: np.ndarray) -> list[list[Fraction]]:
    assert values.dtype == np.float64
    return [[Fraction(value) for value in row] for row in values.tolist()]


def float8(byte: int) -> Fraction:
    """1 sign, 4 of exponent, 3 of fraction; NaN is the caller's to avoid."""
    sign, exponent, fraction = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * Fraction(fraction, 8) / 64
    return sign * (1 + Fraction(fraction, 8)) * Fraction(2) ** (exponent - 7)


def float4(code: int) -> Fraction:
    return -FP4[code - 8] if code > 7 else FP4[code]


def number(bits: int, dtype: str) -> Fraction:
    """Of a scale or a bias."""
    if dtype == "F8_E8M0":
        return Fraction(2) ** (bits - 127)
    if dtype == "F8_E4M3":
        return float8(bits)
    if dtype == "F16":
        return Fraction(struct.unpack("<e", struct.pack("<H", bits))[0])
    return Fraction(struct.unpack("<f", struct.pack("<I", bits << 16 if dtype == "BF16" else bits))[0])


def packed(rows: Rows | np.ndarray, width: int) -> np.ndarray:
    """[rows, words] uint32: each row's codes one behind the other from the lowest bit of its first word on."""
    codes = np.asarray(rows)
    bits = (codes[:, :, None] >> np.arange(width) & 1).reshape(len(codes), -1)
    filled = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 32)))
    return np.packbits(filled.astype(np.uint8), axis=1, bitorder="little").view("<u4")


def grouped(of_groups: Sequence[Fraction], columns: int) -> list[Fraction]:
    """The number of each column's group."""
    return [of_groups[column * len(of_groups) // columns] for column in range(columns)]


def drawn_bits(
    random: np.random.Generator, dtype: str, shape: tuple[int, ...], exponents: tuple[int, int]
) -> np.ndarray:
    """Bits of numbers of either sign, of sizes from 2**exponents[0] up to below 2**exponents[1]."""
    if dtype == "F8_E8M0":
        return random.integers(127 + exponents[0], 127 + exponents[1], shape).astype("u1")
    values = np.ldexp(random.uniform(1.0, 2.0, shape), random.integers(*exponents, shape)) * random.choice(
        [-1, 1], shape
    )
    if dtype == "F8_E4M3":
        return random.integers(8 * (7 + exponents[0]), 8 * (7 + exponents[1]), shape).clip(0, 126).astype("u1")
    if dtype == "F16":
        return values.astype("<f2").view("<u2")
    bits = values.astype("<f4").view("<u4")
    return bits if dtype == "F32" else (bits >> 16).astype("<u2")


def quantised_model(
    config: ModelConfig,
    quantised: Callable[[str, tuple[int, int], int], Made],
    dtype: str,
    plain: tuple[str, ...],
    seed: int,
) -> Made:
    """Every matrix but those of modules that end so, by `quantised(module, shape, seed)`; all else random near 1."""
    tensors: dict[str, Stored] = {}
    expected: dict[str, Exact] = {}
    random = np.random.default_rng(seed)
    for key, shape in expected_tensors(config).items():
        module = key.removesuffix(".weight")
        if len(shape) == 2 and not module.endswith(plain):
            part, exact = quantised(module, shape, int(random.integers(2**31)))
            tensors, expected = tensors | part, expected | exact
        else:
            size = 0.1 if len(shape) == 2 or "bias" in key else 1.0
            tensors[key] = stored(random.normal(size == 1.0, 0.1, shape).astype(np.float32), dtype)
    return tensors, expected


def as_stored(bits: np.ndarray, dtype: str) -> np.ndarray:
    """As stored.DTYPES has it."""
    return bits.view({"F16": "<f2", "F32": "<f4"}.get(dtype, bits.dtype.str))


def called(name: str, gate: str = "g_proj") -> str:
    """As transformers names an LFM3's modules, not taken from the code that is tested."""
    theirs = {"out_proj": "o_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm", "g_proj": gate}
    for ours, name_in_file in theirs.items():
        name = name.replace(f"self_attn.{ours}.", f"self_attn.{name_in_file}.")
    return name


def in_files(tensors: Mapping[str, Stored], gate: str = "g_proj") -> dict[str, Stored]:
    return {called(name, gate): tensor for name, tensor in tensors.items()}
