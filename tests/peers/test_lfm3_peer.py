"""LFM3 against transformers' own, on checkpoints of every odd shape; and the two readings of the rotation's label."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import corpus
import make_goldens
import mechanisms
import numpy as np
import pytest
import torch
from lfm3_models import MODELS
from torture_table import LFM3S
from without_lfm3 import lfm3_ablations

import lfm2np
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.suite.strategies.tiny_models import TinyModel, checkpoint
from lfm2np.truth import reference
from lfm2np.truth.layers import parameter_count

pytest.importorskip("transformers.models.lfm3", reason="LFM3 is in transformers since 5.23")

pytestmark = pytest.mark.peers

IDS = np.random.default_rng(0).integers(3, 24, 60).tolist()


def truth_of(directory: Path, ids: list[int]) -> np.ndarray:
    return make_goldens.peer_logits(directory, ids, torch.float64, true_float64=True)


@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
def test_float64_is_transformers_wholly_in_float64(tiny: TinyModel) -> None:
    """And exact is about as near to it as transformers in float32 is, or nearer."""
    directory = checkpoint(tiny)
    raw = json.loads((directory / "config.json").read_text())
    counted = make_goldens.load_peer(directory, torch.float32).num_parameters()
    assert parameter_count(parse_config(raw, "config.json")) == counted
    truth = truth_of(directory, IDS)
    assert np.abs(lfm2np.load(directory, "float64").logits(IDS) - truth).max() < 1e-11
    single = np.abs(make_goldens.peer_logits(directory, IDS, torch.float32) - truth)
    exact = np.abs(lfm2np.load(directory).logits(IDS) - truth)
    assert exact.mean() <= single.mean()


def test_transformers_turns_all_of_a_head_that_is_labelled_default(tmp_path: Path) -> None:
    """That reading is `rope="transformers"`; what was trained is what it computes under the label "proportional"."""
    place = tmp_path / "relabelled"
    shutil.copytree(checkpoint(MODELS["wide"]), place)
    raw = json.loads((place / "config.json").read_text())
    raw["rope_parameters"]["full_attention"]["rope_type"] = "default"
    (place / "config.json").write_text(json.dumps(raw))
    truth, trained = truth_of(place, IDS), truth_of(checkpoint(MODELS["wide"]), IDS)
    assert np.abs(truth - trained).max() > 0.1
    with pytest.warns(UserWarning, match="labelled"):
        assert np.abs(lfm2np.load(place, "float64", rope="transformers").logits(IDS) - truth).max() < 1e-11
    with pytest.warns(UserWarning, match="labelled"):
        assert np.abs(lfm2np.load(place, "float64").logits(IDS) - trained).max() < 1e-11


FIXTURES = [*(make_goldens.FIXTURES / "torture" / name for name in LFM3S), make_goldens.FIXTURES / "lfm3"]


@pytest.mark.parametrize("directory", FIXTURES, ids=lambda path: path.name)
def test_a_fixture_of_300_tokens_is_transformers_wholly_in_float64(directory: Path) -> None:
    """Far past each window, and past the goldens, whose prompts are shorter."""
    model = lfm2np.load(directory, "float64")
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, 300).tolist()
    truth = truth_of(directory, ids)
    assert np.abs(model.logits(ids) - truth).max() < 1e-11
    single = np.abs(make_goldens.peer_logits(directory, ids, torch.float32) - truth)
    assert np.abs(lfm2np.load(directory).logits(ids) - truth).mean() <= single.mean()


@pytest.mark.parametrize("name", mechanisms.MISTAKES)
def test_what_is_taken_out_in_training_is_what_evaluate_takes_out(name: str) -> None:
    """In transformers and here: the same logits, which are not those of the whole network."""
    model = lfm2np.load(lfm2np.lfm3_fixture(), "float64")
    ids = model.tokenizer.encode("".join(corpus.as_text(next(corpus.examples(1, True, ("edge",))))))
    theirs = make_goldens.load_peer(lfm2np.lfm3_fixture(), torch.float32)
    with mechanisms.mistakes_of(theirs, 0).making(name, random.Random(0)), torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    weights, config = lfm3_ablations(model.weights, model.config)[name]
    assert np.abs(reference.logits(weights, config, model.numerics, ids) - expected).max() < 1e-3
    assert np.abs(model.logits(ids) - expected).max() > 0.1


def test_the_ablations_are_those_of_training() -> None:
    model = lfm2np.load(lfm2np.lfm3_fixture(), "float32")
    assert set(lfm3_ablations(model.weights, model.config)) == set(mechanisms.MISTAKES)
