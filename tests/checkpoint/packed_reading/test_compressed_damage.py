"""Directories of compressed-tensors that lie, lack something or are damaged; methods that are not known at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Stored
from compressed_files import STATIC, TOKEN, quantised_tensors, told, weights
from hypothesis import given
from hypothesis import strategies as st
from mlx_files import config_of, raw_of, write

import lfm2np
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.packed.activations import input_roundings
from lfm2np.checkpoint.stored import require_finite
from lfm2np.errors import CheckpointError, ConfigError

OUT = "model.layers.0.conv.out_proj"
Edit = Callable[[dict[str, Any], dict[str, Stored]], None]
BLOCK = weights(num_bits=8, type="float", strategy="block", group_size=None)
BYTES = {"I64": 8, "F32": 4, "I32": 4, "U32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}


def setting(**changes: object) -> Edit:
    return lambda raw, tensors: raw["quantization_config"].update(changes)


def scheme(**changes: object) -> Edit:
    return lambda raw, tensors: raw["quantization_config"]["config_groups"]["group_0"].update(changes)


def both(*edits: Edit) -> Edit:
    return lambda raw, tensors: [edit(raw, tensors) for edit in edits] and None


def args(**changes: object) -> Edit:
    return scheme(weights=weights(**changes))


def drop(part: str) -> Edit:
    return lambda raw, tensors: tensors.pop(f"{OUT}.{part}") and None


def shaped(part: str, shape: tuple[int, ...], dtype: str | None = None) -> Edit:
    def edit(raw: dict[str, Any], tensors: dict[str, Stored]) -> None:
        kind = dtype or tensors[f"{OUT}.{part}"][0]
        tensors[f"{OUT}.{part}"] = (kind, shape, bytes(int(np.prod(shape)) * BYTES.get(kind, 2)))

    return edit


def filled(part: str, values: np.ndarray, dtype: str) -> Edit:
    def edit(raw: dict[str, Any], tensors: dict[str, Stored]) -> None:
        tensors[f"{OUT}.{part}"] = (dtype, values.shape, values.tobytes())

    return edit


GROUP = "quantization_config.config_groups.group_0"
CONFIGS: list[tuple[Edit, str]] = [
    (
        lambda raw, tensors: raw.update(quantization_config=[1]),
        r"quantization_config: \[1\] is not implemented, expected",
    ),
    (
        setting(quant_method="bitsandbytes"),
        "quantization_config: quant_method 'bitsandbytes' is not implemented, expec",
    ),
    (
        setting(quant_method=None),
        "quantization_config: {.*} is not implemented, expected a quant_method of compressed-",
    ),
    (lambda raw, tensors: raw.update(compression_config={"a": 1}), "compression_config: {'a': 1} contradicts quantiz"),
    (setting(format="nvfp4-pack-quantized"), "quantization_config.format: 'nvfp4-pack-quantized' is not implemented"),
    (setting(format=["dense"]), r"quantization_config.format: \['dense'\] is not implemented"),
    (setting(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme: {'num_bits': 8} is not implemented, expected null"),
    (setting(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: .* is not implemented"),
    (setting(transform_config={"config_groups": {"u": 1}}), "transform_config: .* is not implemented"),
    (setting(quantization_status="frozen"), "quantization_status: 'frozen' is not implemented, expected 'compressed'"),
    (setting(rotation=1), "quantization_config.rotation: 1: not a key of compressed-tensors that is known here"),
    (setting(config_groups={}), "config_groups: {}, expected an object of schemes"),
    (setting(config_groups={"W4A16": ["Linear"]}), r"config_groups.W4A16: \['Linear'\], expected an object"),
    (setting(ignore="lm_head"), "ignore: 'lm_head', expected a list of names, classes and re:expressions"),
    (setting(ignore=["re:("]), "ignore: 're:.': not a regular expression: missing"),
    (scheme(targets=[1]), rf"{GROUP}.targets: \[1\], expected a list of names"),
    (scheme(format="int-quantized"), f"{GROUP}.format: 'int-quantized', expected format=pack-quantized or null"),
    (scheme(output_activations=TOKEN), f"{GROUP}.output_activations: .* is not implemented"),
    (scheme(hadamard=1), f"{GROUP}.hadamard: 1 is not implemented, expected targets, weights"),
    (scheme(weights=None), f"{GROUP}.weights: null, expected an object with num_bits, type and strategy"),
    (
        args(num_bits=3),
        f"{GROUP}.weights.num_bits: 3 is not implemented, expected one of 4, 8 of weights in format pack-q",
    ),
    (args(type="float"), f"{GROUP}.weights.type: 'float' is not implemented, expected int of weights in format pack-q"),
    (args(symmetric=1), f"{GROUP}.weights.symmetric: 1, expected true or false"),
    (args(dynamic=True), f"{GROUP}.weights.dynamic: true, expected false of weights"),
    (args(group_size=None), f"{GROUP}.weights.group_size: null contradicts strategy=group"),
    (args(group_size=-2), f"{GROUP}.weights.group_size: -2, expected a positive integer, -1 or null"),
    (
        args(strategy="tensor_group"),
        f"{GROUP}.weights.strategy: 'tensor_group' is not implemented, expected one of ch",
    ),
    (
        args(strategy="tensor", group_size=None),
        "strategy: 'tensor' is not implemented, expected one of channel, group of weights",
    ),
    (args(block_structure=[2, 2]), r"block_structure: \[2, 2\] contradicts strategy=group"),
    (
        both(setting(format="float-quantized"), scheme(format=None, weights=BLOCK | {"block_structure": [2**70, 1]})),
        r"block_structure: \[1180591620717411303424, 1\], expected two integers from 1 to 131072",
    ),
    (args(actorder=True), f"{GROUP}.weights.actorder: true, expected null or one of weight, static, group, dynamic"),
    (args(quant_min=1), f"{GROUP}.weights.quant_min: 1 is not implemented, expected num_bits, type"),
    (
        scheme(input_activations=TOKEN | {"num_bits": 4}),
        "input_activations.num_bits: 4 is not implemented, expected one of 8",
    ),
    (scheme(input_activations=TOKEN | {"dynamic": "local"}), "input_activations.dynamic: 'local', expected true or f"),
    (
        scheme(input_activations=TOKEN | {"dynamic": False}),
        "strategy: 'token' is not implemented, expected tensor of static scales",
    ),
    (
        scheme(input_activations=STATIC | {"symmetric": False}),
        "symmetric: false is not implemented, expected true of type float",
    ),
    (scheme(input_activations=TOKEN | {"type": "fp4"}), "input_activations.type: 'fp4' is not implemented"),
    (scheme(input_activations=TOKEN | {"actorder": "group"}), "input_activations.actorder: 'group', expected null"),
]
TENSORS: list[tuple[str, Edit, str]] = [
    ("int4-g32", drop("weight_packed"), f"missing {OUT}.weight_packed, expected it from format=pack-quantized"),
    (
        "int4-g32",
        drop("weight_scale"),
        f"missing {OUT}.weight_scale, expected it from config_groups.group_0.weights.str",
    ),
    ("int4-g32", drop("weight_shape"), f"missing {OUT}.weight_shape, expected it from format=pack-quantized"),
    ("int4-g32-zero", drop("weight_zero_point"), "weight_zero_point, expected it from .*weights.symmetric=false"),
    (
        "float8-tensor",
        drop("input_scale"),
        f"missing {OUT}.input_scale, expected it from .*input_activations.dynamic=f",
    ),
    ("int8-channel", drop("weight"), f"missing {OUT}.weight, expected it from config_groups.group_0.weights.type"),
    ("int4-g32", shaped("weight_packed", (64, 4)), r"shape \(64, 4\), expected \(64, 8\) from .*weights.num_bits/32=8"),
    ("int4-g32", shaped("weight_packed", (64, 8), "U32"), "weight_packed: dtype U32, expected I32 from format=pack-qu"),
    ("int4-g32", shaped("weight_scale", (64, 1)), r"shape \(64, 1\), expected \(64, 2\) from .*weights.group_size=2"),
    ("int8-channel", shaped("weight_scale", (64,)), r"shape \(64,\), expected \(64, 1\) from .*strategy=channel=1"),
    ("float8-tensor", shaped("weight_scale", (64, 1)), r"shape \(64, 1\), expected \(1,\) from .*strategy=tensor=1"),
    (
        "float8-block24x48",
        shaped("weight_scale", (2, 2)),
        r"shape \(2, 2\), expected \(3, 2\) from .*block_structure=3",
    ),
    ("int4-g32-zero", shaped("weight_zero_point", (64, 2)), r"expected \(8, 2\) from hidden_size\*.*num_bits/32=8"),
    ("int4-g32", shaped("weight_zero_point", (8, 2), "I32"), "1 unexpected beside the 21 tensors: .*weight_zero_point"),
    ("int4-g32", shaped("weight_g_idx", (64,), "I32"), "1 unexpected beside the 21 tensors: .*weight_g_idx"),
    ("int4-g32", shaped("input_scale", (1,), "F32"), "1 unexpected beside the 21 tensors: .*input_scale"),
    ("int8-channel", shaped("weight", (64, 64), "F8_E4M3"), "weight: dtype F8_E4M3, expected I8 from .*weights.type"),
    ("int8-channel", shaped("weight", (64, 32)), r"weight: shape \(64, 32\), expected \(64, 64\) from hidden_size=64"),
    (
        "int4-g32",
        filled("weight_shape", np.array([64, 128], "<i8"), "I64"),
        r"weight_shape: \(64, 128\), expected \(64, 64\) from hidden_size=64, hidden_size=64",
    ),
    (
        "float8-tensor",
        filled("input_scale", np.array([-1.0], "<f4"), "F32"),
        "input_scale: -1.0, expected a positive number",
    ),
    (
        "float8-channel",
        filled("weight", np.full((64, 64), 127, "u1"), "F8_E4M3"),
        "float8-channel with the code nan in column 0 of row 0",
    ),
    (
        "int4-g32",
        filled("weight_scale", np.full((64, 2), 0x7F80, "<u2"), "BF16"),
        "int4-g32 with the scale inf in group 0 of row 0",
    ),
    (
        "int4-g32",
        setting(ignore=["re:.*out_proj"]),
        f"{OUT}.weight_scale|weight_packed: expected none, as ignore names it",
    ),
    ("int4-g32", scheme(targets=["re:.*in_proj"]), "weight_packed: expected none, as no target matches it"),
    ("int4-g32", scheme(targets=["re:.*"]), "missing model.embed_tokens.weight_packed, expected it from format=pack-q"),
    ("int4-g32", args(group_size=48), r"\.weight: hidden_size=64, expected a multiple of .*group_size=48"),
    ("int4-g32", args(num_bits=8), r"weight_packed: shape .*, expected .* from hidden_size\*.*num_bits/32=16"),
    ("int4-g32", args(actorder="group"), "missing .*weight_g_idx, expected it from config_groups.group_0.weights.act"),
    ("int8-channel", args(num_bits=8, type="int", strategy="group"), r"weight_scale: shape .*group_size=2"),
    ("int4-g32", setting(format="int-quantized"), "group_0.format: 'pack-quantized', expected format=int-quantized"),
]


@cache
def drawn(name: str) -> dict[str, Stored]:
    return quantised_tensors(config_of(raw_of(mixture=False)), name)[0]


def made(name: str) -> tuple[dict[str, Any], dict[str, Stored]]:
    return json.loads(json.dumps(raw_of(mixture=False) | told(name))), dict(drawn(name))


def refused(path: Path, name: str, edit: Edit, error: tuple[type[Exception], ...], message: str) -> None:
    raw, tensors = made(name)
    edit(raw, tensors)
    write(path, raw, tensors)
    with pytest.raises(error, match=message) as caught:
        lfm2np.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("edit", "message"), CONFIGS, ids=lambda case: case[:60] if isinstance(case, str) else None)
def test_settings_that_are_not_implemented_or_lie_are_refused(edit: Edit, message: str, tmp_path: Path):
    refused(tmp_path / "x", "int4-g32", edit, (ConfigError,), message)


@pytest.mark.parametrize(
    ("name", "edit", "message"), TENSORS, ids=lambda case: case[:50] if isinstance(case, str) else None
)
def test_tensors_that_do_not_fit_are_refused_with_the_key_that_says_so(
    name: str, edit: Edit, message: str, tmp_path: Path
):
    refused(tmp_path / "x", name, edit, (CheckpointError, ConfigError), message)


def test_mixed_precision_takes_the_format_of_each_group(tmp_path: Path):
    raw, tensors = made("int4-g32")
    setting(format="mixed-precision")(raw, tensors)
    path = write(tmp_path / "x", raw, tensors)
    assert read_tensors(path, read_config(path))[f"{OUT}.weight"].dtype == "int4-g32"
    scheme(format=None)(raw, tensors)
    with pytest.raises(ConfigError, match=r"group_0\.format: null is not implemented, expected one of pack-quantized"):
        read_config(write(tmp_path / "x", raw, tensors))


def test_groups_that_g_idx_does_not_have_are_refused(tmp_path: Path):
    raw, tensors = made("int4-g32")
    args(actorder="group")(raw, tensors)
    for name in [tensor for tensor in tensors if tensor.endswith("weight_packed")]:
        module = name.removesuffix(".weight_packed")
        columns = tensors[f"{module}.weight_scale"][1][1] * 32
        groups = np.arange(columns, dtype="<i4") // 32 + (module == OUT)
        tensors[f"{module}.weight_g_idx"] = ("I32", (columns,), groups.tobytes())
    path = write(tmp_path / "x", raw, tensors)
    with pytest.raises(CheckpointError, match=r"weight_g_idx: group 2 of column 32, expected 0 to 1"):
        lfm2np.load(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | st.sampled_from(["Linear", "int", "group", "re:.*", "channel"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["weights", "targets", "num_bits", "strategy", "group_0"]), inner, max_size=3)
    ),
    max_leaves=6,
)
whole = {name: made(name) for name in ("int4-g32-zero", "int8-channel", "float8-tensor")}


@given(data=st.data())
def test_damage_is_one_line_or_none(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    """Settings, names, shapes and bytes at random: the directory is read, or one line says what is wrong."""
    raw, tensors = whole[data.draw(st.sampled_from(sorted(whole)))]
    raw, tensors = json.loads(json.dumps(raw)), dict(tensors)
    settings = raw["quantization_config"]
    group = settings["config_groups"]["group_0"]
    places = [raw, settings, group, group["weights"], group["input_activations"] or group]
    for _ in range(data.draw(st.integers(0, 2))):
        where = places[data.draw(st.integers(0, 4))]
        where[data.draw(st.sampled_from(sorted(where)))] = data.draw(values)
    for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=2, unique=True)):
        dtype, shape, content = tensors.pop(name)
        what = data.draw(st.sampled_from(["drop", "rename", "shape", "bytes"]))
        if what == "rename":
            tensors[data.draw(st.sampled_from([name + "s", name.replace("scale", "shape"), "x"]))] = (
                dtype,
                shape,
                content,
            )
        if what == "shape":
            tensors[name] = (dtype, (*shape[1:], shape[0]), content)
        if what == "bytes":
            at = data.draw(st.integers(0, len(content) - 1))
            tensors[name] = (
                dtype,
                shape,
                content[:at] + data.draw(st.binary(min_size=1, max_size=1)) + content[at + 1 :],
            )
    path = write(tmp_path_factory.mktemp("x") / "x", raw, tensors)
    try:
        config = read_config(path)
        for tensor in read_tensors(path, config).values():
            require_finite(tensor)
        input_roundings(path, config)
    except (CheckpointError, ConfigError) as problem:
        assert "\n" not in str(problem) and str(path) in str(problem)
