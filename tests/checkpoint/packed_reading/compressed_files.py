"""A directory as llm-compressor writes it (compressed-tensors), made by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from builders import Stored, stored
from packed_values import Made, drawn_bits, float8, number, packed, quantised_model

from lfm2np.truth.config import ModelConfig

TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def weights(**changes: object) -> dict[str, Any]:
    """Of 4 bits in groups of 32, with what the package writes beside it."""
    args: dict[str, Any] = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "block_structure": None,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return args | changes


CHANNEL = {"strategy": "channel", "group_size": None}
TENSOR = {"strategy": "tensor", "group_size": None}
BLOCK = {"strategy": "block", "group_size": None, "block_structure": [24, 48]}
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int4-g32": ("pack-quantized", weights(), None),
    "int4-channel": ("pack-quantized", weights(**CHANNEL), None),
    "int4-g32-zero": ("pack-quantized", weights(symmetric=False), None),
    "int4-channel-zero": ("pack-quantized", weights(symmetric=False, **CHANNEL), None),
    "int4-g32-zero of ordered columns": ("pack-quantized", weights(symmetric=False, actorder="group"), None),
    "int8-g64": ("pack-quantized", weights(num_bits=8, group_size=64), None),
    "int8-g64-zero": ("pack-quantized", weights(num_bits=8, group_size=64, symmetric=False), None),
    "int8-channel": ("int-quantized", weights(num_bits=8, **CHANNEL), TOKEN),
    "int8-channel-zero": ("int-quantized", weights(num_bits=8, symmetric=False, **CHANNEL), TOKEN),
    "int8-tensor": ("naive-quantized", weights(num_bits=8, **TENSOR), None),
    "float8-tensor": ("float-quantized", weights(num_bits=8, type="float", **TENSOR), STATIC),
    "float8-channel": ("float-quantized", weights(num_bits=8, type="float", **CHANNEL), TOKEN | {"type": "float"}),
    "float8-block24x48": ("float-quantized", weights(num_bits=8, type="float", **BLOCK), None),
    "float8-g32": ("naive-quantized", weights(num_bits=8, type="float"), None),
}


def told(name: str, **changes: object) -> dict[str, object]:
    """The key of config.json, as the package writes it."""
    form, args, inputs = SCHEMES[name]
    scheme = {
        "targets": ["Linear"],
        "weights": args,
        "input_activations": inputs,
        "output_activations": None,
        "format": form,
    }
    settings: dict[str, object] = {
        "config_groups": {"group_0": scheme},
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": None,
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.13.0",
    }
    return {"quantization_config": settings | changes}


def quantised_matrix(module: str, shape: tuple[int, int], name: str, dtype: str, seed: int) -> Made:
    """Random codes, scales and zeros of a matrix, and its weights."""
    form, args, inputs = SCHEMES[name]
    random, (rows, columns), bits = np.random.default_rng(seed), shape, args["num_bits"]
    is_float, is_packed, strategy = args["type"] == "float", form == "pack-quantized", args["strategy"]
    codes = random.integers(0, 2**bits, shape)
    if is_float:
        codes[codes & 127 > 118] ^= 64
    high, wide = args["block_structure"] or (1, columns)
    size = args["group_size"] if strategy == "group" else wide
    scale_shape = (1 if strategy == "tensor" else -(-rows // high), -(-columns // size))
    scales = drawn_bits(random, dtype, scale_shape, (-10, -8) if bits == 8 else (-5, -3))
    zeros = random.integers(0, 2**bits, scale_shape) if not args["symmetric"] else np.full(scale_shape, 2 ** (bits - 1))
    groups = [column // size for column in range(columns)]
    if args["actorder"]:
        groups = random.permutation(groups).tolist()
    tensors: dict[str, Stored] = {
        "weight_scale": (dtype, (1,) if strategy == "tensor" else scale_shape, scales.tobytes())
    }
    if is_packed:
        words = packed(codes, bits).view("<i4")
        tensors["weight_packed"] = ("I32", words.shape, words.tobytes())
        tensors["weight_shape"] = ("I64", (2,), np.array(shape, "<i8").tobytes())
    elif is_float:
        tensors["weight"] = ("F8_E4M3", shape, codes.astype("u1").tobytes())
    else:
        tensors["weight"] = ("I8", shape, (codes - 128).astype("i1").tobytes())
    if not args["symmetric"]:
        if is_packed:
            words = packed(zeros.T, bits).T.copy()
            tensors["weight_zero_point"] = ("I32", words.shape, words.tobytes())
        else:
            tensors["weight_zero_point"] = ("I8", scale_shape, (zeros - 128).astype("i1").tobytes())
    if args["actorder"]:
        tensors["weight_g_idx"] = ("I32", (columns,), np.array(groups, "<i4").tobytes())
    if inputs is not None and not inputs["dynamic"]:
        tensors["input_scale"] = stored(np.array([0.25 + seed % 7], np.float32), "F32")

    def weight(row: int, column: int) -> Fraction:
        index = (0 if strategy == "tensor" else row // high), groups[column]
        scale, code = number(int(scales[index]), dtype), int(codes[row, column])
        return scale * (float8(code) if is_float else code - int(zeros[index]))

    exact = {f"{module}.weight": lambda: [[weight(row, column) for column in range(columns)] for row in range(rows)]}
    return {f"{module}.{part}": value for part, value in tensors.items()}, exact


def quantised_tensors(
    config: ModelConfig, name: str, dtype: str = "BF16", seed: int = 0, plain: tuple[str, ...] = ("embed_tokens",)
) -> Made:
    def quantised(module: str, shape: tuple[int, int], seed: int) -> Made:
        return quantised_matrix(module, shape, name, dtype, seed)

    return quantised_model(config, quantised, dtype, plain, seed)
