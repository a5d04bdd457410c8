"""fixtures/quantise.py against llama.cpp's package `gguf`: its reader takes the files, its quantiser is no nearer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from quantise import FILE_TYPES, quantised, write_types

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED
from lfm2np.checkpoint.gguf.names import place_of
from lfm2np.checkpoint.stored import widen
from lfm2np.checkpoint.tensors import open_checkpoint

FIXTURES = Path(__file__).parents[3] / "fixtures"
pytestmark = pytest.mark.peers
QUANTISES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4")  # by itself, without its C library


@pytest.mark.parametrize("name", FILE_TYPES)
def test_its_reader_takes_a_file_and_finds_the_weights_near_the_checkpoints(tmp_path: Path, name: str):
    (path,) = write_types(FIXTURES / "trained", [name], tmp_path)
    reader = gguf.GGUFReader(path)
    config = load_config(FIXTURES / "trained")
    ours = {place_of(one).name: tensor for one, tensor in open_checkpoint(FIXTURES / "trained", config).items()}
    assert {theirs.name for theirs in reader.tensors} == ours.keys()
    for theirs in reader.tensors:
        expected = widen(ours[theirs.name].values, ours[theirs.name].dtype)
        actual = gguf.quants.dequantize(theirs.data, theirs.tensor_type).reshape(expected.shape)
        is_matrix = expected.ndim == 2
        assert theirs.tensor_type.name == (name if is_matrix else "F32")
        if is_matrix:
            largest = np.abs(expected.reshape(-1, 32)).max(axis=1, keepdims=True)
            assert (np.abs(actual - expected).reshape(-1, 32) <= largest / 3.4 + 1e-7).all()
        else:
            assert np.array_equal(actual, expected)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert (
        fields["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{name}" if name != "MXFP4" else "MOSTLY_MXFP4_MOE"]
    )
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.token_type"]) == config.vocab_size


@pytest.mark.parametrize("name", QUANTISES)
def test_its_own_quantiser_is_no_nearer(name: str):
    """Root mean square over many blocks: ours rounds to the nearest code under the scale that is stored."""
    rows = np.random.default_rng(5).normal(0.0, 1.0, (400, 32)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
    content = np.frombuffer(quantised(rows, name), np.uint8).reshape(-1, QUANTISED[name].size)
    ours = gguf.quants.dequantize(content, kind)
    errors = [float(np.sqrt(np.mean((side.reshape(rows.shape) - rows) ** 2))) for side in (ours, theirs)]
    assert errors[0] <= errors[1] * 1.0001, errors
