"""GGUF against the package of llama.cpp's authors: sizes, values, its reader, files that its writer makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import write_gguf

import lfm2np
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.gguf.container import open_container
from lfm2np.checkpoint.gguf.ggml_types import NUMBERS, QUANTISED
from lfm2np.checkpoint.stored import widen

pytestmark = pytest.mark.peers

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINED = FIXTURES / "trained"
QUANTISES = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"}  # of ours, what the package can make


def kind(name: str) -> object:
    return gguf.GGMLQuantizationType[name]


def test_types_have_the_package_s_numbers_and_sizes():
    for name, number in NUMBERS.items():
        assert kind(name) == number
    for name, value in QUANTISED.items():
        assert gguf.GGML_QUANT_SIZES[kind(name)] == (value.weights, value.size)


def written(path: Path, directory: Path, name: str) -> Path:
    config = load_config(directory)

    def add_tokenizer(writer: Any) -> None:
        writer.add_bos_token_id(config.bos_token_id)
        writer.add_eos_token_id(config.eos_token_ids[0])
        writer.add_pad_token_id(config.pad_token_id)
        writer.add_token_list(["a", "b"])
        writer.add_token_scores([0.5, -1.0])

    return write_gguf(directory, path, name, add_tokenizer)


@pytest.mark.parametrize("name", ["F32", "BF16"])
@pytest.mark.parametrize("checkpoint", ["trained", "torture/six_heads_two_kv", "torture/magnitudes"])
def test_a_file_of_its_writer_is_the_same_model(tmp_path: Path, checkpoint: str, name: str):
    """These checkpoints are bfloat16, so neither type loses a bit."""
    directory = FIXTURES / checkpoint
    path = written(tmp_path / "x.gguf", directory, name)
    expected, actual = lfm2np.load(directory), lfm2np.load(path)
    assert actual.config == expected.config
    assert actual.digest() == expected.digest()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", *sorted(QUANTISES)])
def test_its_reader_and_ours_agree(tmp_path: Path, name: str):
    path = written(tmp_path / "x.gguf", TRAINED, name)
    container, theirs = open_container(path), gguf.GGUFReader(path)
    assert [tensor.name for tensor in theirs.tensors] == list(container.tensors)
    for tensor in theirs.tensors:
        ours = container.tensors[tensor.name]
        assert (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist()))) == (ours.dtype, ours.shape)
        assert tensor.data.tobytes() == b"".join(array.tobytes() for array in ours.arrays)
        assert np.array_equal(
            widen(ours.values, ours.dtype).astype(np.float32), gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        )
    values = {key: value.value for key, value in container.keys.items()}
    assert values == {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
