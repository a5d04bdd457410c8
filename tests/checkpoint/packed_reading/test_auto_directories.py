"""Directories of AutoGPTQ and AutoAWQ: both checkpoint formats, orders of columns, AWQ's order of outputs."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from auto_files import awq, gptq, quantised_matrix, quantised_tensors
from mlx_files import config_of, raw_of, write

import lfm2np
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.packed.activations import input_roundings
from lfm2np.checkpoint.stored import widen
from lfm2np.truth.layers import expected_tensors

PROMPT = [1, 7, 12, 3, 30, 21]
OUT, KEYS = "model.layers.0.conv.out_proj.weight", "model.layers.1.self_attn.k_proj.weight"
FORMS = {
    "gptq-4bit-g32": gptq(),
    "gptq-4bit-g64": gptq(group_size=64, sym=True),
    "gptq-8bit-g32": gptq(bits=8, checkpoint_format="gptq_v2"),
    "gptq-4bit-channel": gptq(group_size=-1),
    "gptq-4bit-g16": gptq(group_size=16, desc_act=True, checkpoint_format="gptq_v2"),
    "awq-4bit-g32": awq(),
    "awq-4bit-channel": awq(group_size=-1),
}


def fractions(values: np.ndarray) -> list[list[Fraction]]:
    assert values.dtype == np.float64
    return [[Fraction(value) for value in row] for row in values.tolist()]


@pytest.mark.parametrize("name", FORMS)
def test_every_weight_is_exactly_what_its_format_says(name: str, tmp_path: Path):
    raw = raw_of(False)
    tensors, expected = quantised_tensors(config_of(raw), FORMS[name])
    path = write(tmp_path / "x", raw | FORMS[name], tensors)
    loaded = read_tensors(path, read_config(path))
    assert {key: value.shape for key, value in loaded.items()} == expected_tensors(config_of(raw))
    assert {loaded[key].dtype for key in expected} == {name}
    for key in (OUT, KEYS):
        assert fractions(widen(loaded[key].values, name)) == expected[key]()
    assert input_roundings(path, read_config(path)) == {}


@pytest.mark.parametrize(
    ("name", "mixture"), [("gptq-4bit-g16", False), ("awq-4bit-g32", False), ("awq-4bit-g32", True)]
)
def test_a_quantised_directory_is_its_model(name: str, mixture: bool, tmp_path: Path):
    raw = raw_of(mixture)
    path = write(tmp_path / "x", raw | FORMS[name], quantised_tensors(config_of(raw), FORMS[name], 1)[0])
    logits = lfm2np.load(path).logits(PROMPT)
    assert np.isfinite(logits).all() and np.ptp(logits) > 0
    assert lfm2np.load(path, weights="streamed").logits(PROMPT).tobytes() == logits.tobytes()


def test_a_zero_is_stored_less_one_in_the_first_format_only(tmp_path: Path):
    """The same bytes: every weight differs by its scale."""
    raw, stored_tensors = raw_of(False), []
    tensors, _ = quantised_tensors(config_of(raw), gptq())
    for form in ("gptq", "gptq_v2"):
        path = write(tmp_path / form, raw | gptq(checkpoint_format=form), tensors)
        stored_tensors.append(read_tensors(path, read_config(path))[OUT])
    first, second = (widen(tensor.values, "") for tensor in stored_tensors)
    scales = np.repeat(np.frombuffer(tensors[OUT.replace("weight", "scales")][2], "<f2").reshape(2, 64).T, 32, axis=1)
    assert np.array_equal(second - first, scales.astype(np.float64))


def edited(tmp_path: Path, settings: dict[str, Any], part: str, values: np.ndarray, dtype: str) -> Path:
    raw = raw_of(False)
    tensors, _ = quantised_tensors(config_of(raw), settings)
    name = OUT.replace("weight", part)
    tensors[name] = (dtype, values.shape, values.tobytes())
    return write(tmp_path / "x", raw | settings, tensors)


def refused(path: Path, message: str) -> None:
    with pytest.raises(lfm2np.CheckpointError, match=message) as caught:
        lfm2np.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_readers_of_the_first_format_disagree_on_is_refused(tmp_path: Path):
    zeros = np.full((2, 8), 0x7777777F, "<u4")
    refused(edited(tmp_path, gptq(), "qzeros", zeros, "I32"), "a zero of 15 in checkpoint_format gptq, which is 16 to")
    zeros = np.full((2, 8), 0x77777776, "<u4")
    refused(edited(tmp_path, gptq(sym=True), "qzeros", zeros, "I32"), "a zero of 7, expected 8 from sym=true")
    path = edited(tmp_path, gptq(checkpoint_format="gptq_v2"), "qzeros", np.full((2, 8), 0xFFFFFFFF, "<u4"), "I32")
    assert np.isfinite(lfm2np.load(path).logits(PROMPT)).all()


def test_columns_that_are_not_in_the_order_that_is_told_are_refused(tmp_path: Path):
    groups = np.arange(64, dtype="<i4") // 32
    turned = groups[::-1].copy()
    refused(
        edited(tmp_path, gptq(), "g_idx", turned, "I32"), "columns in another order, expected group_size=32 of each"
    )
    far = groups + 1
    refused(edited(tmp_path, gptq(desc_act=True), "g_idx", far, "I32"), "group 2 of column 32, expected 0 to 1")
    assert lfm2np.load(edited(tmp_path, gptq(desc_act=True), "g_idx", turned, "I32")).config == config_of(raw_of(False))


def test_a_file_without_g_idx_has_its_columns_in_order(tmp_path: Path):
    raw = raw_of(False)
    tensors, expected = quantised_tensors(config_of(raw), gptq())
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")}
    path = write(tmp_path / "x", raw | gptq(), kept)
    assert fractions(widen(read_tensors(path, read_config(path))[OUT].values, "")) == expected[OUT]()
    refused(write(path, raw | gptq(desc_act=True), kept), "missing .*g_idx, expected it from desc_act=true")


def test_rows_that_awq_cannot_pack_are_refused(tmp_path: Path):
    """Its words hold eight outputs."""
    raw = raw_of(False, intermediate_size=60)
    settings = awq(group_size=-1)
    tensors, _ = quantised_tensors(config_of(raw_of(False)), settings)
    path = write(tmp_path / "x", raw | settings, tensors)
    refused(path, "feed_forward_size=60, hidden_size=64, expected multiples of 8 from version=gemm")


def test_an_awq_module_that_is_not_to_be_converted_must_not_be(tmp_path: Path):
    raw = raw_of(False)
    tensors, _ = quantised_tensors(config_of(raw), awq())
    path = write(tmp_path / "x", raw | awq(modules_to_not_convert=["conv.out_proj"]), tensors)
    refused(path, "out_proj.qweight: expected none from modules_to_not_convert, which has 'conv.out_proj'")
    module = OUT.removesuffix(".weight")
    tensors[OUT] = ("F16", (64, 64), bytes(64 * 64 * 2))
    refused(write(path, raw | awq(), tensors), "out_proj.weight stands beside .*out_proj.qweight, expected one of them")
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"{module}.{part}"]
    write(path, raw | awq(modules_to_not_convert=["conv.out_proj"]), tensors)
    assert read_tensors(path, read_config(path))[OUT].dtype == "F16"


def test_a_head_of_its_own_may_be_quantised(tmp_path: Path):
    raw = raw_of(False, tie_word_embeddings=False)
    tensors, expected = quantised_tensors(config_of(raw), gptq(lm_head=True))
    path = write(tmp_path / "x", raw | gptq(lm_head=True), tensors)
    assert (
        fractions(widen(read_tensors(path, read_config(path))["lm_head.weight"].values, ""))
        == expected["lm_head.weight"]()
    )


CONFIGS: list[tuple[dict[str, Any], str]] = [
    (gptq(bits=3), "bits: 3 is not implemented, expected 4 or 8"),
    (gptq(bits=None), "bits: null is not implemented, expected 4 or 8"),
    (gptq(group_size=0), "group_size: 0, expected a positive integer, or -1 for whole rows"),
    (gptq(group_size=True), "group_size: true, expected a positive integer"),
    (gptq(sym=None), "sym: null, expected true or false"),
    (gptq(desc_act=1), "desc_act: 1, expected true or false"),
    (gptq(checkpoint_format="marlin"), "checkpoint_format: 'marlin' is not implemented, expected one of gptq, gptq_v2"),
    (gptq(checkpoint_format="gptq", format="gptq_v2"), "format: 'gptq_v2' contradicts checkpoint_format=gptq"),
    (gptq(is_marlin_format=True), "is_marlin_format: true is not implemented, expected false or no key"),
    (gptq(dynamic={"-:lm_head": {}}), "dynamic: {'-:lm_head': {}} is not implemented"),
    (gptq(rotation="hadamard"), "rotation: 'hadamard': not a key of gptq that is known here"),
    (awq(version="gemv"), "version: 'gemv' is not implemented, expected gemm"),
    (awq(zero_point=False), "zero_point: false is not implemented, expected true"),
    (awq(bits=8), "bits: 8 is not implemented, expected 4"),
    (awq(modules_to_not_convert="gate"), "modules_to_not_convert: 'gate', expected a list"),
    (awq(smooth=True), "smooth: true: not a key of awq that is known here"),
]


@pytest.mark.parametrize(
    ("settings", "message"), CONFIGS, ids=lambda case: case[:50] if isinstance(case, str) else None
)
def test_settings_that_are_not_implemented_are_refused(settings: dict[str, Any], message: str, tmp_path: Path):
    path = write(tmp_path / "x", raw_of(False) | settings, {})
    with pytest.raises(lfm2np.ConfigError) as caught:
        lfm2np.load(path)
    prefix = f"{path}/config.json: quantization_config.{message}"
    assert str(caught.value).startswith(prefix) and "\n" not in str(caught.value)


def test_old_names_of_awq_s_keys_are_its_keys(tmp_path: Path):
    settings = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    raw = raw_of(False)
    tensors, expected = quantised_tensors(config_of(raw), awq())
    path = write(tmp_path / "x", raw | {"quantization_config": settings}, tensors)
    assert fractions(widen(read_tensors(path, read_config(path))[OUT].values, "")) == expected[OUT]()


TENSORS: list[tuple[str, tuple[str, tuple[int, ...]] | None, str]] = [
    ("scales", None, "missing .*out_proj.scales, expected it from quant_method"),
    ("qzeros", None, "missing .*out_proj.qzeros, expected it from quant_method"),
    ("qweight", ("I32", (64, 8)), r"shape \(64, 8\), expected \(8, 64\) from hidden_size\*bits/32=8"),
    ("qzeros", ("I32", (1, 8)), r"shape \(1, 8\), expected \(2, 8\) from hidden_size/group_size=2"),
    ("scales", ("F16", (64, 2)), r"shape \(64, 2\), expected \(2, 64\) from hidden_size/group_size=2, hidden_size=64"),
    ("g_idx", ("I32", (32,)), r"g_idx: shape \(32,\), expected \(64,\) from hidden_size=64"),
    ("qweight", ("F32", (8, 64)), "qweight: dtype F32, expected I32 from quant_method"),
    ("scales", ("I32", (2, 64)), "scales: dtype I32, expected BF16 or F16 or F32 from quant_method"),
    ("bias", ("F16", (64,)), "1 unexpected beside the 21 tensors: .*out_proj.bias"),
]


@pytest.mark.parametrize(("part", "made", "message"), TENSORS)
def test_tensors_that_do_not_fit_are_refused_with_the_key_that_says_so(
    part: str, made: tuple[str, tuple[int, ...]] | None, message: str, tmp_path: Path
):
    raw = raw_of(False)
    tensors, _ = quantised_tensors(config_of(raw), gptq())
    name = OUT.replace("weight", part)
    tensors.pop(name, None)
    if made is not None:
        dtype, shape = made
        tensors[name] = (dtype, shape, bytes(int(np.prod(shape)) * (2 if dtype == "F16" else 4)))
    refused(write(tmp_path / "x", raw | gptq(), tensors), message)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path):
    scales = np.ones((2, 64), "<f2")
    scales[1, 5] = np.nan
    path = edited(tmp_path, gptq(), "scales", scales, "F16")
    refused(path, r"out_proj\.weight: gptq-4bit-g32 with the scale nan in group 1 of row 5, expected finite")


def test_a_group_size_that_rows_do_not_have_is_refused(tmp_path: Path):
    raw = raw_of(False)
    tensors, _ = quantised_tensors(config_of(raw), gptq())
    path = write(tmp_path / "x", raw | gptq(group_size=48), tensors)
    refused(path, r"rows of hidden_size=64 numbers, expected a multiple of group_size=48 \(config.json\)")


def test_a_matrix_made_by_these_tests_is_packed_as_the_formats_say():
    """The control: one code of one output, by hand."""
    tensors, _ = quantised_matrix("m", (8, 8), awq(group_size=-1), 3)
    exact = np.array(quantised_matrix("m", (8, 8), awq(group_size=-1), 3)[1]())
    words = np.frombuffer(tensors["m.qweight"][2], "<u4").reshape(8, 1)
    zeros = int(np.frombuffer(tensors["m.qzeros"][2], "<u4")[0])
    scales = np.frombuffer(tensors["m.scales"][2], "<f2")
    for output, place in ((0, 0), (1, 4), (2, 1), (6, 3), (7, 7)):
        code, zero = int(words[5, 0]) >> 4 * place & 15, zeros >> 4 * place & 15
        assert exact[output, 5] == Fraction(float(scales[output])) * (code - zero)
