"""Quantised LFM3s of every writer: tensors, modules in settings and messages have the file's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import auto_files
import compressed_files
import mlx_files
import numpy as np
import pytest
import test_directories
from builders import Stored, stored
from mlx_files import config_of, write
from packed_values import in_files

import lfm2np
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.packed.rows import PackedRows
from lfm2np.checkpoint.tensors import input_roundings
from lfm2np.suite.strategies.tiny_models import TinyModel, raw_config
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors

PROMPT = [1, 7, 12, 3, 30, 21, 7, 7, 9]
SIZES: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 8, "hidden_size": 64, "feed_forward": 64}
SIZES |= {"lfm3": True, "vocab_size": 40}
MODELS = {
    "all kinds of layers": TinyModel(layers="cSAc", taps=7, **SIZES),
    "biases": TinyModel(layers="AcS", attention_bias=True, conv_bias=True, **SIZES),
    "no gate, no norms behind, untied": TinyModel(layers="SAc", gated=False, sandwich=False, tied=False, **SIZES),
}
RAW = raw_config(MODELS["all kinds of layers"])
GATE, OUT = "model.layers.1.self_attn.g_proj", "model.layers.2.self_attn.o_proj"  # of a window; of full attention
MLX = ("affine", 4, 32)
FORMS = ("affine-4bit-g32", "int4-g32", "float8-channel", "gptq-4bit-g32", "awq-4bit-g32")
every_form = pytest.mark.parametrize("name", FORMS)
Tensors = dict[str, Stored]


def made(name: str, config: ModelConfig) -> tuple[dict[str, Any], Tensors]:
    """Keys of config.json, and tensors under our names; of an untied head, too."""
    told, tensors, _ = test_directories.made(name, config)
    return compressed_files.told(name, ignore=[]) if name in compressed_files.SCHEMES else told, tensors


@pytest.mark.parametrize("gate", ["g_proj", "gate_proj"])  # names that files have for it
@pytest.mark.parametrize("model", MODELS)
@every_form
def test_each_tensor_of_a_quantised_lfm3_is_found_under_the_name_of_its_file(
    name: str, model: str, gate: str, tmp_path: Path
):
    """What its numbers are is the same as of an LFM2. The gate is a matrix as any; norms, taps and biases are plain."""
    raw = raw_config(MODELS[model])
    config = config_of(raw)
    quantization, tensors = made(name, config)
    path = write(tmp_path / "x", raw | quantization, in_files(tensors, gate))
    loaded = read_tensors(path, read_config(path))
    assert {key: value.shape for key, value in loaded.items()} == expected_tensors(config)
    for key, tensor in loaded.items():  # scales, or values, tell one from another
        parts = (key.removesuffix("weight") + part for part in ("scales", "weight_scale"))
        expected = next((tensors[part] for part in parts if part in tensors), None) or tensors[key]
        values = tensor.values.scales if isinstance(tensor.values, PackedRows) else tensor.values
        turned = tensor.dtype.startswith(("gptq", "awq"))
        assert (values.T if turned else values).tobytes() == expected[2], key
    packed = {key for key, tensor in loaded.items() if tensor.dtype == name}
    matrices = {key for key, shape in expected_tensors(config).items() if len(shape) == 2}
    plain = set() if name.startswith("affine") else {"model.embed_tokens.weight", "lm_head.weight"} - packed
    assert packed == matrices - plain
    assert input_roundings(path, config).keys() == (packed if name == "float8-channel" else set())


# --- settings name modules as the file or transformers does


def without(tensors: Tensors, module: str, shape: tuple[int, int]) -> Tensors:
    """With that module's weight as it was before it was quantised."""
    others = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{module}.")}
    return others | {f"{module}.weight": stored(np.full(shape, 0.125, np.float32), "BF16")}


@pytest.mark.parametrize("in_file", ["g_proj", "gate_proj"])
def test_a_gate_that_is_ignored_stays_as_it_is(in_file: str, tmp_path: Path):
    """llm-compressor names the module of transformers, while the file may have the name that was published."""
    module = GATE.replace("g_proj", in_file)
    one = without(in_files(made("int4-g32", config_of(RAW))[1], in_file), module, (8, 64))
    both = without(one, f"model.layers.2.self_attn.{in_file}", (8, 64))
    for target, tensors in ((module, one), (GATE, one), (f"re:.*self_attn.{in_file}$", both)):
        quantization = compressed_files.told("int4-g32", ignore=["lm_head", target])
        path = write(tmp_path / "x", RAW | quantization, tensors)
        assert read_tensors(path, read_config(path))[f"{GATE}.weight"].dtype == "BF16"


def test_settings_of_single_modules_in_mlx(tmp_path: Path):
    overrides = {"1.self_attn.g_proj": None, "2.self_attn.out_proj": ("affine", 8, 64)}
    tensors = in_files(mlx_files.quantised_tensors(config_of(RAW), MLX, others=overrides))
    quantization = mlx_files.told(*MLX, **{GATE: False, OUT: {"group_size": 64, "bits": 8}})
    path = write(tmp_path / "x", RAW | quantization, tensors)
    loaded = read_tensors(path, read_config(path))
    assert loaded[f"{GATE}.weight"].dtype == "BF16"
    assert loaded["model.layers.2.self_attn.out_proj.weight"].dtype == "affine-8bit-g64"
    quantization = mlx_files.told(*MLX, **{OUT.replace("o_proj", "out_proj"): False})
    with pytest.raises(lfm2np.ConfigError, match=r"self_attn\.out_proj'.*there is no such module in this model"):
        lfm2np.load(write(tmp_path / "x", RAW | quantization, tensors))


def test_an_output_projection_that_awq_must_not_convert(tmp_path: Path):
    settings = auto_files.awq(modules_to_not_convert=["o_proj"])
    tensors = in_files(made("awq-4bit-g32", config_of(RAW))[1])
    message = r"layers\.1\.self_attn\.o_proj\.qweight: expected none from modules_to_not_convert, which has 'o_proj'"
    with pytest.raises(lfm2np.CheckpointError, match=message):
        lfm2np.load(write(tmp_path / "x", RAW | settings, tensors))
    for layer in (1, 2):
        tensors = without(tensors, f"model.layers.{layer}.self_attn.o_proj", (64, 64))
    assert np.isfinite(lfm2np.load(write(tmp_path / "x", RAW | settings, tensors)).logits(PROMPT)).all()


# --- the language model of one that also sees

PREFIXES = ["model.language_model.", "language_model.model."]
VISION = "model.vision_tower.patch_embed"


def seeing(
    directory: Path, raw: dict[str, object], quantization: Mapping[str, Any], tensors: Tensors, prefix: str
) -> Path:
    text = {key: value for key, value in raw.items() if key != "architectures"}
    above = {"model_type": "lfm3_vl", "architectures": ["Lfm3VlForConditionalGeneration"], "text_config": text}
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    vision = {f"{VISION}.weight": stored(np.ones((3, 4), np.float32), "F32")}
    return write(directory, above | quantization, renamed | vision)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the language model alone")
@every_form
@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_language_model_of_one_that_sees_is_quantised_as_alone(prefix: str, name: str, tmp_path: Path):
    """Settings name modules with the file's prefix, and those of vision, which are left out."""
    quantization, tensors = made(name, config_of(RAW))
    module, key = f"{prefix}layers.1.self_attn.g_proj", "quantization_config"
    alone_told, seen_told = json.loads(json.dumps([quantization, quantization]))
    if name.startswith("affine"):
        alone_told, seen_told = (
            mlx_files.told(*MLX, **{GATE: False}),
            mlx_files.told(*MLX, **{module: False, VISION: False}),
        )
    elif name in compressed_files.SCHEMES:
        alone_told[key]["ignore"], seen_told[key]["ignore"] = [GATE], [module, "re:.*vision.*"]
    elif name.startswith("awq"):
        alone_told[key]["modules_to_not_convert"] = seen_told[key]["modules_to_not_convert"] = ["1.self_attn.g_proj"]
    tensors = without(in_files(tensors), GATE, (8, 64))
    alone = write(tmp_path / "alone", RAW | alone_told, tensors)
    seen = seeing(tmp_path / "seen", RAW, seen_told, tensors, prefix)
    config = read_config(seen)
    assert read_tensors(seen, config)[f"{GATE}.weight"].dtype == "BF16"
    assert lfm2np.load(seen).logits(PROMPT).tobytes() == lfm2np.load(alone).logits(PROMPT).tobytes()
    assert input_roundings(seen, config) == input_roundings(alone, config)


@pytest.mark.filterwarnings("ignore:.*the language model alone")
def test_settings_in_text_config_are_those_of_the_language_model(tmp_path: Path):
    quantization, tensors = made("int4-g32", config_of(RAW))
    path = seeing(tmp_path / "x", RAW | quantization, {}, in_files(tensors), PREFIXES[0])
    assert np.isfinite(lfm2np.load(path).logits(PROMPT)).all()


DAMAGE = [  # a tensor that is taken out, what stands there instead, and what is named
    ("affine-4bit-g32", f"{OUT}.scales", None, r"missing .*2\.self_attn\.o_proj\.scales, expected it from dtype U32"),
    (FORMS[0], f"{GATE}.biases", None, r"missing .*1\.self_attn\.g_proj\.biases, expected it from quantization"),
    ("int4-g32", f"{OUT}.weight_scale", None, r"missing .*2\.self_attn\.o_proj\.weight_scale, expected"),
    ("gptq-4bit-g32", f"{OUT}.qzeros", None, r"missing .*2\.self_attn\.o_proj\.qzeros, expected"),
    ("gptq-4bit-g32", f"{OUT}.qweight", f"{OUT}.qweight", r"2\.self_attn\.o_proj\.qweight: shape \(4, 64\)"),
    ("gptq-4bit-g32", f"{OUT}.qweight", OUT.replace("o_proj", "out_proj"), r"missing 1 of .*2\.self_attn\.o_proj\.we"),
]


@pytest.mark.parametrize(("name", "tensor", "instead", "message"), DAMAGE)
def test_damage_is_told_by_the_names_of_the_file(
    name: str, tensor: str, instead: str | None, message: str, tmp_path: Path
):
    quantization, tensors = made(name, config_of(RAW))
    tensors = in_files(tensors)
    dtype, shape, content = tensors.pop(tensor)
    if instead:
        tensors[instead] = (dtype, (shape[0] // 2, *shape[1:]), content[: len(content) // 2])
    with pytest.raises(lfm2np.CheckpointError, match=message):
        lfm2np.load(write(tmp_path / "x", RAW | quantization, tensors))
