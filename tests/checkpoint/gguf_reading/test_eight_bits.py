"""locate on what llama.cpp's kernels compute: products with quantised weights, of inputs rounded to 8 bits by blocks.

The engine here rounds in float32, operation by operation, as ggml-quants.c does; locate works it out in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from blocks_drawn import quantised_tensors
from builders import raw_config
from gguf_file import Tensor, gguf_bytes, model_keys

from lfm2np.arithmetic.ieee import FLOAT32, Ieee, unchanged
from lfm2np.arithmetic.matrix import Matrix
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.checkpoint.files import read_tensors
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED, values_of
from lfm2np.checkpoint.gguf.names import place_of
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine.loading import Model
from lfm2np.oracle.locate.dump import Dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.locate.rounded_inputs import rounded
from lfm2np.oracle.locate.spread import Measured
from lfm2np.oracle.recorders.lfm2np_recorder import record

pytestmark = pytest.mark.slow

CONFIG = parse_config(raw_config(hidden_size=256, intermediate_size=256, vocab_size=64), "config.json")
IDS = [int(integer) for integer in np.random.default_rng(4).integers(8, 64, 20)]
TYPES = ("Q8_0", "Q4_1", "MXFP4", "Q4_K", "Q6_K")
ONE, HALF = np.float32(1.0), np.float32(0.5)
Recorded = Mapping[str, np.ndarray]


# --- the engine


def away_from_zero(x: np.ndarray) -> np.ndarray:
    """C's roundf."""
    return np.trunc(x + np.copysign(HALF, x))


def q8_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [n, 32] -> what the integers and the scale make, and what Q8_1 has as the sum, [n, 1]."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127.0)
    inverse = np.divide(ONE, scale, out=np.zeros_like(scale), where=scale > 0)
    integers = away_from_zero(x * inverse)
    total = (integers.sum(axis=-1, keepdims=True) * scale).astype(np.float16).astype(np.float32)
    return integers * scale.astype(np.float16).astype(np.float32), total


def q8_k(x: np.ndarray) -> np.ndarray:
    """float32 [n, 256]."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)
    factor = np.divide(np.float32(-127.0), largest, out=np.zeros_like(largest), where=largest != 0)
    integers = np.minimum(np.float32(127.0), np.rint(factor * x))
    return integers * np.divide(ONE, factor, out=np.zeros_like(factor), where=factor != 0)


def minima_of(rows: np.ndarray, dtype: str) -> np.ndarray:
    """[O, B], as llama.cpp has them: added, not subtracted."""
    halves = rows.reshape(len(rows), -1, QUANTISED[dtype].size)[..., 2:4]
    return np.ascontiguousarray(halves).view("<f2")[..., 0].astype(np.float32)


@dataclass(frozen=True)
class Kernels(Ieee):
    """float32, but for products."""

    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    minima: dict[int, np.ndarray] = field(default_factory=dict)
    dtypes: dict[int, str] = field(default_factory=dict)
    kept: list[Matrix] = field(default_factory=list)  # as they are known by their ids

    def prepare_matrix(self, weight: Any, what: str) -> Matrix:
        matrix = super().prepare_matrix(weight, what)
        self.kept.append(matrix)
        stored = [self.tensors[name] for name in what.split(" + ")]
        self.dtypes[id(matrix)] = stored[0].dtype
        if stored[0].dtype in ("Q4_1", "Q5_1"):
            self.minima[id(matrix)] = np.concatenate([minima_of(*tensor.arrays, tensor.dtype) for tensor in stored])
        return matrix

    def linear(self, x: Any, matrix: Matrix, bias: Any = None) -> Any:
        dtype = self.dtypes[id(matrix)]
        if dtype == "F16":
            return super().linear(x.astype(np.float16).astype(np.float32), matrix, bias)
        if QUANTISED[dtype].weights == 256:
            return super().linear(q8_k(x.reshape(-1, 256)).reshape(x.shape), matrix, bias)
        rounded, sums = q8_0(x.reshape(-1, 32))
        output = super().linear(rounded.reshape(x.shape), matrix, bias)
        if dtype not in ("Q4_1", "Q5_1"):
            return output
        beside = sums.reshape(len(x), -1) - rounded.reshape(len(x), -1, 32).sum(axis=-1)
        return output + beside @ self.minima[id(matrix)].T


def drawn_tensors(dtype: str) -> dict[str, Tensor]:
    if dtype in QUANTISED:
        exponents = (1, 3) if QUANTISED[dtype].weights == 256 else (5, 8)  # superblocks have scales of scales
        return quantised_tensors(CONFIG, dtype, seed=7, exponents=exponents)
    tensors = {}
    for name, tensor in quantised_tensors(CONFIG, "Q8_0", seed=7, exponents=(5, 8)).items():
        values = np.frombuffer(tensor.content, np.uint8)
        if tensor.dtype == "Q8_0":
            halves = values_of(values.reshape(tensor.shape[0], -1), "Q8_0").astype("<f2")
            tensor = Tensor("F16", tensor.shape, halves.tobytes())
        tensors[name] = tensor
    return tensors


def read(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        path.write_bytes(gguf_bytes(model_keys(CONFIG), tensors))
        return read_tensors(path, CONFIG)


@cache
def checkpoint(dtype: str) -> dict[str, StoredTensor]:
    return read(drawn_tensors(dtype))


def recorded_of(tensors: Mapping[str, StoredTensor], rounds: bool = True) -> Recorded:
    numerics: Any = Kernels("kernels", np.float32, 4, unchanged, tensors) if rounds else FLOAT32
    return record(Model(Path("x.gguf"), CONFIG, numerics, prepare_weights(tensors, CONFIG, numerics)), IDS)


@cache
def recorded(dtype: str) -> Recorded:
    return recorded_of(checkpoint(dtype))


def report_of(dtype: str, dumped: Recorded, precision: str = "q8") -> Report:
    kept = {name: np.asarray(value, np.float64) for name, value in dumped.items() if name != "token_ids"}
    dump = Dump(np.array(IDS), kept, dict.fromkeys(kept, "float32"), (), ())
    return locate(checkpoint(dtype), CONFIG, dump, precision)


# --- right engines


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", [*TYPES, "F16"])
def test_kernels_that_round_their_inputs_are_right_within_the_bounds_of_float32(dtype: str) -> None:
    report = report_of(dtype, recorded(dtype))
    assert report.findings == () and max(check.error for check in report.checks) < 0.8
    assert report.rounds_inputs


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_1", "Q4_K"])
def test_without_the_rounding_they_would_be_called_wrong(dtype: str) -> None:
    """The control: how far the bounds are from taking 8 bits for noise."""
    report = report_of(dtype, recorded(dtype), "float32")
    assert report.findings[0].name == "model.layers.0.conv.in_proj" and report.findings[0].error > 100


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_K"])
def test_engines_that_multiply_in_float32_are_right_too(dtype: str) -> None:
    report = report_of(dtype, recorded_of(checkpoint(dtype), rounds=False))
    assert (report.findings, report.rounds_inputs) == ((), False)


@pytest.mark.rounding
@pytest.mark.parametrize(("dtype", "rounds"), [("Q4_1", False), ("Q4_K", True)])
def test_where_products_are_not_dumped_either_way_may_be(dtype: str, rounds: bool) -> None:
    recording = recorded(dtype) if rounds else recorded_of(checkpoint(dtype), rounds=False)
    for hidden in (("in_proj", "w1", "q_proj"), ("gated", "out_proj")):
        part = {name: value for name, value in recording.items() if not name.endswith(hidden)}
        assert report_of(dtype, part).findings == (), hidden


# --- wrong ones


def neighbours_scale(rows: np.ndarray, dtype: str) -> np.ndarray:
    damaged = rows.copy()
    for at in QUANTISED[dtype].halves:
        damaged[:, :, at : at + 2] = np.roll(rows[:, :, at : at + 2], 1, axis=1)
    return damaged


def no_minimum(rows: np.ndarray, dtype: str) -> np.ndarray:
    damaged = rows.copy()
    damaged[:, :, 2:4] = 0
    return damaged


def one_scale_off(rows: np.ndarray, dtype: str) -> np.ndarray:
    """The last bit of a scale, of one block of one row."""
    damaged = rows.copy()
    damaged[5, -1, QUANTISED[dtype].halves[0]] ^= 1
    return damaged


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("dtype", "damage", "name"),
    [
        ("Q8_0", neighbours_scale, "model.layers.0.feed_forward.w2"),
        ("Q4_K", no_minimum, "model.layers.1.self_attn.k_proj"),
        ("Q4_1", no_minimum, "model.layers.0.conv.in_proj"),
        ("Q4_0", one_scale_off, "model.layers.1.self_attn.k_proj"),
        ("Q6_K", one_scale_off, "model.layers.0.conv.out_proj"),
    ],
)
def test_a_wrong_dequantisation_is_named_and_nothing_else(dtype: str, damage: Any, name: str) -> None:
    tensors = drawn_tensors(dtype)
    theirs = place_of(f"{name}.weight").name
    tensor = tensors[theirs]
    rows = np.frombuffer(tensor.content, np.uint8).reshape(tensor.shape[0], -1, QUANTISED[dtype].size)
    tensors[theirs] = Tensor(dtype, tensor.shape, damage(rows, dtype).tobytes())
    report = report_of(dtype, recorded_of(read(tensors)))
    assert [finding.name for finding in report.findings] == [name]
    assert ("channel 5 of" in report.findings[0].channels) == (damage is one_scale_off)


# --- the rounding itself


def test_only_what_lies_in_the_middle_between_two_results_may_be_either() -> None:
    """An integer, and a float16 scale; everything else moves by what float32 may lose."""
    x = np.array([[127.0, 0.5, 3.0, -7.25, *[0.0] * 28]], np.float32)
    spread = rounded(as_measured(x), "Q8_0").spread[0]
    assert spread[1] == pytest.approx(1.0, abs=1e-3) and np.delete(spread, 1).max() < 1e-4
    x = np.array([[127.0 * (1.0 + 2.0**-11), 3.0, *[0.0] * 30]], np.float32)
    assert rounded(as_measured(x), "Q8_0").spread[0, :2] == pytest.approx([127 * 2.0**-10, 3 * 2.0**-10], rel=1e-2)


def as_measured(x: np.ndarray) -> Measured:
    return Measured(x.astype(np.float64), np.abs(x.astype(np.float64)) * 2.0**-24)
