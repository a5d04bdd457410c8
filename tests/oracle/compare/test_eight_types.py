"""Eight types of one checkpoint: files of the same bytes and figures of the same bits, whatever computes them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_file import STRING, model_keys
from quantise import FILE_TYPES, quantised, tokenizer_keys, write_types
from sides import LINES, MOE, TRAINED, figures, written
from vocabularies import ODD, PATTERNS, config_of, write_directory, write_file

import lfm2np
from lfm2np.checkpoint.files import read_tokenizer
from lfm2np.checkpoint.text.tokenizer import load_tokenizer
from lfm2np.errors import NumericsError

pytestmark = pytest.mark.slow

ALL, FEW = tuple(FILE_TYPES), ("Q8_0", "MXFP4")
# Of the files' bytes, and of the figures of the lines of sides.py: any machine must make the same.
PINNED = {
    ALL: (
        "f1d1ba63d3839995ec8658a85bbf3d3e7b8c57b6933995abfa3bf60e958ba2e1",
        "93d29c59f0deb872bc3a0a4a1277adfc65ece172832b5861a2ff9c31c166837f",
    ),
    FEW: (
        "11de76102011bee368fe4198091bab8148d4932707e8b4557289b578badecde8",
        "8dc3762afb6a6cfd01bddba0ba93ebc35a9867b9e40aaffe258c9a6f7e6c007f",
    ),
}


def arguments(folder: Path, names: Sequence[str]) -> list[str]:
    """Of `lfm2np compare`, with the files that it takes."""
    paths = write_types(TRAINED, list(names), folder)
    return [str(word) for word in (TRAINED, *paths, "--requests", written(folder / "r.jsonl", LINES))]


@pytest.mark.parametrize("names", [ALL, pytest.param(FEW, marks=pytest.mark.kernels)], ids=["all", "few"])
def test_files_and_figures_have_the_bits_of_every_machine(names: tuple[str, ...], tmp_path: Path, capsys: Any):
    """What tests/machines.py runs elsewhere."""
    report = figures(capsys, *arguments(tmp_path, names))
    sha = hashlib.sha256()
    for name in names:
        sha.update((tmp_path / f"trained-{name}.gguf").read_bytes())
    assert (sha.hexdigest(), report["digest"]) == PINNED[names]
    errors = [entry["kl"]["mean"] for entry in report["quantised"]]
    assert names == FEW or errors[0] < errors[1] < min(errors[2:])  # F16, Q8_0, all others


def test_a_mixture_has_its_factor_in_its_weights(tmp_path: Path):
    """So that its answers stay: the logits of F16 are nearly the base's."""
    (path,) = write_types(MOE, ["F16"], tmp_path)
    ids = lfm2np.load(MOE).prompt_ids("add: 34 + 58 ->")
    one, two = (lfm2np.load(side).logits(ids) for side in (MOE, path))
    assert np.abs(one - two).max() < 1e-3 * np.abs(one).max()


# --- the tokenizer's tables of such files, and scales beyond float16


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
