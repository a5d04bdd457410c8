"""Quantised directories that lie, lack something or are damaged: one line says which file, tensor and key it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import auto_files
import compressed_files
import mlx_files
import numpy as np
import pytest
from builders import Stored
from compressed_files import STATIC, TOKEN, weights
from hypothesis import given
from hypothesis import strategies as st
from mlx_files import config_of, raw_of, write

import lfm2np
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.stored import StoredTensor, require_finite
from lfm2np.checkpoint.tensors import input_roundings
from lfm2np.errors import CheckpointError, ConfigError
from lfm2np.values import show_json

OUT, IN = "model.layers.0.conv.out_proj", "model.layers.0.conv.in_proj"
GATE = "model.layers.1.feed_forward.gate"
UP = "model.layers.1.feed_forward.switch_mlp.up_proj"
GROUP = "quantization_config.config_groups.group_0"
BLOCK = weights(num_bits=8, type="float", strategy="block", group_size=None, block_structure=[2**70, 1])
FORM = ("affine", 4, 32)
AUTO = {"gptq": auto_files.gptq(), "gptq-sym": auto_files.gptq(sym=True), "awq": auto_files.awq()}
BYTES = {"I64": 8, "F32": 4, "I32": 4, "U32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}
Raw = dict[str, Any]
Tensors = dict[str, Stored]
Edit = Callable[[Raw, Tensors], None]


@cache
def whole(base: str) -> tuple[Raw, Tensors]:
    raw = raw_of(mixture=base == "mlx")
    if base == "mlx":
        return raw | mlx_files.told(*FORM), mlx_files.quantised_tensors(config_of(raw), FORM)
    if base in AUTO:
        return raw | AUTO[base], auto_files.quantised_tensors(config_of(raw), AUTO[base])[0]
    return raw | compressed_files.told(base), compressed_files.quantised_tensors(config_of(raw), base)[0]


def made(base: str) -> tuple[Raw, Tensors]:
    raw, tensors = whole(base)
    return json.loads(json.dumps(raw)), dict(tensors)


def mlx(**changes: object) -> Edit:
    """Both copies; None takes a key out."""

    def edit(raw: Raw, tensors: Tensors) -> None:
        quantization = {key: change for key, change in (raw["quantization"] | changes).items() if change is not None}
        raw |= {"quantization": quantization, "quantization_config": quantization}

    return edit


def key(name: str, value: object) -> Edit:
    return lambda raw, tensors: raw.update({name: value})


def setting(**changes: object) -> Edit:
    return lambda raw, tensors: raw["quantization_config"].update(changes)


def scheme(**changes: object) -> Edit:
    return lambda raw, tensors: raw["quantization_config"]["config_groups"]["group_0"].update(changes)


def args(**changes: object) -> Edit:
    return scheme(weights=weights(**changes))


def unannounced(raw: Raw, tensors: Tensors) -> None:
    del raw["quantization"], raw["quantization_config"]


def inputs(**changes: object) -> Edit:
    return scheme(input_activations=TOKEN | changes)


def both(*edits: Edit) -> Edit:
    return lambda raw, tensors: [edit(raw, tensors) for edit in edits] and None


def called(name: str) -> str:
    return name if "." in name else f"{OUT}.{name}"


def drop(name: str) -> Edit:
    return lambda raw, tensors: tensors.pop(called(name)) and None


def shaped(name: str, shape: tuple[int, ...], dtype: str | None = None) -> Edit:
    def edit(raw: Raw, tensors: Tensors) -> None:
        kind = dtype or (tensors[called(name)][0] if called(name) in tensors else "BF16")
        tensors[called(name)] = (kind, shape, bytes(int(np.prod(shape)) * BYTES.get(kind, 2)))

    return edit


def filled(name: str, values: np.ndarray, dtype: str) -> Edit:
    return lambda raw, tensors: tensors.update({called(name): (dtype, values.shape, values.tobytes())})


def nan(name: str) -> Edit:
    def edit(raw: Raw, tensors: Tensors) -> None:
        dtype, shape, content = tensors[name]
        tensors[name] = (dtype, shape, b"\xc0\x7f" + content[2:])

    return edit


GROUPS, SMALL = np.arange(64, dtype="<i4") // 32, {"bits": 4, "group_size": 32}
ONES = np.full((2, 8), 2**32 - 1, "<u4")
PLAIN_GATE = drop(f"{GATE}.scales"), shaped(f"{GATE}.weight", (4, 64), "F32"), drop(f"{GATE}.biases")
PLAIN_OUT = *map(drop, ("qweight", "qzeros", "scales")), shaped("weight", (64, 64), "F16")
HALF_NAN = np.where(np.arange(128).reshape(2, 64) == 69, np.nan, 1.0).astype("<f2")


def each(base: str, edit: Callable[..., Edit], where: str, *changes: dict[str, object]) -> list[tuple[str, Edit, str]]:
    """A row for each value of each key, named with its place."""
    pairs = [pair for some in changes for pair in some.items()]
    return [(base, edit(**{key: value}), re.escape(f"{where}{key}: {show_json(value)}, ")) for key, value in pairs]


SPARSITY, TRANSFORM = {"format": "sparse-24-bitmask"}, {"config_groups": {"u": 1}}
# what was changed, and what the message names
REFUSED: list[tuple[str, Edit, str]] = [
    *each("mlx", mlx, "quantization.", {"mode": "int4", "bits": 7, "group_size": 16}, {"bits": None}, {"bits": True}),
    *each("int4-g32", setting, "quantization_config.", {"quant_method": "bitsandbytes", "transform_config": TRANSFORM}),
    *each("int4-g32", setting, "quantization_config.", {"format": "nvfp4-pack-quantized", "sparsity_config": SPARSITY}),
    *each("int4-g32", setting, "quantization_config.", {"quantization_status": "frozen", "rotation": 1}),
    *each("int4-g32", setting, "quantization_config.", {"kv_cache_scheme": {"num_bits": 8}}),
    *each("int4-g32", scheme, f"{GROUP}.", {"format": "int-quantized", "output_activations": TOKEN, "hadamard": 1}),
    *each("int4-g32", scheme, f"{GROUP}.", {"weights": None}),
    *each("int4-g32", args, f"{GROUP}.weights.", {"num_bits": 3, "type": "float", "symmetric": 1, "dynamic": True}),
    *each("int4-g32", args, f"{GROUP}.weights.", {"group_size": -2, "strategy": "tensor_group", "actorder": True}),
    *each("int4-g32", args, f"{GROUP}.weights.", {"block_structure": [2, 2], "quant_min": 1}),
    *each("int4-g32", inputs, f"{GROUP}.input_activations.", {"num_bits": 4, "dynamic": "local", "type": "fp4"}),
    *each("int4-g32", inputs, f"{GROUP}.input_activations.", {"dynamic": False, "actorder": "group"}),
    *each("gptq", setting, "quantization_config.", {"bits": 3, "desc_act": 1, "checkpoint_format": "marlin"}),
    *each("gptq", setting, "quantization_config.", {"is_marlin_format": True, "dynamic": {"-:lm_head": {}}}),
    *each("gptq", setting, "quantization_config.", {"rotation": "hadamard"}),
    *each("awq", setting, "quantization_config.", {"version": "gemv", "zero_point": False, "bits": 8, "smooth": True}),
    ("mlx", key("quantization", [4]), "quantization: \\[4\\], expected an object"),
    ("mlx", key("quantization_config", {"bits": 3}), "quantization_config: {'bits': 3} contradicts quantization, wh"),
    ("mlx", mlx(mode="mxfp4", group_size=64), "quantization.group_size: 64, expected 32 of mode mxfp4"),
    ("mlx", mlx(mode="mxfp8"), "quantization.bits: 4, expected 8 of mode mxfp8"),
    ("mlx", mlx(activations=8), "quantization.'activations': 8"),
    ("mlx", mlx(**{IN: {"bits": 4}}), f"quantization.'{IN}'.group_size: null"),
    ("mlx", mlx(**{IN: {"bits": 4, "group_size": 32, "scale": 2}}), f"quantization.'{IN}'.scale: 2"),
    ("mlx", mlx(**{IN: {"bits": 4, "group_size": 32, "quantize_input": True}}), f"quantization.'{IN}'.quantize"),
    ("mlx", mlx(**{f"{IN}x": False}), f"quantization.'{IN}x' .config.json.: there is no such module in this mo"),
    ("mlx", key("quantize_activations", True), "quantize_activations: true"),
    ("mlx", unannounced, "[0-9]+ unexpected beside .*: model.embed_tokens.biases, "),
    ("mlx", key("compression_config", {"format": "dense"}), "compression_config: {.format.: .dense.}, expected"),
    ("mlx", drop(f"{IN}.scales"), f"missing {IN}.scales, expected it from dtype U32"),
    ("mlx", drop(f"{IN}.biases"), f"missing {IN}.biases, expected it from quantization.mode=affi"),
    ("mlx", drop(f"{IN}.weight"), f"missing {IN}.weight, expected it from quantization.mode=affi"),
    ("mlx", both(mlx(**{IN: {"bits": 4, "group_size": 128}}), drop(f"{IN}.weight")), f"{IN}.weight: rows of hidden_si"),
    ("mlx", shaped("model.layers.0.operator_norm.scales", (2,), "F32"), "only matrices are quantised, expected none"),
    ("mlx", shaped("model.layers.0.conv.conv.scales", (64, 1), "F32"), "only matrices are quantised, expected none"),
    ("mlx", shaped(f"{IN}.global_scale", (1,), "F32"), f"1 unexpected beside the [0-9]+ tensors: {IN}.global_scale"),
    ("mlx", shaped("model.layers.1.feed_forward.experts.0.w1.weight", (64, 64), "F32"), "1 unexp.*0.w1.weight"),
    ("mlx", shaped(f"{IN}.weight", (192, 16)), f"{IN}.weight: shape \\(192, 16\\), expected \\(192, 8\\) from hidde"),
    ("mlx", shaped(f"{IN}.scales", (192, 1)), f"{IN}.scales: shape \\(192, 1\\), expected \\(192, 2\\) from hidden_"),
    ("mlx", shaped(f"{IN}.biases", (191, 2)), f"{IN}.biases: shape \\(191, 2\\), expected \\(192, 2\\) from 3\\*hid"),
    ("mlx", shaped(f"{UP}.weight", (3, 64, 8)), f"{UP}.weight: shape \\(3, 64, 8\\), expected \\(4, 64, 8\\) from n"),
    ("mlx", shaped(f"{IN}.weight", (192, 8), "I32"), "dtype I32, expected U32 from quantization.mode=affine"),
    ("mlx", shaped(f"{IN}.scales", (192, 2), "U8"), "dtype U8, expected BF16 or F16 or F32 from quantization.mode=a"),
    ("mlx", shaped(f"{IN}.biases", (192, 2), "F32"), "biases: dtype F32, expected BF16 from quantization.mode=affin"),
    ("mlx", shaped("model.layers.0.operator_norm.weight", (64,), "I64"), "dtype I64, expected one of BF16, F16, F32"),
    ("mlx", mlx(**{IN: False}), f"{IN}.scales: expected none from quantization.'{IN}'=false"),
    ("mlx", mlx(bits=8), "shape \\(40, 8\\), expected \\(40, 16\\) from hidden_size\\*quantization.bits/32=16"),
    ("mlx", mlx(group_size=128), "rows of hidden_size=64 numbers, expected a multiple of quantization.group_si"),
    ("mlx", mlx(mode="mxfp4"), "scales: dtype BF16, expected U8 from quantization.mode=mxfp4"),
    ("mlx", mlx(**{GATE: {"bits": 8, "group_size": 64}}), f"{GATE}.w.*\\(4, 16\\) from .*quantization.'{GATE}'.bits"),
    ("mlx", nan(f"{IN}.scales"), f"{IN}.weight: affine-4bit-g32 with the scale nan in group 0 of row 0, expected fi"),
    ("mlx", nan(f"{UP}.biases"), f"{UP}.weight\\[0\\]: .*w3.weight: affine-4bit-g32 with the bias nan in group 0 of"),
    ("int4-g32", key("quantization_config", [1]), "quantization_config: \\[1\\]"),
    ("int4-g32", setting(config_groups={}), "config_groups: {}, expected an object of schemes"),
    ("int4-g32", setting(config_groups={"W4A16": ["Linear"]}), "config_groups.W4A16: \\['Linear'\\], expected an ob"),
    ("int4-g32", setting(ignore="lm_head"), "ignore: 'lm_head', expected a list of names, classes and re:expression"),
    ("int4-g32", setting(ignore=["re:("]), "ignore: \\['re:\\('\\]"),
    ("int4-g32", scheme(targets=[1]), f"{GROUP}.targets: \\[1\\], expected a list of names"),
    ("int4-g32", args(group_size=None), f"{GROUP}.weights.group_size: null contradicts strategy=group"),
    ("int4-g32", args(strategy="tensor", group_size=None), "strategy: 'tensor'"),
    ("int4-g32", both(setting(format="float-quantized"), scheme(format=None, weights=BLOCK)), "block_structure: \\["),
    ("int4-g32", scheme(input_activations=STATIC | {"symmetric": False}), "symmetric: false"),
    ("int4-g32", drop("weight_packed"), f"missing {OUT}.weight_packed, expected it from format=pack-quantized"),
    ("int4-g32", drop("weight_scale"), f"missing {OUT}.weight_scale, expected it from config_groups.group_0.weights"),
    ("int4-g32", drop("weight_shape"), f"missing {OUT}.weight_shape, expected it from format=pack-quantized"),
    ("int4-g32-zero", drop("weight_zero_point"), "weight_zero_point, expected it from .*weights.symmetric=false"),
    ("float8-tensor", drop("input_scale"), f"missing {OUT}.input_scale, expected it from .*input_activations.dynami"),
    ("int8-channel", drop("weight"), f"missing {OUT}.weight, expected it from config_groups.group_0.weights.type"),
    ("int4-g32", shaped("weight_packed", (64, 4)), "shape \\(64, 4\\), expected \\(64, 8\\) from .*weights.num_bits"),
    ("int4-g32", shaped("weight_packed", (64, 8), "U32"), "weight_packed: dtype U32, expected I32 from format=pack-"),
    ("int4-g32", shaped("weight_scale", (64, 1)), "shape \\(64, 1\\), expected \\(64, 2\\) from .*weights.group_siz"),
    ("int8-channel", shaped("weight_scale", (64,)), "shape \\(64,\\), expected \\(64, 1\\) from .*strategy=channel="),
    ("float8-tensor", shaped("weight_scale", (64, 1)), "shape \\(64, 1\\), expected \\(1,\\) from .*strategy=tensor"),
    ("float8-block24x48", shaped("weight_scale", (2, 2)), "shape \\(2, 2\\), expected \\(3, 2\\) from .*block_struc"),
    ("int4-g32-zero", shaped("weight_zero_point", (64, 2)), "expected \\(8, 2\\) from hidden_size\\*.*num_bits/32=8"),
    ("int4-g32", shaped("weight_zero_point", (8, 2), "I32"), "1 unexpected beside the 21 tensors: .*weight_zero_poi"),
    ("int4-g32", shaped("weight_g_idx", (64,), "I32"), "1 unexpected beside the 21 tensors: .*weight_g_idx"),
    ("int4-g32", shaped("input_scale", (1,), "F32"), "1 unexpected beside the 21 tensors: .*input_scale"),
    ("int8-channel", shaped("weight", (64, 64), "F8_E4M3"), "weight: dtype F8_E4M3, expected I8 from .*weights.type"),
    ("int8-channel", shaped("weight", (64, 32)), "weight: shape \\(64, 32\\), expected \\(64, 64\\) from hidden_siz"),
    ("int4-g32", filled("weight_shape", np.array([64, 128], "<i8"), "I64"), "weight_shape: \\(64, 128\\), expected"),
    ("float8-tensor", filled("input_scale", np.array([-1.0], "<f4"), "F32"), "input_scale: -1.0, expected a positiv"),
    ("float8-channel", filled("weight", np.full((64, 64), 127, "u1"), "F8_E4M3"), "float8-channel with the code nan"),
    ("int4-g32", filled("weight_scale", np.full((64, 2), 32640, "<u2"), "BF16"), "int4-g32 with the scale inf in gr"),
    ("int4-g32", setting(ignore=["re:.*out_proj"]), f"{OUT}.weight_scale|weight_packed: expected none, as ignore na"),
    ("int4-g32", scheme(targets=["re:.*in_proj"]), "weight_packed: expected none, as no target matches it"),
    ("int4-g32", scheme(targets=["re:.*"]), "missing model.embed_tokens.weight_packed, expected it from format=pack"),
    ("int4-g32", args(group_size=48), "\\.weight: hidden_size=64, expected a multiple of .*group_size=48"),
    ("int4-g32", args(num_bits=8), "weight_packed: shape .*, expected .* from hidden_size\\*.*num_bits/32=16"),
    ("int4-g32", args(actorder="group"), "missing .*weight_g_idx, expected it from config_groups.group_0.weights.ac"),
    ("int8-channel", args(num_bits=8, type="int", strategy="group"), "weight_scale: shape .*group_size=2"),
    ("int4-g32", setting(format="int-quantized"), "group_0.format: 'pack-quantized'"),
    ("gptq", setting(group_size=0), "group_size: 0, expected a positive integer, or -1 for whole rows"),
    ("gptq", setting(group_size=True), "group_size: true, expected a positive integer"),
    ("gptq", setting(checkpoint_format="gptq", format="gptq_v2"), "format: 'gptq_v2'"),
    ("awq", setting(modules_to_not_convert="gate"), "modules_to_not_convert: 'gate', expected a list"),
    ("gptq", drop("scales"), "missing .*out_proj.scales, expected it from quant_method"),
    ("gptq", drop("qzeros"), "missing .*out_proj.qzeros, expected it from quant_method"),
    ("gptq", shaped("qweight", (64, 8), "I32"), "shape \\(64, 8\\), expected \\(8, 64\\) from hidden_size\\*bits/32"),
    ("gptq", shaped("qzeros", (1, 8), "I32"), "shape \\(1, 8\\), expected \\(2, 8\\) from hidden_size/group_size=2"),
    ("gptq", shaped("scales", (64, 2), "F16"), "shape \\(64, 2\\), expected \\(2, 64\\) from hidden_size/group_size"),
    ("gptq", shaped("g_idx", (32,), "I32"), "g_idx: shape \\(32,\\), expected \\(64,\\) from hidden_size=64"),
    ("gptq", shaped("qweight", (8, 64), "F32"), "qweight: dtype F32, expected I32 from quant_method"),
    ("gptq", shaped("scales", (2, 64), "I32"), "scales: dtype I32, expected BF16 or F16 or F32 from quant_method"),
    ("gptq", shaped("bias", (64,), "F16"), "1 unexpected beside the 21 tensors: .*out_proj.bias"),
    ("gptq", filled("qzeros", np.full((2, 8), 0x7777777F, "<u4"), "I32"), "qzeros: a zero of 15 in .* gptq, which is"),
    ("gptq-sym", filled("qzeros", np.full((2, 8), 0x77777776, "<u4"), "I32"), "a zero of 7, expected 8 from sym=true"),
    ("gptq", filled("g_idx", GROUPS[::-1].copy(), "I32"), "columns in another order, expected group_size=32 of each"),
    ("gptq", both(setting(desc_act=True), filled("g_idx", GROUPS + 1, "I32")), "group 2 of column 32, expected 0 to 1"),
    ("gptq", both(setting(desc_act=True), drop("g_idx")), "missing .*g_idx, expected it from desc_act=true"),
    ("gptq", filled("scales", HALF_NAN, "F16"), r"weight: gptq-4bit-g32 with the scale nan in group 1 of row 5"),
    ("gptq", setting(group_size=48), "rows of hidden_size=64 numbers, expected a multiple of group_size=48 .config.js"),
    ("awq", setting(modules_to_not_convert=["conv.out_proj"]), "qweight: expected none from modules_to_not_convert"),
    ("awq", shaped("weight", (64, 64), "F16"), "out_proj.weight stands beside .*out_proj.qweight, expected one of"),
    ("awq", both(key("intermediate_size", 60), setting(group_size=-1)), "feed_forward_size=60, hidden_size=64, expect"),
    ("mlx", both(mlx(**{GATE: SMALL}), *PLAIN_GATE[:2]), f"missing {GATE}.scales, expected it from quantization"),
    ("int4-g32", both(setting(format="mixed-precision"), scheme(format=None)), "group_0.format: null"),
]


def read_whole(path: Path) -> dict[str, StoredTensor]:
    """All that is checked before anything computes."""
    config = read_config(path)
    tensors = read_tensors(path, config)
    for tensor in tensors.values():
        require_finite(tensor)
    input_roundings(path, config)
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize(("base", "edit", "named"), REFUSED, ids=[f"{base}-{text[:50]}" for base, _, text in REFUSED])
def test_what_does_not_fit_is_named_in_one_line(base: str, edit: Edit, named: str, tmp_path: Path):
    raw, tensors = made(base)
    edit(raw, tensors)
    write(tmp_path / "x", raw, tensors)
    with pytest.raises((CheckpointError, ConfigError), match=rf"^{tmp_path / 'x'}.*(?:{named}).*\Z"):
        read_whole(tmp_path / "x")


OLD_AWQ = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
ACCEPTED: list[tuple[str, Edit, str]] = [  # what was changed, and whether the weights of OUT are what they were
    ("gptq", both(setting(desc_act=True), filled("g_idx", GROUPS[::-1].copy(), "I32")), "other"),
    ("gptq", both(setting(checkpoint_format="gptq_v2"), filled("qzeros", ONES, "I32")), "other"),
    ("gptq", both(*(drop(name) for name in whole("gptq")[1] if name.endswith("g_idx"))), "same"),
    ("gptq", setting(lm_head=True, true_sequential=True), "same"),
    ("awq", key("quantization_config", OLD_AWQ), "same"),
    ("awq", both(setting(modules_to_not_convert=["conv.out_proj"]), *PLAIN_OUT), "plain"),
    ("mlx", both(mlx(**{GATE: False}), *PLAIN_GATE), "same"),
    ("int4-g32", setting(format="mixed-precision"), "same"),
]


@pytest.mark.parametrize(("base", "edit", "weights"), ACCEPTED)
def test_what_its_settings_say_is_read(base: str, edit: Edit, weights: str, tmp_path: Path):
    """The controls of some that are refused."""
    raw, tensors = made(base)
    before = read_whole(write(tmp_path / "x", raw, tensors))[f"{OUT}.weight"].rows(slice(None))
    edit(raw, tensors)
    after = read_whole(write(tmp_path / "y", raw, tensors))[f"{OUT}.weight"]
    assert np.array_equal(before, after.rows(slice(None))) == (weights == "same")
    assert (after.dtype == "F16") == (weights == "plain")


@pytest.mark.parametrize("shape", [(3, 64, 64), (64, 64), (4, 64, 32)])
def test_experts_that_are_not_quantised_have_their_shape(shape: tuple[int, ...], tmp_path: Path):
    raw, tensors = made("mlx")
    unannounced(raw, tensors)
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(("scales", "biases"))}
    for name in [each for each in plain if plain[each][0] == "U32"]:
        shaped(name, (*plain[name][1][:-1], 64), "BF16")(raw, plain)
    assert lfm2np.load(write(tmp_path / "x", raw, plain)).config == config_of(raw)
    shaped(f"{UP}.weight", shape)(raw, plain)
    with pytest.raises(CheckpointError, match=rf"{UP}.weight: shape .*, expected \(4, 64, 64\) from "):
        read_whole(write(tmp_path / "x", raw, plain))


WORDS = ("affine", "mxfp4", "Linear", "int", "group", "re:.*", "channel", "x")
KEYS = ("bits", "group_size", "mode", "weights", "targets", "num_bits", "strategy", "group_0", "quant_method", IN, GATE)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 200) | st.floats(allow_nan=False) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)


def objects(value: object) -> list[dict[str, Any]]:
    """All objects within one."""
    return [value, *(inner for each in value.values() for inner in objects(each))] if isinstance(value, dict) else []


@pytest.mark.slow
@given(data=st.data(), base=st.sampled_from(["mlx", "int4-g32-zero", "int8-channel", "float8-tensor", "gptq", "awq"]))
def test_damage_is_one_line_or_none(data: st.DataObject, base: str, tmp_path_factory: pytest.TempPathFactory):
    """Settings, names, shapes and bytes at random: the directory is read, or one line says what is wrong."""
    raw, tensors = made(base)
    for _ in range(data.draw(st.integers(0, 2))):
        where = data.draw(st.sampled_from(objects(raw)))
        where[data.draw(st.sampled_from([*sorted(where), *KEYS]))] = data.draw(values)
    for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=2, unique=True)):
        dtype, shape, content = tensors.pop(name)
        what = data.draw(st.sampled_from(["drop", "rename", "shape", "bytes", "dtype"]))
        if what == "rename":
            other = data.draw(st.sampled_from([name + "s", name.replace("scale", "zero"), "x"]))
            tensors[other] = (dtype, shape, content)
        if what == "shape":
            tensors[name] = (dtype, (*shape[1:], shape[0]), content)
        if what == "bytes":
            at = data.draw(st.integers(0, len(content) - 2))
            changed = content[:at] + data.draw(st.binary(min_size=2, max_size=2)) + content[at + 2 :]
            tensors[name] = (dtype, shape, changed[: len(content)])
        if what == "dtype":
            others = [kind for kind in ("U32", "I32", "F32", "BF16", "F16", "U8", "I8") if kind != dtype]
            fits = [kind for kind in others if BYTES.get(kind, 2) == BYTES.get(dtype, 2)]
            tensors[name] = (data.draw(st.sampled_from(fits or [dtype])), shape, content)
    path = write(tmp_path_factory.mktemp("x") / "x", raw, tensors)
    try:
        read_whole(path)
    except (CheckpointError, ConfigError) as problem:
        assert "\n" not in str(problem) and str(path) in str(problem)
