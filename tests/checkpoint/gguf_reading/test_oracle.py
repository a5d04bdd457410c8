"""Judging with a model from a GGUF file: noise, operations and vectors are those of its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from blocks_drawn import quantised_tensors
from builders import raw_config
from gguf_file import gguf_bytes, model_keys
from truths import truth_of
from vocabularies import keys_of, write_directory, write_file

import lfm2np
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.engine.loading import Model
from lfm2np.engine.work.place import model_of, source_of
from lfm2np.oracle.judging.emulate import emulated
from lfm2np.oracle.judging.noise import noise_of
from lfm2np.oracle.judging.verdict import LIMIT, root_mean_square
from lfm2np.oracle.locate.spread import PRECISIONS, as_kept
from lfm2np.oracle.vectors.golden import make, model_facts, verify
from lfm2np.truth import reference

pytestmark = pytest.mark.slow

CONFIG = parse_config(raw_config(hidden_size=256, intermediate_size=256, vocab_size=300), "config.json")
IDS = tuple(int(integer) for integer in np.random.default_rng(3).integers(8, 300, 40))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    path.write_bytes(gguf_bytes(model_keys(CONFIG), quantised_tensors(CONFIG, "Q4_K", exponents=(4, 7))))
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return lfm2np.load(path)


@pytest.mark.rounding
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_right_engine_of_quantised_weights_is_about_as_far_off_as_its_format_says(
    path: Path, model: Model, name: str
) -> None:
    """Its weights rounded once to the format: with those of float32 or bfloat16 engines begin."""
    engine, truth = lfm2np.load(path, name), truth_of(model, IDS, {})
    (noise,) = noise_of(model, [truth], name)
    rows = reference.logits(engine.weights, engine.config, engine.numerics, IDS[:-1])
    errors = np.take_along_axis(engine.numerics.log_softmax(rows), truth.columns, axis=1) - truth.logprobs
    ratios = np.ravel((errors / noise.scales(truth))[:, ::8]).tolist()
    assert 0.1 < root_mean_square(ratios) < 2.5 and max(map(abs, ratios)) < LIMIT


@pytest.mark.rounding
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_engines_that_could_be_compute_in_float32_whatever_their_weights_come_as(name: str) -> None:
    for draw in range(8):
        weight, engine = np.random.default_rng(draw).normal(size=(6, 64)), emulated(name, 1, draw)
        assert engine.prepare_matrix(weight, "model.layers.0.conv.in_proj.weight").values.dtype == np.float32
        assert engine.embed(weight).dtype == np.float32


def test_what_float32_loses_of_a_weight_counts_as_the_engine_s() -> None:
    """Of float64 weights; those that float32 holds lose nothing in it."""
    weight = np.array([1.0 + 2.0**-30, 0.5, -(1.0 + 2.0**-26)])
    assert as_kept(weight, PRECISIONS["float32"]).spread.tolist() == [2.0**-30, 0.0, 2.0**-26]


def test_a_link_to_a_file_of_another_name_is_a_gguf_to_workers_too(path: Path, model: Model, tmp_path: Path) -> None:
    """As download caches have them: x.gguf is a link to a file that is called by its hash."""
    stored = tmp_path / "0f3a"
    stored.write_bytes(path.read_bytes())
    (tmp_path / "x.gguf").symlink_to(stored)
    linked = lfm2np.load(tmp_path / "x.gguf")
    again = model_of(source_of(linked))
    assert again.path == linked.path
    logits = reference.logits(again.weights, again.config, again.numerics, IDS)
    assert logits.tobytes() == linked.logits(IDS).tobytes() == model.logits(IDS).tobytes()


@pytest.mark.rounding
def test_vectors_of_quantised_weights_with_the_file_s_own_tokenizer(tmp_path: Path) -> None:
    keys = keys_of(write_directory(tmp_path / "hf", "lfm2"))
    models = [lfm2np.load(write_file(tmp_path / f"{dtype}.gguf", keys, dtype)) for dtype in ("Q4_0", "Q8_0")]
    vector_set = make(models[0], only=("short-2-text", "border-15"))
    assert vector_set["vectors"][0]["prompt_text"] is not None and vector_set["model"]["name"] == "Q4_0.gguf"
    assert verify(models[0], vector_set) == []
    assert {mismatch.what.partition(".")[0] for mismatch in verify(models[1], vector_set)} == {"model"}


def test_vectors_name_the_file_by_its_hash(path: Path, model: Model) -> None:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    facts = model_facts(model)
    assert facts["config_sha256"] == sha256 and facts["weights"] == {"x.gguf": sha256}
