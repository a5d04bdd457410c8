"""A directory as mlx-lm writes it, made by hand: so the tests need no package that writes one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from builders import Stored, raw_config, raw_mixture, safetensors_bytes
from packed_values import Made, drawn_bits, packed, quantised_model

from lfm2np.checkpoint.config_json import parse_config
from lfm2np.truth.config import ModelConfig

DENSE: dict[str, object] = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 40}
SPARSE: dict[str, object] = {**DENSE, "moe_intermediate_size": 64}
FORMS = [("affine", bits, 64 if bits == 6 else 32) for bits in (1, 2, 3, 4, 5, 6, 8)] + [
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]
SCALES = {"mxfp4": "F8_E8M0", "mxfp8": "F8_E8M0", "nvfp4": "F8_E4M3"}
RENAMED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def raw_of(mixture: bool, **changes: object) -> dict[str, object]:
    return raw_mixture(**(SPARSE | changes)) if mixture else raw_config(**(DENSE | changes))


def config_of(raw: Mapping[str, object]) -> ModelConfig:
    return parse_config({key: value for key, value in raw.items() if not key.startswith("quant")}, "config.json")


def told(mode: str, bits: int, size: int, **modules: object) -> dict[str, object]:
    """The keys of config.json: the second is the first again."""
    settings = {"group_size": size, "bits": bits, "mode": mode, **modules}
    return {"quantization": settings, "quantization_config": settings}


def their_name(name: str, config: ModelConfig) -> str:
    if config.mixture is None or ".feed_forward." not in name or name.split(".")[-2] not in RENAMED:
        return name
    parts = name.split(".")
    parts[-2] = RENAMED[parts[-2]]
    if "experts" in parts:
        at = parts.index("experts")
        parts[at : at + 2] = ["switch_mlp"]
    return ".".join(parts)


def stacked(parts: list[Stored]) -> Stored:
    dtype, shape, _ = parts[0]
    return dtype, (len(parts), *shape), b"".join(content for _, _, content in parts)


def quantised_matrix(
    name: str, shape: tuple[int, ...], form: tuple[str, int, int], dtype: str, seed: int, exponents: tuple[int, int]
) -> dict[str, Stored]:
    """Random codes, scales and biases under our names."""
    (mode, bits, size), random = form, np.random.default_rng(seed)
    rows, columns = shape
    codes = random.integers(0, 2**bits, shape)
    if mode == "mxfp8":
        codes[codes & 127 > 118] ^= 64  # no NaN, and nothing large
    words = packed(codes, bits)
    tensors: dict[str, Stored] = {name: ("U32", words.shape, words.tobytes())}
    kinds = ("scales", "biases") if mode == "affine" else ("scales",)
    for kind in kinds:
        drawn = drawn_bits(random, SCALES.get(mode, dtype), (rows, columns // size), exponents)
        stored_as = dtype if mode == "affine" else "U8"
        tensors[name.removesuffix("weight") + kind] = (stored_as, drawn.shape, drawn.tobytes())
    return tensors


def quantised_tensors(
    config: ModelConfig,
    form: tuple[str, int, int],
    dtype: str = "BF16",
    seed: int = 0,
    exponents: tuple[int, int] = (-7, -4),
    others: Mapping[str, tuple[str, int, int] | None] | None = None,
) -> dict[str, Stored]:
    """Every matrix quantised, all else random near 1; `others` by the end of a module's name in ours, None: plain."""
    ends = others or {}

    def quantised(module: str, shape: tuple[int, int], seed: int) -> Made:
        own = next((other for end, other in ends.items() if other and module.endswith(end)), form)
        return quantised_matrix(f"{module}.weight", shape, own, dtype, seed, exponents), {}

    plain = tuple(end for end, other in ends.items() if other is None)
    return theirs(quantised_model(config, quantised, dtype, plain, seed)[0], config)


def theirs(tensors: Mapping[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """Names of scales and biases, too."""
    by_name: dict[str, list[Stored]] = {}
    for name, (dtype, shape, content) in tensors.items():
        module, _, kind = name.rpartition(".")
        turned = (shape[0], shape[2], 1) if len(shape) == 3 else shape
        is_part = kind in ("weight", "scales", "biases")
        new = their_name(f"{module}.weight", config).removesuffix("weight") + kind if is_part else name
        by_name.setdefault(new, []).append((dtype, turned, content))
    return {name: stacked(parts) if ".switch_mlp." in name else parts[0] for name, parts in by_name.items()}


def write(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return directory
