"""Directories of AutoGPTQ and AutoAWQ: both checkpoint formats, orders of columns, AWQ's order of outputs."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
from auto_files import awq, gptq, quantised_matrix, quantised_tensors
from mlx_files import config_of, raw_of, write
from packed_values import fractions

from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.stored import widen

OUT = "model.layers.0.conv.out_proj.weight"


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


def test_a_file_without_g_idx_has_its_columns_in_order(tmp_path: Path):
    raw = raw_of(False)
    tensors, expected = quantised_tensors(config_of(raw), gptq())
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")}
    path = write(tmp_path / "x", raw | gptq(), kept)
    assert fractions(widen(read_tensors(path, read_config(path))[OUT].values, "")) == expected[OUT]()


def test_an_awq_module_that_is_not_converted_is_plain(tmp_path: Path):
    raw = raw_of(False)
    tensors, _ = quantised_tensors(config_of(raw), awq())
    for part in ("qweight", "qzeros", "scales"):
        del tensors[OUT.replace("weight", part)]
    tensors[OUT] = ("F16", (64, 64), bytes(64 * 64 * 2))
    path = write(tmp_path / "x", raw | awq(modules_to_not_convert=["conv.out_proj"]), tensors)
    assert read_tensors(path, read_config(path))[OUT].dtype == "F16"


def test_a_head_of_its_own_may_be_quantised(tmp_path: Path):
    raw = raw_of(False, tie_word_embeddings=False)
    tensors, expected = quantised_tensors(config_of(raw), gptq(lm_head=True))
    path = write(tmp_path / "x", raw | gptq(lm_head=True), tensors)
    assert (
        fractions(widen(read_tensors(path, read_config(path))["lm_head.weight"].values, ""))
        == expected["lm_head.weight"]()
    )


def test_old_names_of_awq_s_keys_are_its_keys(tmp_path: Path):
    settings = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    raw = raw_of(False)
    tensors, expected = quantised_tensors(config_of(raw), awq())
    path = write(tmp_path / "x", raw | {"quantization_config": settings}, tensors)
    assert fractions(widen(read_tensors(path, read_config(path))[OUT].values, "")) == expected[OUT]()


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
