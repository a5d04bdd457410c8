"""The files that fixtures/quantise.py writes: their tokenizer's tables, and what is refused in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import quantise
from builders import safetensors_bytes, stored, stored_weights, tiny_config, write_model
from gguf_file import STRING, model_keys
from quantise import FILE_TYPES, LFM2_IN_OTHER_WORDS, quantised, tokenizer_keys
from sides import TRAINED
from vocabularies import ODD, PATTERNS, config_of, raw_tokenizer, write_directory, write_file

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.files import read_tokenizer
from lfm2np.checkpoint.text.tokenizer import load_tokenizer
from lfm2np.errors import NumericsError
from lfm2np.truth.weights import EMBEDDING

PRE = "tokenizer.ggml.pre"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tables_split_as_the_directory_does_where_its_pattern_has_a_name(pattern: str, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "hf", pattern)
    keys = tokenizer_keys(directory, config_of())
    assert keys[PRE] == (STRING, pattern)
    path = write_file(tmp_path / "x.gguf", model_keys(config_of()) | keys)
    expected, actual = load_tokenizer(directory, config_of()), read_tokenizer(path, config_of())
    for text in ODD:
        assert actual.encode(text) == expected.encode(text), text


def test_a_pattern_in_other_words_has_its_name_and_one_without_is_gpt_2(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "hf", "lfm2")
    raw = raw_tokenizer(directory)
    split = raw["pre_tokenizer"]["pretokenizers"][0]
    for regex, name in ((LFM2_IN_OTHER_WORDS, "lfm2"), (r"\s+", "gpt-2")):
        split["pattern"]["Regex"] = regex
        (directory / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
        assert tokenizer_keys(directory, config_of())[PRE] == (STRING, name)
    assert tokenizer_keys(TRAINED, load_config(TRAINED))[PRE] == (STRING, "gpt-2")  # its files' digests are pinned


def said(program: object, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a script says that ends in exit code 1: one line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", *map(str, arguments)])
        assert program.main() == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    for path in (tmp_path / "nowhere", file):
        expected = f"{path}: expected a directory: a checkpoint in the Hugging Face format\n"
        assert said(quantise, capsys, path, "-o", tmp_path) == f"quantise.py: {expected}"
    assert "config.json: does not exist" in said(quantise, capsys, tmp_path, "-o", tmp_path)
    directory = write_model(tmp_path / "damaged")
    (directory / "tokenizer.json").write_text("{")
    assert f"{directory / 'tokenizer.json'}: " in said(quantise, capsys, directory, "-o", tmp_path)


def test_what_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, file = write_model(tmp_path / "model"), tmp_path / "file"
    file.write_text("")
    printed = said(quantise, capsys, directory, "--types", "Q8_0", "-o", file)
    assert printed == f"quantise.py: {file}: expected a folder for the files: File exists\n"
    (tmp_path / "taken" / "model-Q8_0.gguf").mkdir(parents=True)
    printed = said(quantise, capsys, directory, "--types", "Q8_0", "-o", tmp_path / "taken")
    assert printed == f"quantise.py: {tmp_path / 'taken' / 'model-Q8_0.gguf'}: can't be written: Is a directory\n"


@pytest.mark.parametrize("name", FILE_TYPES)
def test_a_scale_beyond_float16_is_refused(name: str) -> None:
    """None of a type is written as infinite; powers of two reach farther."""
    rows = np.full((2, 32), 2.0**30, np.float32)
    rows[:, 1] = 0.0
    if name == "MXFP4":
        assert quantised(rows, name)
    else:
        with pytest.raises(NumericsError, match=r"as float16, expected at most 65504"):
            quantised(rows, name)
    rows[1, 5] = np.inf
    with pytest.raises(NumericsError, match="inf, expected finite weights"):
        quantised(rows, name)
    assert quantised(np.full((1, 32), 65504.0, np.float32), name)


def test_a_weight_beyond_float16_is_reported_with_its_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_model(tmp_path / "model")
    tensors = stored_weights(tiny_config())
    tensors[EMBEDDING] = stored(np.full(tensors[EMBEDDING][1], 1e30, np.float32), "F32")
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    printed = said(quantise, capsys, directory, "--types", "F16", "-o", tmp_path / "out")
    assert printed.startswith(f"quantise.py: {directory}: {EMBEDDING} as F16: 1e+30 as float16, expected")
    assert not list((tmp_path / "out").iterdir())
