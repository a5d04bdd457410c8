"""Whole models of every writer and format: exact weights, float32 models of the same numbers, streamed, sparse."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import auto_files
import compressed_files
import mlx_files
import numpy as np
import pytest
from auto_files import awq, gptq
from builders import Stored, stored
from mlx_files import config_of, raw_of, write
from packed_values import fractions

import lfm2np
from lfm2np.arithmetic import NAMES
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.packed.rows import PackedRows
from lfm2np.checkpoint.stored import widen
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors

pytestmark = pytest.mark.slow

PROMPT = [1, 7, 12, 3, 30, 21]
OUT, KEYS = "model.layers.0.conv.out_proj.weight", "model.layers.1.self_attn.k_proj.weight"
AUTO = {
    "gptq-4bit-g32": gptq(),
    "gptq-4bit-g64": gptq(group_size=64, sym=True),
    "gptq-8bit-g32": gptq(bits=8, checkpoint_format="gptq_v2"),
    "gptq-4bit-channel": gptq(group_size=-1),
    "gptq-4bit-g16": gptq(group_size=16, desc_act=True, checkpoint_format="gptq_v2"),
    "awq-4bit-g32": awq(),
    "awq-4bit-channel": awq(group_size=-1),
}
BITS_OF = {form: f"{form[1]}bit-" if form[0] == "affine" else "" for form in mlx_files.FORMS}
MLX = {f"{form[0]}-{bits}g{form[2]}": form for form, bits in BITS_OF.items()}
FORMS = [*MLX, *compressed_files.SCHEMES, *AUTO]
BOTH = [(name, False) for name in FORMS]
BOTH += [(name, True) for name in ("affine-5bit-g32", "mxfp4-g32", "int4-g32-zero", "float8-tensor", "awq-4bit-g32")]
Exact = Callable[[], list[list[Fraction]]]


Made = tuple[dict[str, Any], dict[str, Stored], dict[str, Exact]]


def made(name: str, config: ModelConfig, dtype: str = "BF16") -> Made:
    """Keys of config.json, tensors, and what the numbers of matrices are; not of MLX, see test_packed_values.py."""
    if name in MLX:  # scales and biases of one size: weights that float32 holds
        tensors = mlx_files.quantised_tensors(config, MLX[name], dtype, seed=1, exponents=(-3, -2))
        return mlx_files.told(*MLX[name]), tensors, {}
    if name in AUTO:
        return AUTO[name], *auto_files.quantised_tensors(config, AUTO[name], seed=1)
    return compressed_files.told(name), *compressed_files.quantised_tensors(config, name, dtype, seed=1)


def written(directory: Path, name: str, mixture: bool = False, dtype: str = "BF16") -> tuple[Path, dict[str, Exact]]:
    raw = raw_of(mixture)
    told, tensors, expected = made(name, config_of(raw), dtype)
    return write(directory, raw | told, tensors), expected


@pytest.mark.parametrize(("name", "mixture"), BOTH)
def test_a_quantised_directory_is_its_model(name: str, mixture: bool, tmp_path: Path):
    """Every tensor is there, of our shape; the engine, the reference and streamed weights give one answer."""
    path, _ = written(tmp_path / "x", name, mixture)
    config = read_config(path)
    assert config == config_of(raw_of(mixture))
    tensors = read_tensors(path, config)
    assert {key: tensor.shape for key, tensor in tensors.items()} == expected_tensors(config)
    matrices = {key for key, tensor in tensors.items() if len(tensor.shape) == 2}
    plain = {key for key in matrices if name not in MLX and key.endswith(("embed_tokens.weight", "gate.weight"))}
    assert {tensors[key].dtype for key in matrices - plain} == {name.split()[0]}
    model = lfm2np.load(path)
    logits = model.logits(PROMPT)
    assert np.isfinite(logits).all() and np.ptp(logits) > 0
    assert lfm2np.load(path, weights="streamed").logits(PROMPT).tobytes() == logits.tobytes()
    assert 1 <= len(model.generate(PROMPT, max_tokens=3).token_ids) <= 3


WITH_DTYPES = [(name, "BF16") for name in (*compressed_files.SCHEMES, *AUTO)]


@pytest.mark.parametrize(("name", "dtype"), [*WITH_DTYPES, ("int4-g32-zero", "F16"), ("float8-tensor", "F32")])
def test_every_weight_is_exactly_what_its_format_says(name: str, dtype: str, tmp_path: Path):
    path, expected = written(tmp_path / "x", name, dtype=dtype)
    tensors = read_tensors(path, read_config(path))
    for key in (OUT, KEYS):
        assert fractions(widen(tensors[key].values, name)) == expected[key](), key


@pytest.mark.rounding
@pytest.mark.parametrize(
    "name", ["affine-4bit-g32", "mxfp4-g32", "mxfp8-g32", "nvfp4-g16", "int4-g32-zero", "float8-block24x48"]
)
def test_quantised_weights_are_float32_weights_of_the_same_values(name: str, tmp_path: Path):
    path, _ = written(tmp_path / "x", name)
    plain = {}
    for key, tensor in read_tensors(path, read_config(path)).items():
        values = widen(tensor.values, tensor.dtype)
        assert np.array_equal(values.astype(np.float32), values), key
        plain[key] = stored(values.astype(np.float32), "F32")
    same = write(tmp_path / "same", raw_of(False), plain)
    for numerics in NAMES:
        actual, expected = lfm2np.load(path, numerics), lfm2np.load(same, numerics)
        assert actual.logits(PROMPT).tobytes() == expected.logits(PROMPT).tobytes(), numerics


@pytest.mark.parametrize("name", ["affine-4bit-g32", "int8-g64-zero", "int8-channel-zero", "float8-block24x48"])
def test_codes_are_read_from_the_file_when_they_are_needed(name: str, tmp_path: Path):
    path, _ = written(tmp_path / "x", name)
    for tensor in read_tensors(path, read_config(path)).values():
        array = tensor.values.codes if isinstance(tensor.values, PackedRows) else tensor.values
        assert not array.flags.owndata and not array.flags.writeable
