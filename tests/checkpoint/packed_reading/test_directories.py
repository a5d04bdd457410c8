"""Whole models of every writer and format: exact weights, float32 models of the same numbers, streamed, sparse, tied;
which modules are quantised and how, and what is told of the rounding of inputs."""

from __future__ import annotations

import json
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
from mlx_files import config_of, raw_of, theirs, write
from packed_values import fractions, in_files

import lfm2np
from lfm2np.arithmetic import NAMES
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.packed.compressed import InputRounding
from lfm2np.checkpoint.packed.rows import PackedRows
from lfm2np.checkpoint.stored import widen
from lfm2np.checkpoint.tensors import input_roundings, open_checkpoint
from lfm2np.commands.cli import main
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors

FIXTURES = Path(__file__).parents[3] / "fixtures"
PROMPT = [1, 7, 12, 3, 30, 21]
IN, WIDE = "model.layers.0.conv.in_proj", "model.layers.1.feed_forward.w1"
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mixture"), BOTH)
def test_a_quantised_directory_is_its_model(name: str, mixture: bool, tmp_path: Path):
    """Every tensor is there, of our shape, and a view of the file, but that AWQ's order is turned at once; the engine,
    the reference and streamed weights give one answer."""
    path, _ = written(tmp_path / "x", name, mixture)
    config = read_config(path)
    assert config == config_of(raw_of(mixture))
    tensors = read_tensors(path, config)
    assert {key: tensor.shape for key, tensor in tensors.items()} == expected_tensors(config)
    matrices = {key for key, tensor in tensors.items() if len(tensor.shape) == 2}
    plain = {key for key in matrices if name not in MLX and key.endswith(("embed_tokens.weight", "gate.weight"))}
    assert {tensors[key].dtype for key in matrices - plain} == {name.split()[0]}
    for tensor in tensors.values():
        array = tensor.values.codes if isinstance(tensor.values, PackedRows) else tensor.values
        assert name.startswith("awq") or not (array.flags.owndata or array.flags.writeable)
    model = lfm2np.load(path)
    logits = model.logits(PROMPT)
    assert np.isfinite(logits).all() and np.ptp(logits) > 0
    assert lfm2np.load(path, weights="streamed").logits(PROMPT).tobytes() == logits.tobytes()
    assert 1 <= len(model.generate(PROMPT, max_tokens=3).token_ids) <= 3


WITH_DTYPES = [(name, "BF16") for name in (*compressed_files.SCHEMES, *AUTO)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [*WITH_DTYPES, ("int4-g32-zero", "F16"), ("float8-tensor", "F32")])
def test_every_weight_is_exactly_what_its_format_says(name: str, dtype: str, tmp_path: Path):
    path, expected = written(tmp_path / "x", name, dtype=dtype)
    tensors = read_tensors(path, read_config(path))
    for key in (OUT, KEYS):
        assert fractions(widen(tensors[key].values, name)) == expected[key](), key


@pytest.mark.slow
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


# --- modules of compressed-tensors, and what inputs are told


def test_a_head_and_an_embedding_may_be_quantised(tmp_path: Path):
    raw = raw_of(False, tie_word_embeddings=False)
    tensors, expected = compressed_files.quantised_tensors(config_of(raw), "int8-channel", plain=("-",))
    settings: Any = compressed_files.told("int8-channel", ignore=[])
    settings["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
    path = write(tmp_path / "x", raw | settings, tensors)
    loaded = read_tensors(path, read_config(path))
    for key in ("lm_head.weight", "model.embed_tokens.weight"):
        assert fractions(widen(loaded[key].values, "")) == expected[key]()
    assert np.isfinite(lfm2np.load(path).logits(PROMPT)).all()


def test_groups_have_schemes_and_formats_of_their_own(tmp_path: Path):
    """The first that names a module, before any that names its class; what is ignored is plain."""
    raw = raw_of(False)
    tensors, _ = compressed_files.quantised_tensors(
        config_of(raw), "int4-g32", plain=("embed_tokens", "in_proj", "1.feed_forward.w1", "w2")
    )
    groups = {}
    for key, name, targets in (
        (None, "int4-g32", ["Linear"]),
        (IN, "int8-channel", [r"re:.*\.in_proj$"]),
        (WIDE, "float8-tensor", [WIDE]),
    ):
        if key is not None:
            tensors |= compressed_files.quantised_matrix(
                key, expected_tensors(config_of(raw))[f"{key}.weight"], name, "BF16", 3
            )[0]
        settings: Any = compressed_files.told(name)
        groups[name] = settings["quantization_config"]["config_groups"]["group_0"] | {"targets": targets}
    mixed = compressed_files.told(
        "int4-g32", format="mixed-precision", config_groups=groups, ignore=["re:.*w2", "lm_head"]
    )
    path = write(tmp_path / "x", raw | mixed, tensors)
    dtypes = {key: tensor.dtype for key, tensor in read_tensors(path, read_config(path)).items()}
    assert dtypes[f"{IN}.weight"] == "int8-channel"
    assert dtypes[f"{WIDE}.weight"] == "float8-tensor"
    assert dtypes["model.layers.0.feed_forward.w1.weight"] == "int4-g32"
    assert dtypes["model.layers.0.feed_forward.w2.weight"] == "BF16"
    assert input_roundings(path, read_config(path)) == {
        f"{IN}.weight": InputRounding("int8", "token", 0, None, 0, True),
        f"{WIDE}.weight": InputRounding("float8", "tensor", 0, 3.25, 0, True),
    }


def test_experts_and_routers_may_be_plain_where_all_of_class_linear_are_quantised(tmp_path: Path):
    raw = raw_of(True)
    plain = ("embed_tokens", "gate", *(f"experts.{e}.{w}" for e in range(4) for w in ("w1", "w2", "w3")))
    tensors, _ = compressed_files.quantised_tensors(config_of(raw), "float8-channel", plain=plain)
    path = write(tmp_path / "x", raw | compressed_files.told("float8-channel"), tensors)
    assert np.isfinite(lfm2np.load(path).logits(PROMPT)).all()
    of_inputs = input_roundings(path, read_config(path))
    assert not any("experts" in key or "gate" in key for key in of_inputs) and f"{IN}.weight" in of_inputs


# --- what inputs are told


def with_inputs(directory: Path, name: str, **changes: object) -> Path:
    raw = raw_of(False)
    tensors, _ = compressed_files.quantised_tensors(config_of(raw), name)
    settings: Any = compressed_files.told(name)
    scheme = settings["quantization_config"]["config_groups"]["group_0"]
    scheme["input_activations"] = scheme["input_activations"] | changes
    if not scheme["input_activations"]["dynamic"]:
        for key in [tensor for tensor in tensors if tensor.endswith("weight_scale")]:
            module = key.removesuffix(".weight_scale")
            tensors[f"{module}.input_scale"] = stored(np.array([0.5], np.float32), "BF16")
            if not changes.get("symmetric", True):
                tensors[f"{module}.input_zero_point"] = ("I8", (1,), b"\xfd")
    return write(directory, raw | settings, tensors)


STATIC = {"strategy": "tensor", "dynamic": False, "symmetric": False}
INPUTS = [
    ("int8-channel", {}, InputRounding("int8", "token", 0, None, 0, True)),
    ("int8-channel", {"symmetric": False}, InputRounding("int8", "token", 0, None, 0, False)),
    ("int8-channel", {"strategy": "tensor"}, InputRounding("int8", "tensor", 0, None, 0, True)),
    ("int8-channel", {"strategy": "group", "group_size": 32}, InputRounding("int8", "group", 32, None, 0, True)),
    ("int8-channel", STATIC, InputRounding("int8", "tensor", 0, 0.5, -3, False)),
    ("float8-channel", {}, InputRounding("float8", "token", 0, None, 0, True)),
    ("float8-tensor", {}, InputRounding("float8", "tensor", 0, 0.5, 0, True)),
]


@pytest.mark.parametrize(("name", "changes", "expected"), INPUTS)
def test_inputs_are_rounded_as_the_checkpoint_says(
    name: str, changes: dict[str, object], expected: InputRounding, tmp_path: Path
):
    path = with_inputs(tmp_path / "x", name, **changes)
    config = read_config(path)
    actual = input_roundings(path, config)
    matrices = {key for key, shape in expected_tensors(config).items() if len(shape) == 2}
    assert actual == dict.fromkeys(sorted(matrices - {"model.embed_tokens.weight"}), expected)
    lfm2np.load(path)  # and all of their tensors are accounted for


def test_other_checkpoints_say_nothing_of_inputs(tmp_path: Path):
    path, _ = written(tmp_path / "x", "int4-g32")
    assert input_roundings(path, read_config(path)) == {}
    trained = FIXTURES / "trained"
    assert input_roundings(trained, read_config(trained)) == {}
    assert input_roundings(tmp_path / "x.gguf", read_config(trained)) == {}


# --- directories as mlx-lm writes them


@pytest.mark.parametrize(
    "directory",
    [*(FIXTURES / name for name in ("trained", "moe", "lfm3")), *sorted((FIXTURES / "torture").glob("lfm3_*"))],
    ids=lambda path: path.name,
)
def test_the_numbers_of_a_fixture_with_taps_as_mlx_has_them_give_its_logits(directory: Path, tmp_path: Path):
    config = load_config(directory)
    ours: dict[str, Stored] = {}
    for key, tensor in open_checkpoint(directory, config).items():
        values = tensor.array.swapaxes(1, 2) if len(tensor.shape) == 3 else tensor.array
        ours[key] = (tensor.dtype, tensor.shape, np.ascontiguousarray(values).tobytes())
    tensors = theirs(ours, config)
    raw = json.loads((directory / "config.json").read_text())
    path = write(tmp_path / "x", raw, in_files(tensors) if config.model_type == "lfm3" else tensors)
    prompt = [token % config.vocab_size for token in PROMPT]
    assert lfm2np.load(path).logits(prompt).tobytes() == lfm2np.load(directory).logits(prompt).tobytes()


def test_modules_have_their_own_formats(tmp_path: Path):
    """Routers of 8 bits among experts of 4, as mlx-lm writes them; one operator of mxfp4, one not quantised."""
    raw = raw_of(mixture=True)
    overrides = {"feed_forward.gate": ("affine", 8, 64), "0.conv.in_proj": ("mxfp4", 4, 32), "2.conv.out_proj": None}
    modules = {
        "model.layers.1.feed_forward.gate": {"group_size": 64, "bits": 8},
        "model.layers.2.feed_forward.gate": {"group_size": 64, "bits": 8, "mode": "affine"},
        "model.layers.0.conv.in_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        "model.layers.2.conv.out_proj": False,
        "model.layers.0.conv.out_proj": True,
    }
    tensors = mlx_files.quantised_tensors(config_of(raw), ("affine", 4, 32), others=overrides)
    path = write(tmp_path / "x", raw | mlx_files.told("affine", 4, 32, **modules), tensors)
    loaded = read_tensors(path, read_config(path))
    assert loaded["model.layers.1.feed_forward.gate.weight"].dtype == "affine-8bit-g64"
    assert loaded["model.layers.0.conv.in_proj.weight"].dtype == "mxfp4-g32"
    assert loaded["model.layers.2.conv.out_proj.weight"].dtype == "BF16"
    assert loaded["model.layers.2.feed_forward.experts.3.w2.weight"].dtype == "affine-4bit-g32"
    assert np.isfinite(lfm2np.load(path).logits(PROMPT)).all()


def test_a_tied_head_that_is_there_must_be_the_embedding(tmp_path: Path):
    raw = raw_of(False)
    tensors = mlx_files.quantised_tensors(config_of(raw), ("affine", 4, 32))
    for kind in ("weight", "scales", "biases"):
        tensors[f"lm_head.{kind}"] = tensors[f"model.embed_tokens.{kind}"]
    path = write(tmp_path / "x", raw | mlx_files.told("affine", 4, 32), tensors)
    assert read_tensors(path, read_config(path)).keys() == expected_tensors(read_config(path)).keys()
    (_, shape, scales), (dtype, _, biases) = tensors["lm_head.scales"], tensors["lm_head.biases"]
    for changes in (
        {"lm_head.biases": (dtype, shape, b"\x01" + biases[1:])},
        {"lm_head.scales": ("F16", shape, scales), "lm_head.biases": ("F16", shape, biases)},  # other numbers
    ):
        write(path, raw | mlx_files.told("affine", 4, 32), tensors | changes)
        with pytest.raises(lfm2np.CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            lfm2np.load(path)


def test_info_counts_what_three_slices_do_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One weight in 2**55 of the largest of its row, which float64 holds and 52 bits do not."""
    raw = raw_of(False)
    tensors = mlx_files.quantised_tensors(config_of(raw), ("affine", 8, 32), "F32")
    name, random = "model.layers.0.conv.out_proj", np.random.default_rng(5)
    codes = random.integers(1, 255, (64, 64)).astype("u1")
    codes[:, 0] = 0
    tensors[f"{name}.weight"] = ("U32", (64, 16), codes.tobytes())
    scales, biases = np.ones((64, 2), "<f4"), np.zeros((64, 2), "<f4")
    scales[3, 1], biases[3, 1] = 0.0, 2.0**-50
    for kind, values in (("scales", scales), ("biases", biases)):
        tensors[f"{name}.{kind}"] = ("F32", (64, 2), values.tobytes())
    path = write(tmp_path / "x", raw | mlx_files.told("affine", 8, 32), tensors)
    assert main(["info", "--json", "--model", str(path)]) == 0
    bound = json.loads(capsys.readouterr().out)["bounds"][1]
    assert bound["tensors"] == [f"{name}.weight"] and bound["slices"] == 3
    assert bound["rounded_weights"] == 32 and bound["largest_rounding"] < 2.0**-52
