"""An engine that rounds its inputs as the checkpoint says is right under the format w8a8, and under no float format."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_directories import with_inputs, written
from truths import truth_of

import lfm2np
from lfm2np.arithmetic.ieee import BFLOAT16, Ieee
from lfm2np.arithmetic.matrix import Matrix, Weights
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.packed.compressed import InputRounding
from lfm2np.checkpoint.tensors import input_roundings
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.errors import RequestError
from lfm2np.oracle.judging import formats
from lfm2np.oracle.judging.formats import FORMATS, inputs_of, rounding_of
from lfm2np.oracle.judging.noise import noise_of
from lfm2np.oracle.judging.verdict import LIMIT, root_mean_square
from lfm2np.truth import reference

IDS = tuple(int(integer) for integer in np.random.default_rng(3).integers(8, 40, 30))
DYNAMIC = InputRounding("int8", "token", 0, None, 0, True)
X = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)


@dataclass(frozen=True)
class Rounded(Ieee):
    """bfloat16, and what is told of each product's inputs: an engine of W8A8."""

    told: dict[str, InputRounding] = field(default_factory=dict)
    of: dict[int, InputRounding | None] = field(default_factory=dict)

    def prepare_matrix(self, weight: Weights, what: str) -> Matrix:
        matrix = super().prepare_matrix(weight, what)
        self.of[id(matrix)] = self.told.get(what.split(" + ")[0])
        return matrix

    def linear(self, x: Any, matrix: Matrix, bias: Any = None) -> Any:
        return super().linear(rounding_of(self.of[id(matrix)], 1)(x), matrix, bias)


@pytest.mark.parametrize(
    ("changes", "draw", "expected"),
    [
        ({}, 0, formats.int8_rows(X)),
        ({"symmetric": False}, 0, formats.int8_rows_asymmetric(X)),
        ({"of": "tensor"}, 0, formats.int8_rows(X.reshape(1, -1)).reshape(3, 64)),
        ({"of": "tensor"}, 1, formats.int8_rows(X)),
        ({"of": "group", "group_size": 32}, 0, formats.int8_rows(X.reshape(6, 32)).reshape(3, 64)),
        ({"kind": "float8"}, 0, formats.float8_rows(X)),
        ({"scale": 0.01, "zero": 3, "symmetric": False}, 0, formats.int8_static(X, 0.01, 3)),
        ({"kind": "float8", "scale": 0.01}, 0, formats.float8_scaled(X, np.float32(0.01))),
    ],
)
def test_what_is_told_is_done(changes: dict[str, Any], draw: int, expected: np.ndarray) -> None:
    assert np.array_equal(rounding_of(replace(DYNAMIC, **changes), draw)(X), expected)
    assert rounding_of(None, draw)(X) is X


def test_every_second_engine_takes_the_largest_scale_of_those_that_share_a_product(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x", "float8-tensor")
    config = read_config(path)
    tensors, scales = read_tensors(path, config), input_roundings(path, config)
    names = [f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "qkv"]
    separate, largest = (
        [inputs_of(FORMATS["w8a8"], path, config, tensors, draw)[name] for name in names] for draw in (0, 1)
    )
    expected = [float(scales[name].scale or 0) for name in names]
    assert len({scheme.scale for scheme in scales.values()}) > 3, "each has its own"
    assert [inputs.rounded.keywords["scale"] for inputs in separate] == expected
    assert [inputs.rounded.keywords["scale"] for inputs in largest] == [max(expected)] * 3
    assert [inputs.rows for inputs in separate] == [tensors[name].shape[0] for name in names]


@pytest.mark.slow
@pytest.mark.rounding
@pytest.mark.parametrize(("name", "told_as"), [("int8-channel", {}), ("float8-channel", {}), ("float8-tensor", {})])
def test_a_right_engine_is_about_as_far_off_as_the_format_says(name: str, told_as: Any, tmp_path: Path) -> None:
    path = with_inputs(tmp_path / "x", name, **told_as)
    model = lfm2np.load(path)
    engine = Rounded(BFLOAT16.name, np.float32, 4, BFLOAT16.keep, input_roundings(path, model.config))
    weights = prepare_weights(read_tensors(path, model.config), model.config, engine)
    truth = truth_of(model, IDS, {})
    rows = reference.logits(weights, model.config, engine, IDS[:-1])
    errors = np.take_along_axis(engine.log_softmax(rows), truth.columns, axis=1) - truth.logprobs
    sizes = {}
    for form in ("w8a8", "bfloat16"):
        (noise,) = noise_of(model, [truth], form)
        ratios = np.ravel(errors / noise.scales(truth)).tolist()
        sizes[form] = root_mean_square(ratios)
        assert form != "w8a8" or max(map(abs, ratios)) < LIMIT
    assert 0.2 < sizes["w8a8"] < 2.0 < sizes["bfloat16"]


def test_a_checkpoint_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x", "int4-g32")
    config = read_config(path)
    with pytest.raises(RequestError, match=r"format w8a8: .* does not tell how inputs are rounded"):
        inputs_of(FORMATS["w8a8"], path, config, read_tensors(path, config), 0)
