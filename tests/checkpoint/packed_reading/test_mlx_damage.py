"""Directories of mlx-lm that lie, lack something or are damaged: one line that names it, and nothing but that."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Stored
from hypothesis import given
from hypothesis import strategies as st
from mlx_files import config_of, quantised_tensors, raw_of, told, write

import lfm2np
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.stored import require_finite
from lfm2np.errors import CheckpointError, ConfigError

FORM = ("affine", 4, 32)
IN = "model.layers.0.conv.in_proj"
GATE = "model.layers.1.feed_forward.gate"
UP = "model.layers.1.feed_forward.switch_mlp.up_proj"
Edit = Callable[[dict[str, Any], dict[str, Stored]], None]


def settings(**changes: object) -> Edit:
    """Both copies; None takes a key out."""

    def edit(raw: dict[str, Any], tensors: dict[str, Stored]) -> None:
        quantization = {key: change for key, change in (raw["quantization"] | changes).items() if change is not None}
        raw |= {"quantization": quantization, "quantization_config": quantization}

    return edit


def key(name: str, value: object) -> Edit:
    return lambda raw, tensors: raw.update({name: value})


def drop(name: str) -> Edit:
    return lambda raw, tensors: tensors.pop(name) and None


def shaped(name: str, shape: tuple[int, ...], dtype: str | None = None) -> Edit:
    def edit(raw: dict[str, Any], tensors: dict[str, Stored]) -> None:
        kind = dtype or tensors[name][0]
        width = {"U32": 4, "I32": 4, "F32": 4, "U8": 1, "I64": 8}.get(kind, 2)
        tensors[name] = (kind, shape, bytes(int(np.prod(shape)) * width))

    return edit


def added(name: str, dtype: str, shape: tuple[int, ...]) -> Edit:
    def edit(raw: dict[str, Any], tensors: dict[str, Stored]) -> None:
        tensors[name] = (dtype, shape, b"")
        shaped(name, shape)(raw, tensors)

    return edit


def nan(name: str) -> Edit:
    def edit(raw: dict[str, Any], tensors: dict[str, Stored]) -> None:
        dtype, shape, content = tensors[name]
        tensors[name] = (dtype, shape, b"\xc0\x7f" + content[2:])

    return edit


CONFIGS: list[tuple[Edit, str]] = [
    (key("quantization", [4]), r"quantization: \[4\], expected an object"),
    (key("quantization_config", {"bits": 3}), r"quantization_config: {'bits': 3} contradicts quantization, whose copy"),
    (
        settings(mode="int4"),
        "quantization.mode: 'int4' is not implemented, expected one of affine, mxfp4, mxfp8, nvfp4",
    ),
    (settings(mode=["affine"]), r"quantization.mode: \['affine'\] is not implemented"),
    (settings(bits=7), "quantization.bits: 7, expected one of 1, 2, 3, 4, 5, 6, 8 of mode affine"),
    (settings(bits=None), "quantization.bits: null, expected one of 1, 2"),
    (settings(bits=True), "quantization.bits: true, expected one of 1, 2"),
    (settings(group_size=16), "quantization.group_size: 16, expected one of 32, 64, 128 of mode affine"),
    (settings(mode="mxfp4", group_size=64), "quantization.group_size: 64, expected 32 of mode mxfp4"),
    (settings(mode="mxfp8"), "quantization.bits: 4, expected 8 of mode mxfp8"),
    (settings(activations=8), "quantization.'activations': 8, expected an object, true or false for a module"),
    (settings(**{IN: {"bits": 4}}), f"quantization.'{IN}'.group_size: null, expected one of 32, 64, 128"),
    (settings(**{IN: {"bits": 4, "group_size": 32, "scale": 2}}), f"quantization.'{IN}'.scale: 2 is not implemented"),
    (
        settings(**{IN: {"bits": 4, "group_size": 32, "quantize_input": True}}),
        f"quantization.'{IN}'.quantize_input: true is not implemented",
    ),
    (settings(**{f"{IN}x": False}), f"quantization.'{IN}x' .config.json.: there is no such module in this model"),
    (settings(quant_method="gptq"), "quantization.'quant_method': 'gptq', expected an object, true or false"),
    (key("quantize_activations", True), "quantize_activations: true is not implemented, expected false or no key"),
    (
        key("compression_config", {"format": "dense"}),
        "compression_config: {'format': 'dense'} contradicts quantization",
    ),
]
TENSORS: list[tuple[Edit, str]] = [
    (drop(f"{IN}.scales"), f"missing {IN}.scales beside {IN}.weight, expected it from dtype U32"),
    (drop(f"{IN}.biases"), f"missing {IN}.biases beside {IN}.scales, expected it from quantization.mode=affine"),
    (drop(f"{IN}.weight"), f"missing 1 of the [0-9]+ tensors: {IN}.weight"),
    (drop(f"{UP}.weight"), f"missing {UP}.weight, which mlx-lm's checkpoints have for model.layers.1.feed_forward.ex"),
    (
        drop("model.layers.0.operator_norm.weight"),
        "missing 1 of the [0-9]+ tensors: model.layers.0.operator_norm.weigh",
    ),
    (added("model.layers.0.operator_norm.scales", "F32", (2,)), "only matrices are quantised, expected none"),
    (added("model.layers.0.conv.conv.scales", "F32", (64, 1)), "only matrices are quantised, expected none"),
    (added(f"{IN}.global_scale", "F32", (1,)), f"1 unexpected beside the [0-9]+ tensors: {IN}.global_scale"),
    (added("model.layers.1.feed_forward.experts.0.w1.weight", "F32", (64, 64)), "stands beside .*switch_mlp.gate_proj"),
    (
        shaped(f"{IN}.weight", (192, 16)),
        rf"{IN}.weight: shape \(192, 16\), expected \(192, 8\) from hidden_size\*quantization.bits/32=8",
    ),
    (
        shaped(f"{IN}.scales", (192, 1)),
        rf"{IN}.scales: shape \(192, 1\), expected \(192, 2\) from hidden_size/quantization.group_size=2",
    ),
    (shaped(f"{IN}.biases", (191, 2)), rf"{IN}.biases: shape \(191, 2\), expected \(192, 2\) from 3\*hidden_size=192"),
    (shaped(f"{UP}.weight", (3, 64, 8)), rf"{UP}.weight: shape \(3, 64, 8\), expected \(4, 64, 8\) from num_experts=4"),
    (shaped(f"{IN}.weight", (192, 8), "I32"), "dtype I32, expected U32 from quantization.mode=affine"),
    (shaped(f"{IN}.scales", (192, 2), "U8"), "dtype U8, expected BF16 or F16 or F32 from quantization.mode=affine"),
    (shaped(f"{IN}.biases", (192, 2), "F32"), "biases: dtype F32, expected BF16 from quantization.mode=affine"),
    (shaped("model.layers.0.operator_norm.weight", (64,), "I64"), "dtype I64, expected one of BF16, F16, F32 of what"),
    (settings(**{IN: False}), f"{IN}.scales: expected none from quantization.'{IN}'=false"),
    (settings(bits=8), r"shape \(40, 8\), expected \(40, 16\) from hidden_size\*quantization.bits/32=16"),
    (settings(group_size=64), r"shape \(40, 2\), expected \(40, 1\) from hidden_size/quantization.group_size=1"),
    (settings(group_size=128), "rows of hidden_size=64 numbers, expected a multiple of quantization.group_size=128"),
    (settings(mode="mxfp4"), "scales: dtype BF16, expected U8 from quantization.mode=mxfp4"),
    (
        settings(**{GATE: {"bits": 8, "group_size": 64}}),
        rf"{GATE}.weight: shape \(4, 8\), expected \(4, 16\) from hidden_size\*quantization.'{GATE}'.bits/32=16",
    ),
    (nan(f"{IN}.scales"), f"{IN}.weight: affine-4bit-g32 with the scale nan in group 0 of row 0, expected finite"),
    (nan(f"{UP}.biases"), rf"{UP}.weight\[0\]: .*w3.weight: affine-4bit-g32 with the bias nan in group 0 of row 0"),
]


@cache
def drawn() -> dict[str, Stored]:
    return quantised_tensors(config_of(raw_of(mixture=True)), FORM)


def made() -> tuple[dict[str, Any], dict[str, Stored]]:
    return raw_of(mixture=True) | told(*FORM), dict(drawn())


def read_whole(path: Path) -> None:
    """All that is checked before anything computes."""
    for tensor in read_tensors(path, read_config(path)).values():
        require_finite(tensor)


def refused(path: Path, edit: Edit, error: type[Exception], message: str) -> None:
    raw, tensors = made()
    edit(raw, tensors)
    write(path, raw, tensors)
    with pytest.raises(error, match=message) as caught:
        lfm2np.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("edit", "message"), CONFIGS, ids=lambda case: None if callable(case) else case[:60])
def test_settings_that_are_not_implemented_or_lie_are_refused(edit: Edit, message: str, tmp_path: Path):
    refused(tmp_path / "x", edit, ConfigError, message)


@pytest.mark.parametrize(("edit", "message"), TENSORS, ids=lambda case: None if callable(case) else case[:60])
def test_tensors_that_do_not_fit_are_refused_with_the_key_that_says_so(edit: Edit, message: str, tmp_path: Path):
    refused(tmp_path / "x", edit, CheckpointError, message)


def test_a_module_that_should_be_quantised_and_is_not(tmp_path: Path):
    raw, tensors = made()
    form = {"bits": 4, "group_size": 32}
    settings(**{GATE: form})(raw, tensors)
    for kind in ("scales", "biases"):
        del tensors[f"{GATE}.{kind}"]
    shaped(f"{GATE}.weight", (4, 64), "F32")(raw, tensors)
    with pytest.raises(CheckpointError, match=f"missing {GATE}.scales beside {GATE}.weight, expected it from quantiz"):
        read_whole(write(tmp_path / "x", raw, tensors))
    settings(**{GATE: False})(raw, tensors)
    read_whole(write(tmp_path / "x", raw, tensors))


@pytest.mark.parametrize("shape", [(3, 64, 64), (64, 64), (4, 64, 32)])
def test_experts_that_are_not_quantised_have_their_shape(shape: tuple[int, ...], tmp_path: Path):
    raw, tensors = made()
    del raw["quantization"], raw["quantization_config"]
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(("scales", "biases"))}
    config = config_of(raw)
    for name in [one for one in plain if plain[one][0] == "U32"]:
        rows = plain[name][1][:-1]
        shaped(name, (*rows, 64), "BF16")(raw, plain)
    assert lfm2np.load(write(tmp_path / "x", raw, plain)).config == config
    shaped(f"{UP}.weight", shape)(raw, plain)
    with pytest.raises(CheckpointError, match=rf"{UP}.weight: shape .*, expected \(4, 64, 64\) from "):
        read_whole(write(tmp_path / "x", raw, plain))


def test_truncated_files_are_refused(tmp_path: Path):
    path = write(tmp_path / "x", *made())
    content = (path / "model.safetensors").read_bytes()
    for length in (0, 7, 100, len(content) // 2, len(content) - 1):
        (path / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            read_whole(path)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 200)
    | st.floats(allow_nan=False)
    | st.sampled_from(["affine", "mxfp4", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["bits", "group_size", "mode", IN, GATE, "quant_method"]), inner, max_size=3)
    ),
    max_leaves=6,
)
whole = made()


@given(data=st.data())
def test_damage_is_one_line_or_none(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    """Settings, names, shapes and bytes at random: the directory is read, or one line says what is wrong."""
    raw, tensors = json.loads(json.dumps(whole[0])), dict(whole[1])
    if data.draw(st.booleans()):
        where = data.draw(st.sampled_from(["quantization", "quantization_config", "mode", "bits", "group_size", IN]))
        value = data.draw(json_values)
        settings(**{where: value})(raw, tensors) if where not in raw else raw.update({where: value})
    for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=2, unique=True)):
        dtype, shape, content = tensors[name]
        what = data.draw(st.sampled_from(["drop", "rename", "shape", "bytes", "dtype"]))
        if what in ("drop", "rename"):
            del tensors[name]
        if what == "rename":
            tensors[data.draw(st.sampled_from([name + "s", name.replace("scales", "zeros"), "x"]))] = (
                dtype,
                shape,
                content,
            )
        if what == "shape":
            tensors[name] = (dtype, (*shape[1:], shape[0]), content)
        if what == "bytes":
            at = data.draw(st.integers(0, len(content) - 2))
            tensors[name] = (
                dtype,
                shape,
                content[:at] + data.draw(st.binary(min_size=2, max_size=2)) + content[at + 2 :],
            )
        if what == "dtype":
            same = {"U32": ["I32", "F32"], "BF16": ["F16"]}
            tensors[name] = (data.draw(st.sampled_from(same[dtype])), shape, content)
    path = write(tmp_path_factory.mktemp("x") / "x", raw, tensors)
    try:
        read_whole(path)
    except (CheckpointError, ConfigError) as problem:
        assert "\n" not in str(problem) and str(path) in str(problem)
