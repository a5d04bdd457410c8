"""The files that fixtures/quantise.py writes: their tokenizer's tables, and scales beyond float16."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf_file import STRING, model_keys
from quantise import FILE_TYPES, LFM2_IN_OTHER_WORDS, quantised, tokenizer_keys
from sides import TRAINED
from vocabularies import ODD, PATTERNS, config_of, raw_tokenizer, write_directory, write_file

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.files import read_tokenizer
from lfm2np.checkpoint.text.tokenizer import load_tokenizer
from lfm2np.errors import NumericsError

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
