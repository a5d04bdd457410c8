"""The files that fixtures/quantise.py writes: their tokenizer's tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_file import STRING, model_keys
from quantise import LFM2_IN_OTHER_WORDS, tokenizer_keys
from sides import TRAINED
from vocabularies import ODD, PATTERNS, config_of, raw_tokenizer, write_directory, write_file

from lfm2np.checkpoint.config import load_config
from lfm2np.checkpoint.files import read_tokenizer
from lfm2np.checkpoint.tokenizer import load_tokenizer

PRE = "tokenizer.ggml.pre"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tables_split_as_the_directory_does_where_its_pattern_has_a_name(pattern: str, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "hf", pattern)
    keys = tokenizer_keys(directory, config_of())
    assert keys[PRE] == (STRING, pattern)
    path = write_file(tmp_path / "x.gguf", model_keys(config_of()) | keys)
    expected, found = load_tokenizer(directory, config_of()), read_tokenizer(path, config_of())
    for text in ODD:
        assert found.encode(text) == expected.encode(text), text


def test_a_pattern_in_other_words_has_its_name_and_one_without_is_gpt_2(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "hf", "lfm2")
    raw = raw_tokenizer(directory)
    split = raw["pre_tokenizer"]["pretokenizers"][0]
    for regex, name in ((LFM2_IN_OTHER_WORDS, "lfm2"), (r"\s+", "gpt-2")):
        split["pattern"]["Regex"] = regex
        (directory / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
        assert tokenizer_keys(directory, config_of())[PRE] == (STRING, name)
    assert tokenizer_keys(TRAINED, load_config(TRAINED))[PRE] == (STRING, "gpt-2")  # its files' digests are pinned
