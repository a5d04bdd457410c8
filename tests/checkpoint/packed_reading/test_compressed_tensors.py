"""Directories of compressed-tensors: every format and strategy against fractions, whole models, rounding of inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import stored
from compressed_files import quantised_matrix, quantised_tensors, told
from mlx_files import config_of, raw_of, write
from packed_values import fractions
from test_directories import written

import lfm2np
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.packed.compressed import InputRounding
from lfm2np.checkpoint.stored import widen
from lfm2np.checkpoint.tensors import input_roundings
from lfm2np.truth.layers import expected_tensors

PROMPT = [1, 7, 12, 3, 30, 21]
IN, WIDE = "model.layers.0.conv.in_proj", "model.layers.1.feed_forward.w1"

TOP = Path(__file__).parents[3]


def test_a_head_and_an_embedding_may_be_quantised(tmp_path: Path):
    raw = raw_of(False, tie_word_embeddings=False)
    tensors, expected = quantised_tensors(config_of(raw), "int8-channel", plain=("-",))
    settings: Any = told("int8-channel", ignore=[])
    settings["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
    path = write(tmp_path / "x", raw | settings, tensors)
    loaded = read_tensors(path, read_config(path))
    for key in ("lm_head.weight", "model.embed_tokens.weight"):
        assert fractions(widen(loaded[key].values, "")) == expected[key]()
    assert np.isfinite(lfm2np.load(path).logits(PROMPT)).all()


def test_groups_have_schemes_and_formats_of_their_own(tmp_path: Path):
    """The first that names a module, before any that names its class; what is ignored is plain."""
    raw = raw_of(False)
    tensors, _ = quantised_tensors(
        config_of(raw), "int4-g32", plain=("embed_tokens", "in_proj", "1.feed_forward.w1", "w2")
    )
    groups = {}
    for key, name, targets in (
        (None, "int4-g32", ["Linear"]),
        (IN, "int8-channel", [r"re:.*\.in_proj$"]),
        (WIDE, "float8-tensor", [WIDE]),
    ):
        if key is not None:
            tensors |= quantised_matrix(key, expected_tensors(config_of(raw))[f"{key}.weight"], name, "BF16", 3)[0]
        settings: Any = told(name)
        groups[name] = settings["quantization_config"]["config_groups"]["group_0"] | {"targets": targets}
    mixed = told("int4-g32", format="mixed-precision", config_groups=groups, ignore=["re:.*w2", "lm_head"])
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
    tensors, _ = quantised_tensors(config_of(raw), "float8-channel", plain=plain)
    path = write(tmp_path / "x", raw | told("float8-channel"), tensors)
    assert np.isfinite(lfm2np.load(path).logits(PROMPT)).all()
    of_inputs = input_roundings(path, read_config(path))
    assert not any("experts" in key or "gate" in key for key in of_inputs) and f"{IN}.weight" in of_inputs


# --- what inputs are told


def with_inputs(directory: Path, name: str, **changes: object) -> Path:
    raw = raw_of(False)
    tensors, _ = quantised_tensors(config_of(raw), name)
    settings: Any = told(name)
    scheme = settings["quantization_config"]["config_groups"]["group_0"]
    scheme["input_activations"] = scheme["input_activations"] | changes
    if not scheme["input_activations"]["dynamic"]:
        for key in [tensor for tensor in tensors if tensor.endswith("weight_scale")]:
            module = key.removesuffix(".weight_scale")
            tensors[f"{module}.input_scale"] = stored(np.array([0.5], np.float32), "BF16")
            if not changes.get("symmetric", True):
                tensors[f"{module}.input_zero_point"] = ("I8", (1,), b"\xfd")
    return write(directory, raw | settings, tensors)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("int8-channel", {}, InputRounding("int8", "token", 0, None, 0, True)),
        ("int8-channel", {"symmetric": False}, InputRounding("int8", "token", 0, None, 0, False)),
        ("int8-channel", {"strategy": "tensor"}, InputRounding("int8", "tensor", 0, None, 0, True)),
        ("int8-channel", {"strategy": "group", "group_size": 32}, InputRounding("int8", "group", 32, None, 0, True)),
        (
            "int8-channel",
            {"strategy": "tensor", "dynamic": False, "symmetric": False},
            InputRounding("int8", "tensor", 0, 0.5, -3, False),
        ),
        ("float8-channel", {}, InputRounding("float8", "token", 0, None, 0, True)),
        ("float8-tensor", {}, InputRounding("float8", "tensor", 0, 0.5, 0, True)),
    ],
)
def test_inputs_are_rounded_as_the_checkpoint_says(
    name: str, changes: dict[str, object], expected: InputRounding, tmp_path: Path
):
    path = with_inputs(tmp_path / "x", name, **changes)
    config = read_config(path)
    actual = input_roundings(path, config)
    matrices = {key for key, shape in expected_tensors(config).items() if len(shape) == 2}
    assert actual == dict.fromkeys(sorted(matrices - {"model.embed_tokens.weight"}), expected)
    lfm2np.load(path)  # and all of their tensors are accounted for


def test_each_product_has_its_own_static_scale(tmp_path: Path):
    path, _ = written(tmp_path / "x", "float8-tensor")
    assert len({scheme.scale for scheme in input_roundings(path, read_config(path)).values()}) > 3


def test_other_checkpoints_say_nothing_of_inputs(tmp_path: Path):
    path, _ = written(tmp_path / "x", "int4-g32")
    assert input_roundings(path, read_config(path)) == {}
    trained = TOP / "fixtures" / "trained"
    assert input_roundings(trained, read_config(trained)) == {}
    assert input_roundings(tmp_path / "x.gguf", read_config(trained)) == {}
