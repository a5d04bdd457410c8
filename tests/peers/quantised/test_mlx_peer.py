"""Directories of mlx-lm against mlx and mlx-lm: values of every mode, and what mlx_lm.convert writes of our fixtures.

They run with an interpreter that has both (`pip install mlx[cpu] mlx-lm`, Linux or macOS): the extra `peers` has not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lfm2np
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.packed.rows import PackedRows
from lfm2np.checkpoint.stored import StoredTensor

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install mlx[cpu] mlx-lm")
mlx_lm = pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install mlx[cpu] mlx-lm")

pytestmark = pytest.mark.peers

FIXTURES = Path(__file__).parents[3] / "fixtures"
TEXT = "copy: tivu zo sa ->"
DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
WIDTHS = (1, 2, 3, 4, 5, 6, 8)
ONE_FORM = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def bits_of(array: Any) -> np.ndarray:
    """As the file has it."""
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16))
    return np.array(array)


def in_float32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_affine_weights_are_mlx_s_before_its_last_rounding(dtype: str, width: int, size: int):
    """Scales and biases of 16 bits as float32: then mlx rounds once, the sum. Of float32 it rounds the product, too."""
    random = np.random.default_rng(width * size)
    drawn = mx.array(random.normal(size=(7, 512)).astype(np.float32)).astype(DTYPES[dtype])
    words, scales, biases = mx.quantize(drawn, group_size=size, bits=width)
    ours = PackedRows(f"{width} bits", 512, np.array(words), bits_of(scales), dtype, biases=bits_of(biases)).widened()
    wide = (array.astype(mx.float32) for array in (scales, biases))
    theirs = np.array(mx.dequantize(words, *wide, group_size=size, bits=width))
    if dtype == "F32":
        assert np.allclose(in_float32(ours), theirs, rtol=0, atol=2.0**-22)
    else:
        assert np.array_equal(in_float32(ours), theirs)


@pytest.mark.parametrize("mode", ONE_FORM)
def test_weights_of_other_modes_are_mlx_s_exactly(mode: str):
    """Every scale but 255, which mlx takes for infinity and we refuse, with every code: their product is a float32."""
    width, size = ONE_FORM[mode]
    scales = np.arange(256 if mode == "nvfp4" else 255, dtype=np.uint8)
    codes = np.resize(np.arange(256, dtype=np.uint8), (len(scales), 256))
    words = np.ascontiguousarray(codes[:, : 128 * width // 8]).view("<u4")
    columns = words.shape[1] * 32 // width
    grouped = np.repeat(scales[:, None], columns // size, axis=1)
    coding, dtype = "float8" if width == 8 else "float4", "F8_E4M3" if mode == "nvfp4" else "F8_E8M0"
    ours = PackedRows(coding, columns, words, grouped, dtype).widened()
    theirs = np.array(
        mx.dequantize(mx.array(words), mx.array(grouped), group_size=size, bits=width, mode=mode, dtype=mx.float32)
    )
    with np.errstate(over="ignore"):
        assert np.array_equal(in_float32(ours), theirs, equal_nan=True)


def converted(path: Path, name: str, **settings: object) -> Path:
    mlx_lm.convert(str(FIXTURES / name), str(path), **settings)
    return path


def theirs(path: Path) -> dict[str, np.ndarray]:
    """What mlx-lm makes of a directory, dequantised in float32 by mlx, by our names."""
    network, _ = mlx_lm.load(str(path))
    weights = {}
    for name, module in network.named_modules():
        if "scales" in module:
            parts = [module[key].astype(mx.float32) for key in ("scales", "biases") if module.get(key) is not None]
            if module.mode != "affine":
                parts = [module["scales"]]
            weights[name] = np.array(
                mx.dequantize(
                    module["weight"],
                    *parts,
                    group_size=module.group_size,
                    bits=module.bits,
                    mode=module.mode,
                    dtype=mx.float32,
                )
            )
        elif "weight" in module:
            weights[name] = np.array(module["weight"].astype(mx.float32))
    return weights


PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def of_mlx(name: str, weights: dict[str, np.ndarray]) -> np.ndarray | None:
    module = name.removesuffix(".weight")
    if module in weights:
        return weights[module]
    prefix, _, part = module.rpartition(".")
    if ".experts." in prefix:
        prefix, _, expert = prefix.rpartition(".experts.")
        return weights[f"{prefix}.switch_mlp.{PARTS[part]}"][int(expert)]
    return weights.get(f"{prefix}.{PARTS.get(part, part)}")


FORMS: list[dict[str, object]] = [
    {},
    {"quantize": True, "q_bits": 4, "q_group_size": 32},
    {"quantize": True, "q_bits": 8, "q_group_size": 64},
    {"quantize": True, "q_bits": 3, "q_group_size": 32, "dtype": "float16"},
    {"quantize": True, "q_bits": 5, "q_group_size": 32},
    {"quantize": True, "q_bits": 6, "q_group_size": 128, "dtype": "float16"},
    {"quantize": True, "q_mode": "mxfp4"},
    {"quantize": True, "q_mode": "mxfp8"},
    {"quantize": True, "q_mode": "nvfp4"},
]
MIXED: dict[str, object] = {"quantize": True, "quant_predicate": "mixed_4_6", "q_group_size": 32}


@pytest.mark.parametrize(
    ("name", "form"), [*((name, form) for name in ("trained", "moe") for form in FORMS), ("moe", MIXED)], ids=str
)
def test_a_converted_fixture_is_read_tensor_by_tensor_as_mlx_lm_does(
    name: str, form: dict[str, object], tmp_path: Path
):
    path = converted(tmp_path / "x", name, **form)
    tensors, weights = read_tensors(path, read_config(path)), theirs(path)
    compared = 0
    for key, tensor in tensors.items():
        other = of_mlx(key, weights)
        if other is not None:
            ours = in_float32(np.asarray(widened(tensor)))
            other = other.swapaxes(1, 2) if other.ndim == 3 else other
            assert np.array_equal(ours, other), key
            compared += 1
    assert compared >= len(tensors) - 4  # biases of experts have no weight


def widened(tensor: StoredTensor) -> np.ndarray:
    from lfm2np.checkpoint.stored import widen

    return widen(tensor.values, tensor.dtype)


@pytest.mark.parametrize("form", [FORMS[1], FORMS[5], FORMS[6]], ids=str)
def test_mlx_lm_in_float32_is_as_near_as_float32_is(form: dict[str, object], tmp_path: Path):
    """Its network with these weights, its scales widened: no dequantisation of ours has part in it."""
    path = converted(tmp_path / "x", "trained", **{**form, "dtype": "float32"})
    ids = lfm2np.load().prompt_ids(TEXT)
    network, _ = mlx_lm.load(str(path))
    theirs = np.array(network(mx.array([ids])).astype(mx.float32))[0]
    exact = lfm2np.load(path).logits(ids)
    assert np.abs(theirs - exact).max() < 1e-3 * np.abs(exact).max()
