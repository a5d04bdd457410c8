"""Quantised LFM3s of every writer: tensors, modules in settings and messages have the file's names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import auto_files
import compressed_files
import mlx_files
import numpy as np
import pytest
from builders import Stored, stored
from mlx_files import write

import lfm2np
from lfm2np.checkpoint.config_json import load_config, parse_config
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.packed.rows import PackedRows
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.tensors import input_roundings, open_checkpoint
from lfm2np.commands.cli import main
from lfm2np.suite.strategies.tiny_models import TinyModel, raw_config
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors

TOP = Path(__file__).parents[3]
FIXTURES = [TOP / "fixtures" / "lfm3", *sorted((TOP / "fixtures" / "torture").glob("lfm3_*"))]
PROMPT = [1, 7, 12, 3, 30, 21, 7, 7, 9]
SIZES: dict[str, Any] = {
    "lfm3": True,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 8,
    "hidden_size": 64,
    "feed_forward": 64,
    "vocab_size": 40,
}
MODELS = {
    "all kinds of layers": TinyModel(layers="cSAc", taps=7, **SIZES),
    "biases": TinyModel(layers="AcS", attention_bias=True, conv_bias=True, **SIZES),
    "no gate, no norms behind, untied": TinyModel(layers="SAc", gated=False, sandwich=False, tied=False, **SIZES),
}
ALL = MODELS["all kinds of layers"]
GATE, OUT = "model.layers.1.self_attn.g_proj", "model.layers.2.self_attn.o_proj"  # of a window; of full attention
FILES = Mapping[str, Stored]


def config_of(raw: Mapping[str, object]) -> ModelConfig:
    return parse_config({key: value for key, value in raw.items() if not key.startswith("quant")}, "config.json")


def called(name: str, gate: str = "g_proj") -> str:
    """As transformers names an LFM3's modules, not taken from the code that is tested."""
    theirs = {"out_proj": "o_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm", "g_proj": gate}
    for ours, name_in_file in theirs.items():
        name = name.replace(f"self_attn.{ours}.", f"self_attn.{name_in_file}.")
    return name


def in_files(tensors: FILES, gate: str = "g_proj") -> dict[str, Stored]:
    return {called(name, gate): tensor for name, tensor in tensors.items()}


def mlx(config: ModelConfig, form: tuple[str, int, int]) -> tuple[dict[str, object], dict[str, Stored]]:
    return mlx_files.told(*form), mlx_files.quantised_tensors(config, form, seed=2, exponents=(-3, -2))


def compressed(config: ModelConfig, name: str) -> tuple[dict[str, object], dict[str, Stored]]:
    return compressed_files.told(name, ignore=[]), compressed_files.quantised_tensors(config, name, seed=2)[0]


def auto(config: ModelConfig, settings: dict[str, Any]) -> tuple[dict[str, object], dict[str, Stored]]:
    return settings, auto_files.quantised_tensors(config, settings, seed=2)[0]


FORMS: dict[str, tuple[Callable[..., Any], Any]] = {
    "affine-4bit-g32": (mlx, ("affine", 4, 32)),
    "affine-6bit-g64": (mlx, ("affine", 6, 64)),
    "mxfp4-g32": (mlx, ("mxfp4", 4, 32)),
    "int4-g32": (compressed, "int4-g32"),
    "int4-channel-zero": (compressed, "int4-channel-zero"),
    "float8-channel": (compressed, "float8-channel"),
    "gptq-4bit-g32": (auto, auto_files.gptq()),
    "awq-4bit-g32": (auto, auto_files.awq()),
}


def stored_part(tensor: StoredTensor) -> np.ndarray:
    """What tells one tensor from another: its scales, or its values, as the file has them."""
    values = tensor.values.scales if isinstance(tensor.values, PackedRows) else tensor.values
    return values.T if tensor.dtype.startswith(("gptq", "awq")) else values


@pytest.mark.parametrize("gate", ["g_proj", "gate_proj"])  # names that files have for it
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", FORMS)
def test_each_tensor_of_a_quantised_lfm3_is_found_under_the_name_of_its_file(
    name: str, model: str, gate: str, tmp_path: Path
):
    """What its numbers are is the same as of an LFM2. The gate is a matrix as any; norms, taps and biases are plain."""
    raw, (make, settings) = raw_config(MODELS[model]), FORMS[name]
    config = config_of(raw)
    quantization, tensors = make(config, settings)
    path = write(tmp_path / "x", raw | quantization, in_files(tensors, gate))
    loaded = read_tensors(path, read_config(path))
    assert {key: value.shape for key, value in loaded.items()} == expected_tensors(config)
    for key, tensor in loaded.items():
        parts = (key.removesuffix("weight") + part for part in ("scales", "weight_scale"))
        expected = next((tensors[part] for part in parts if part in tensors), None) or tensors[key]
        assert stored_part(tensor).tobytes() == expected[2], key
    packed = {key for key, tensor in loaded.items() if tensor.dtype == name}
    matrices = {key for key, shape in expected_tensors(config).items() if len(shape) == 2}
    plain = set() if make is mlx else {"model.embed_tokens.weight", "lm_head.weight"} - packed
    assert packed == matrices - plain


@pytest.mark.parametrize("name", FORMS)
def test_a_quantised_lfm3_runs(name: str, tmp_path: Path):
    raw, (make, settings) = raw_config(ALL), FORMS[name]
    quantization, tensors = make(config_of(raw), settings)
    path = write(tmp_path / "x", raw | quantization, in_files(tensors))
    logits = lfm2np.load(path).logits(PROMPT)
    assert lfm2np.load(path, weights="streamed").logits(PROMPT).tobytes() == logits.tobytes()
    assert main(["info", "--model", str(path)]) == 0


@pytest.mark.parametrize("directory", FIXTURES, ids=lambda path: path.name)
def test_the_numbers_of_a_fixture_with_taps_as_mlx_has_them_give_its_logits(directory: Path, tmp_path: Path):
    config, tensors = load_config(directory), {}
    for key, value in open_checkpoint(directory, config).items():
        values = value.array.swapaxes(1, 2) if len(value.shape) == 3 else value.array
        tensors[called(key)] = (value.dtype, values.shape, np.ascontiguousarray(values).tobytes())
    path = write(tmp_path / "x", json.loads((directory / "config.json").read_text()), tensors)
    prompt = [token % config.vocab_size for token in PROMPT]
    assert lfm2np.load(path).logits(prompt).tobytes() == lfm2np.load(directory).logits(prompt).tobytes()


# --- settings name modules as the file or transformers does


def without(tensors: dict[str, Stored], module: str, shape: tuple[int, int]) -> dict[str, Stored]:
    """With that module's weight as it was before it was quantised."""
    ours = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{module}.")}
    return ours | {f"{module}.weight": stored(np.full(shape, 0.125, np.float32), "BF16")}


@pytest.mark.parametrize("in_settings", ["g_proj", "gate_proj"])
def test_a_gate_that_is_ignored_stays_as_it_is(in_settings: str, tmp_path: Path):
    """llm-compressor names the module of transformers, while the file may have the name that was published."""
    raw = raw_config(ALL)
    tensors = without(
        in_files(compressed(config_of(raw), "int4-g32")[1], in_settings), GATE.replace("g_proj", in_settings), (8, 64)
    )
    for target in (f"re:.*self_attn.{in_settings}$", GATE.replace("g_proj", in_settings)):
        quantization = compressed_files.told("int4-g32", ignore=["lm_head", target])
        kept = tensors
        if target.startswith("re:"):
            kept = without(tensors, f"model.layers.2.self_attn.{in_settings}", (8, 64))
        path = write(tmp_path / "x", raw | quantization, kept)
        assert read_tensors(path, read_config(path))[f"{GATE}.weight"].dtype == "BF16"
    renamed = {key.replace("g_proj", "gate_proj"): tensor for key, tensor in tensors.items()}
    quantization = compressed_files.told("int4-g32", ignore=[GATE])
    path = write(tmp_path / "x", raw | quantization, renamed)
    assert read_tensors(path, read_config(path))[f"{GATE}.weight"].dtype == "BF16"


def test_a_scheme_may_be_that_of_one_output_projection(tmp_path: Path):
    """By o_proj, the file's name, where ours is out_proj."""
    raw = raw_config(ALL)
    config = config_of(raw)
    quantization, tensors = compressed(config, "int4-g32")
    groups = quantization["quantization_config"]["config_groups"]  # type: ignore[index]
    groups["group_0"]["targets"] = ["re:.*o_proj$"]
    kept = {}
    for name, shape in expected_tensors(config).items():
        is_other = len(shape) == 2 and not name.endswith("self_attn.out_proj.weight")
        module = name.removesuffix("weight")
        parts = {key: tensor for key, tensor in tensors.items() if key.startswith(module)}
        kept |= {name: stored(np.full(shape, 0.125, np.float32), "BF16")} if is_other else parts
    path = write(tmp_path / "x", raw | quantization, in_files(kept))
    packed = {key for key, tensor in read_tensors(path, read_config(path)).items() if tensor.dtype == "int4-g32"}
    assert packed == {f"model.layers.{layer}.self_attn.out_proj.weight" for layer in (1, 2)}


def test_settings_of_single_modules_in_mlx(tmp_path: Path):
    raw = raw_config(ALL)
    overrides = {"1.self_attn.g_proj": None, "2.self_attn.out_proj": ("affine", 8, 64)}
    tensors = in_files(mlx_files.quantised_tensors(config_of(raw), ("affine", 4, 32), others=overrides))
    quantization = mlx_files.told("affine", 4, 32, **{GATE: False, OUT: {"group_size": 64, "bits": 8}})
    path = write(tmp_path / "x", raw | quantization, tensors)
    loaded = read_tensors(path, read_config(path))
    assert loaded[f"{GATE}.weight"].dtype == "BF16"
    assert loaded[f"{OUT}.weight".replace("o_proj", "out_proj")].dtype == "affine-8bit-g64"
    quantization = mlx_files.told("affine", 4, 32, **{OUT.replace("o_proj", "out_proj"): False})
    with pytest.raises(lfm2np.ConfigError, match=r"self_attn\.out_proj'.*there is no such module in this model"):
        lfm2np.load(write(tmp_path / "x", raw | quantization, tensors))


def test_an_output_projection_that_awq_must_not_convert(tmp_path: Path):
    raw = raw_config(ALL)
    settings = auto_files.awq(modules_to_not_convert=["o_proj"])
    tensors = in_files(auto(config_of(raw), settings)[1])
    message = r"layers\.1\.self_attn\.o_proj\.qweight: expected none from modules_to_not_convert, which has 'o_proj'"
    with pytest.raises(lfm2np.CheckpointError, match=message):
        lfm2np.load(write(tmp_path / "x", raw | settings, tensors))
    for layer in (1, 2):
        tensors = without(tensors, f"model.layers.{layer}.self_attn.o_proj", (64, 64))
    assert np.isfinite(lfm2np.load(write(tmp_path / "x", raw | settings, tensors)).logits(PROMPT)).all()


def test_inputs_of_every_product_are_rounded_as_told(tmp_path: Path):
    raw = raw_config(ALL)
    config = config_of(raw)
    quantization, tensors = compressed(config, "float8-channel")
    path = write(tmp_path / "x", raw | quantization, in_files(tensors))
    matrices = {key for key, shape in expected_tensors(config).items() if len(shape) == 2}
    assert input_roundings(path, config).keys() == matrices - {"model.embed_tokens.weight"}


# --- the language model of one that also sees

PREFIXES = ["model.language_model.", "language_model.model."]


def seeing(
    directory: Path, raw: dict[str, object], quantization: Mapping[str, Any], tensors: FILES, prefix: str
) -> Path:
    vision = {"model.vision_tower.patch_embed.weight": stored(np.ones((3, 4), np.float32), "F32")}
    text = {key: value for key, value in raw.items() if key != "architectures"}
    above = {
        "model_type": "lfm3_vl",
        "architectures": ["Lfm3VlForConditionalGeneration"],
        "text_config": text,
        **quantization,
    }
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return write(directory, above, renamed | vision)


@pytest.mark.filterwarnings("ignore:.*the language model alone")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_language_model_of_one_that_sees_is_quantised_as_alone(prefix: str, name: str, tmp_path: Path):
    """Settings name modules with the file's prefix, and those of vision, which are left out."""
    raw, (make, settings) = raw_config(ALL), FORMS[name]
    quantization, tensors = make(config_of(raw), settings)
    module = f"{prefix}layers.1.self_attn.g_proj"
    vision, key = "model.vision_tower.patch_embed", "quantization_config"
    alone_told, seen_told = json.loads(json.dumps([quantization, quantization]))
    if make is mlx:
        for name_of_gate, one in ((GATE, alone_told), (module, seen_told)):
            one["quantization"][name_of_gate] = one[key][name_of_gate] = False
        seen_told["quantization"][vision] = seen_told[key][vision] = False
    elif make is compressed:
        alone_told[key]["ignore"], seen_told[key]["ignore"] = [GATE], [module, "re:.*vision.*"]
    elif settings[key]["quant_method"] == "awq":
        alone_told[key]["modules_to_not_convert"] = seen_told[key]["modules_to_not_convert"] = ["1.self_attn.g_proj"]
    tensors = without(in_files(tensors), GATE, (8, 64))
    alone = write(tmp_path / "alone", raw | alone_told, tensors)
    seen = seeing(tmp_path / "seen", raw, seen_told, tensors, prefix)
    assert read_tensors(seen, read_config(seen))[f"{GATE}.weight"].dtype == "BF16"
    assert lfm2np.load(seen).logits(PROMPT).tobytes() == lfm2np.load(alone).logits(PROMPT).tobytes()
    config = read_config(seen)
    assert input_roundings(seen, config) == input_roundings(alone, config)


@pytest.mark.filterwarnings("ignore:.*the language model alone")
def test_settings_in_text_config_are_those_of_the_language_model(tmp_path: Path):
    raw = raw_config(ALL)
    quantization, tensors = compressed(config_of(raw), "int4-g32")
    path = seeing(tmp_path / "x", raw | quantization, {}, in_files(tensors), PREFIXES[0])
    assert np.isfinite(lfm2np.load(path).logits(PROMPT)).all()


DAMAGE: dict[str, tuple[str, str, str | None, str]] = {
    "mlx: no scales": (
        "affine-4bit-g32",
        f"{OUT}.scales",
        None,
        r"missing .*2\.self_attn\.o_proj\.scales, expected it from dtype U32",
    ),
    "mlx: no biases": (
        "affine-4bit-g32",
        f"{GATE}.biases",
        None,
        r"missing .*1\.self_attn\.g_proj\.biases, expected it from quantization\.mode",
    ),
    "compressed: no scales": (
        "int4-g32",
        f"{OUT}.weight_scale",
        None,
        r"missing .*2\.self_attn\.o_proj\.weight_scale, expected",
    ),
    "gptq: no zeros": ("gptq-4bit-g32", f"{OUT}.qzeros", None, r"missing .*2\.self_attn\.o_proj\.qzeros, expected"),
    "gptq: half of a shape": (
        "gptq-4bit-g32",
        f"{OUT}.qweight",
        "shape",
        r"2\.self_attn\.o_proj\.qweight: shape \(4, 64\)",
    ),
    "gptq: a name of LFM2": (
        "gptq-4bit-g32",
        f"{OUT}.qweight",
        "ours",
        r"missing 1 of .*2\.self_attn\.o_proj\.weight",
    ),
}


@pytest.mark.parametrize(("name", "tensor", "how", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_told_by_the_names_of_the_file(name: str, tensor: str, how: str | None, message: str, tmp_path: Path):
    raw, (make, settings) = raw_config(ALL), FORMS[name]
    quantization, tensors = make(config_of(raw), settings)
    tensors = in_files(tensors)
    dtype, shape, content = tensors.pop(tensor)
    if how == "shape":
        tensors[tensor] = (dtype, (shape[0] // 2, *shape[1:]), content[: len(content) // 2])
    elif how == "ours":
        tensors[tensor.replace("o_proj", "out_proj")] = (dtype, shape, content)
    with pytest.raises(lfm2np.CheckpointError, match=message):
        lfm2np.load(write(tmp_path / "x", raw | quantization, tensors))
