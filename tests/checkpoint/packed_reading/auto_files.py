"""Directories as AutoGPTQ and AutoAWQ write them, made by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from builders import Stored
from packed_values import Made, drawn_bits, number, packed, quantised_model

from lfm2np.truth.config import ModelConfig

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output stands at each place of a word


def gptq(**changes: object) -> dict[str, Any]:
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": False,
        "damp_percent": 0.01,
    }
    return {"quantization_config": quantization | changes}


def awq(**changes: object) -> dict[str, Any]:
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return {"quantization_config": quantization | changes}


def quantised_matrix(module: str, shape: tuple[int, int], settings: dict[str, Any], seed: int) -> Made:
    """Random codes, scales and zeros of a matrix, and its weights."""
    quantization, random, (rows, columns) = settings["quantization_config"], np.random.default_rng(seed), shape
    bits, method, size = (
        quantization["bits"],
        quantization["quant_method"],
        max(quantization["group_size"], 0) or columns,
    )
    codes = random.integers(0, 2**bits, shape)
    offset = 1 if method == "gptq" and quantization.get("checkpoint_format", "gptq") == "gptq" else 0
    zeros = random.integers(offset, 2**bits, (rows, columns // size))
    if quantization.get("sym"):
        zeros[:] = 2 ** (bits - 1)
    scales = drawn_bits(random, "F16", (columns // size, rows), (-10, -8) if bits == 8 else (-5, -3))
    groups = [column // size for column in range(columns)]
    if quantization.get("desc_act"):
        groups = random.permutation(groups).tolist()
    tensors: dict[str, Stored] = {"scales": ("F16", scales.shape, scales.tobytes())}
    if method == "gptq":
        words, zero_words = packed(codes, bits).T, packed((zeros - offset).T, bits)
        tensors["g_idx"] = ("I32", (columns,), np.array(groups, "<i4").tobytes())
    else:
        words, zero_words = (packed(mixed(array.T), bits) for array in (codes, zeros))
    tensors["qweight"] = ("I32", words.shape, np.ascontiguousarray(words).tobytes())
    tensors["qzeros"] = ("I32", zero_words.shape, np.ascontiguousarray(zero_words).tobytes())

    def weight(row: int, column: int) -> Fraction:
        group = groups[column]
        return number(int(scales[group, row]), "F16") * (int(codes[row, column]) - int(zeros[row, group]))

    exact = {f"{module}.weight": lambda: [[weight(row, column) for column in range(columns)] for row in range(rows)]}
    return {f"{module}.{part}": value for part, value in tensors.items()}, exact


def mixed(outputs_last: np.ndarray) -> np.ndarray:
    """Eights of outputs in AWQ's order."""
    eights = outputs_last.reshape(len(outputs_last), -1, 8)
    return np.stack([eights[:, :, place] for place in AWQ_ORDER], axis=-1).reshape(outputs_last.shape)


def quantised_tensors(config: ModelConfig, settings: dict[str, Any], seed: int = 0) -> Made:
    """Every matrix but the embedding and routers."""

    def quantised(module: str, shape: tuple[int, int], seed: int) -> Made:
        return quantised_matrix(module, shape, settings, seed)

    return quantised_model(config, quantised, "F16", ("embed_tokens", "gate"), seed)
