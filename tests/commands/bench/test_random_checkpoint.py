"""The random checkpoint: whole or not there, made once, of the shapes of LFM2-350M."""

import json
from pathlib import Path

import numpy as np
import pytest
from builders import raw_config

import lfm2np
from lfm2np.checkpoint.config_json import load_config, parse_config
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.commands.bench import random_checkpoint as made
from lfm2np.errors import CheckpointError
from lfm2np.system import cache_directory
from lfm2np.truth.layers import parameter_count

RAW = raw_config(tie_word_embeddings=True)


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_shapes_are_those_of_lfm2_350m():
    config = parse_config(made.published_config(made.SMALL), "config.json")
    assert parameter_count(config) == 354_483_968
    assert (config.feed_forward_size, config.head_dim) == (4608, 64)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [2, 5, 8, 10, 12, 14]


def test_it_loads_and_needs_one_slice(tmp_path):
    place = made.random_checkpoint(tmp_path / "a" / "b", RAW)
    model = lfm2np.load(place)
    assert model.weights.head.grid.slices == 1
    assert np.isfinite(model.logits([1, 2, 3])).all()
    tensors = open_checkpoint(place, load_config(place))
    assert {tensor.dtype for tensor in tensors.values()} == {"BF16"}


def test_it_is_made_once(tmp_path):
    place = made.random_checkpoint(tmp_path / "model", RAW)
    counted = []
    assert made.random_checkpoint(place, RAW, lambda done, total: counted.append((done, total))) == place
    assert counted == []


def test_progress_counts_to_the_last_weight(tmp_path):
    counted = []
    made.random_checkpoint(tmp_path / "model", RAW, lambda done, total: counted.append((done, total)))
    assert counted[-1][0] == counted[-1][1] == parameter_count(parse_config(RAW, ""))


@pytest.mark.parametrize("harm", ["short", "other config", "no weights"])
def test_an_incomplete_one_is_made_again(tmp_path, harm):
    place = made.random_checkpoint(tmp_path / "model", RAW)
    whole = content(tmp_path)
    weights = place / "model.safetensors"
    if harm == "short":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif harm == "other config":
        (place / "config.json").write_text(json.dumps(made.published_config(made.SMALL)))
    else:
        weights.unlink()
    assert made.random_checkpoint(place, RAW) == place
    assert content(tmp_path) == whole


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_one_leaves_nothing(tmp_path, stop):
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise stop

    with pytest.raises(stop):
        made.random_checkpoint(tmp_path / "model", RAW, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_can_t_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/model: can't be written"):
        made.random_checkpoint(tmp_path / "file" / "model", RAW)


def test_it_stands_where_caches_stand(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "lfm2np"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory() == Path.home() / ".cache" / "lfm2np"
