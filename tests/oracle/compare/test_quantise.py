"""The files that fixtures/quantise.py writes: their tokenizer's tables, and scales beyond float16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_file import STRING, model_keys
from quantise import FILE_TYPES, quantised, tokenizer_keys
from vocabularies import ODD, PATTERNS, config_of, write_directory, write_file

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
