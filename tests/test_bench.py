"""The benchmark script runs, and its floor has every product of a step."""

from __future__ import annotations

from pathlib import Path

import bench
import numpy as np
import pytest
import random_checkpoint as made
from builders import raw_config

import lfm2np
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.checkpoint.files import read_config
from lfm2np.truth.layers import matrix_parts, parameter_count

TORTURE = Path(__file__).parent.parent / "fixtures" / "torture"
SMALL, MIXTURE = TORTURE / "six_heads_two_kv", TORTURE / "moe_published"


@pytest.mark.rounding
def test_every_measurement_runs_on_a_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    cells = "prefill-6,decode-2x5"
    ours = "exact,float32,streamed,floor-float64,floor-float32"
    words = ["--model", str(SMALL), "--rounds", "1", "--threads", "1", "--cells", cells, "--sides", ours]
    bench.main(["steps", *words])
    printed = capsys.readouterr().out
    for row in cells.split(","):
        assert f"| {row} | " in printed


def test_a_side_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="floor-float32: its process ended in cell prefill-6"):
        bench.main(["--model", str(tmp_path), "--sides", "floor-float32", "--cells", "prefill-6"])


@pytest.mark.parametrize("directory", [SMALL, MIXTURE], ids=lambda path: path.name)
def test_the_floor_multiplies_by_every_matrix(directory: Path) -> None:
    config = read_config(directory)
    products = list(bench.linear_products(config, bench.cell_named("decode-2x5")))
    assert len(products) == len(list(matrix_parts(config)))
    numbers = sum(inputs * outputs for _, inputs, outputs in products)
    assert 0.9 * parameter_count(config) < numbers <= parameter_count(config)


RAW = raw_config(tie_word_embeddings=True)


def test_random_checkpoints_have_published_shapes() -> None:
    config = parse_config(made.published_config(made.SMALL), "config.json")
    assert parameter_count(config) == 354_483_968


def test_a_random_checkpoint_is_made_once_and_again_if_it_is_incomplete(tmp_path: Path) -> None:
    place = made.random_checkpoint(tmp_path / "model", RAW)
    model = lfm2np.load(place)
    assert model.weights.head.grid.slices == 1
    assert np.isfinite(model.logits([1, 2, 3])).all()
    weights, whole = place / "model.safetensors", (place / "model.safetensors").read_bytes()
    before = weights.stat().st_mtime_ns
    assert made.random_checkpoint(place, RAW) == place and weights.stat().st_mtime_ns == before
    weights.write_bytes(whole[:-1])
    made.random_checkpoint(place, RAW)
    assert weights.read_bytes() == whole
