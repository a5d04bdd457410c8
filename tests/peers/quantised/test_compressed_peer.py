"""compressed-tensors against the package of its authors: its compressors write, it and we read.

It runs where the package is installed (`pip install compressed-tensors`), which the extra `peers` has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

import lfm2np
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.names import in_file
from lfm2np.checkpoint.packed.compressed import InputRounding
from lfm2np.checkpoint.stored import widen
from lfm2np.checkpoint.tensors import input_roundings, open_checkpoint

pytestmark = pytest.mark.peers

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINED = FIXTURES / "trained"
either = pytest.mark.parametrize("fixture", ["trained", "lfm3"])
GROUP = {"strategy": "group", "group_size": 32}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "W4A16": ("pack-quantized", {"weights": {"num_bits": 4, **GROUP}}),
    "W4A16_ASYM": ("pack-quantized", {"weights": {"num_bits": 4, "symmetric": False, **GROUP}}),
    "W8A16": ("pack-quantized", {"weights": {"num_bits": 8, "strategy": "channel"}}),
    "W8A16_ASYM": ("pack-quantized", {"weights": {"num_bits": 8, "symmetric": False, "strategy": "channel"}}),
    "W8A8": ("int-quantized", {}),
    "W8A8_ASYM": (
        "int-quantized",
        {"weights": {"num_bits": 8, "symmetric": False, "strategy": "channel"}, "input_activations": {"num_bits": 8}},
    ),
    "FP8": ("float-quantized", {}),
    "FP8_DYNAMIC": ("float-quantized", {}),
    "FP8_BLOCK": ("float-quantized", {}),
    "naive": ("naive-quantized", {"weights": {"num_bits": 8, "strategy": "tensor"}}),
}


def scheme_of(name: str) -> QuantizationScheme:
    form, arguments = FORMS[name]
    scheme = QuantizationScheme(targets=["Linear"], **(arguments or PRESET_SCHEMES[name]))
    scheme.format = form
    return scheme


def least_and_largest(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of what shares a scale, as the package's observers give it."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "block":
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        blocks = padded.reshape(-(-rows // high), high, -(-columns // wide), wide)
        return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    grouped = weight.reshape(rows, -1, args.group_size if args.strategy == "group" else columns)
    return grouped.amin(-1), grouped.amax(-1)


def compressed(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors that the package stores of a matrix, and what it makes of them."""
    scheme = scheme_of(name)
    scale, zero = calculate_qparams(*least_and_largest(weight, scheme.weights), scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(FORMS[name][0])
    packed = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    return packed, compressor.decompress(packed, scheme)["weight"]


def quantised(directory: Path, name: str, dtype: torch.dtype, fixture: str = "trained") -> dict[str, torch.Tensor]:
    """A directory of a trained fixture whose Linears the package has quantised; its weights by our names."""
    config = load_config(FIXTURES / fixture)
    file_name = in_file if config.model_type == "lfm3" else str
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    scheme, ignored = scheme_of(name), ["lm_head"]
    for key, stored in open_checkpoint(FIXTURES / fixture, config).items():
        weight = torch.from_numpy(np.asarray(widen(stored.values, stored.dtype))).to(dtype)
        module = file_name(key).removesuffix(".weight")
        is_narrow = name == "W4A16_ASYM" and len(weight) < 8  # whose zeros the package packs, but cannot unpack
        if weight.ndim != 2 or "embed" in key or is_narrow:
            ignored += [module] if is_narrow and weight.ndim == 2 else []
            tensors[file_name(key)] = weight
            continue
        packed, expected[key] = compressed(name, weight)
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in packed.items()}
        if scheme.input_activations is not None and not scheme.input_activations.dynamic:
            tensors[f"{module}.input_scale"] = torch.tensor([0.125], dtype=dtype)
    directory.mkdir()
    save_file(tensors, str(directory / "model.safetensors"))
    raw = json.loads((FIXTURES / fixture / "config.json").read_text())
    raw["quantization_config"] = {
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "quant_method": "compressed-tensors",
        "format": FORMS[name][0],
        "quantization_status": "compressed",
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
    (directory / "config.json").write_text(json.dumps(raw))
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
@either
def test_weights_are_the_package_s_before_its_rounding(fixture: str, name: str, dtype: torch.dtype, tmp_path: Path):
    """It multiplies in the type of the scale: there the product is rounded once."""
    expected = quantised(tmp_path / "x", name, dtype, fixture)
    config = read_config(tmp_path / "x")
    tensors = read_tensors(tmp_path / "x", config)
    plain = {key for key, value in tensors.items() if len(value.shape) == 2 and not value.is_quantised}
    assert all("embed" in key or tensors[key].shape[0] < 8 for key in plain)
    assert expected.keys() == {key for key, value in tensors.items() if value.is_quantised}
    for key, theirs in expected.items():
        ours = widen(tensors[key].values, tensors[key].dtype)
        assert torch.equal(torch.from_numpy(ours).to(theirs.dtype), theirs), key


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("W4A16", None),
        ("W8A8", InputRounding("int8", "token", 0, None, 0, True)),
        ("FP8", InputRounding("float8", "tensor", 0, 0.125, 0, True)),
        ("FP8_DYNAMIC", InputRounding("float8", "token", 0, None, 0, True)),
        ("FP8_BLOCK", InputRounding("float8", "group", 128, None, 0, True)),
    ],
)
def test_inputs_are_rounded_as_the_package_s_presets_say(name: str, expected: InputRounding | None, tmp_path: Path):
    quantised(tmp_path / "x", name, torch.bfloat16)
    roundings = input_roundings(tmp_path / "x", read_config(tmp_path / "x"))
    assert set(roundings.values()) == ({expected} if expected else set())


def test_awq_is_what_the_package_s_converter_makes_of_it(tmp_path: Path):
    """Its order of outputs, by another hand."""
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    from lfm2np.truth.layers import expected_tensors

    config, random = load_config(TRAINED), np.random.default_rng(1)
    tensors: dict[str, torch.Tensor] = {}
    for key, stored in open_checkpoint(TRAINED, config).items():
        if len(stored.shape) != 2 or "embed" in key:
            tensors[key] = torch.from_numpy(np.asarray(widen(stored.values, stored.dtype))).to(torch.float16)
            continue
        (rows, columns), module = expected_tensors(config)[key], key.removesuffix(".weight")
        for part, shape in (("qweight", (columns, rows // 8)), ("qzeros", (columns // 32, rows // 8))):
            tensors[f"{module}.{part}"] = torch.from_numpy(random.integers(-(2**31), 2**31, shape).astype(np.int32))
        scales = random.normal(0.0, 0.01, (columns // 32, rows)).astype(np.float16)
        tensors[f"{module}.scales"] = torch.from_numpy(scales)
    save_file(tensors, str(tmp_path / "model.safetensors"))
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    raw = json.loads((TRAINED / "config.json").read_text()) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    loaded = read_tensors(tmp_path, read_config(tmp_path))
    converted = AutoAWQConverter(group_size=32).process(dict(tensors))
    scheme = scheme_of("W4A16_ASYM")
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    for key, stored in loaded.items():
        if stored.dtype == "awq-4bit-g32":
            module = key.removesuffix(".weight")
            parts = {part.removeprefix(f"{module}."): value for part, value in converted.items() if module in part}
            theirs = compressor.decompress(parts, scheme)["weight"]
            ours = torch.from_numpy(widen(stored.values, stored.dtype))
            assert theirs.dtype == torch.float16 and torch.equal(ours.to(torch.float16), theirs), key
    assert (
        sum(tensor.dtype == "awq-4bit-g32" for tensor in loaded.values())
        == sum(len(tensor.shape) == 2 for tensor in loaded.values()) - 1
    )


def with_scales(network: torch.nn.Module) -> torch.nn.Module:
    """Observed from the weights; static scales of inputs are one number."""
    for module in network.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            scale, zero = calculate_qparams(*least_and_largest(module.weight.data, scheme.weights), scheme.weights)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.0625)
            module.quantization_status = QuantizationStatus.FROZEN
    return network


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W8A8", "FP8", "FP8_BLOCK"])
def test_a_directory_that_the_package_saves_is_the_model(name: str, tmp_path: Path):
    """Its own config.json, and transformers' names."""
    path = str(tmp_path / "x")
    network = transformers.AutoModelForCausalLM.from_pretrained(str(TRAINED), dtype=torch.bfloat16)
    apply_quantization_config(network, QuantizationConfig(config_groups={name: ["Linear"]}, ignore=["lm_head"]))
    compressor = ModelCompressor.from_pretrained_model(with_scales(network))
    compressor.compress_model(network)
    network.save_pretrained(path)
    compressor.update_config(path)
    ids = lfm2np.load().prompt_ids("copy: tivu zo sa ->")
    expected, actual = lfm2np.load().logits(ids), lfm2np.load(path).logits(ids)
    assert np.corrcoef(expected.ravel(), actual.ravel())[0, 1] > (0.99 if name.startswith("W4") else 0.999)
    assert bool(input_roundings(Path(path), read_config(Path(path)))) == (not name.startswith("W4"))
