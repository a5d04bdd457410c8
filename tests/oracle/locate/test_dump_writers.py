"""The writers of dumps in fixtures/dumps, compiled where there is a compiler and read by ours; names on the page."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lfm2np.checkpoint.config_json import load_config
from lfm2np.oracle.locate.dump import read_dump
from lfm2np.oracle.locate.operations import LAYER

TOP = Path(__file__).parents[3]
PAGE = (TOP / "docs" / "engine" / "7-locate.md").read_text(encoding="utf-8")
COMPILERS = {
    "main.cpp": ("g++", "-std=c++11", "-Wall", "-Werror"),
    "dump.rs": ("rustc", "--edition=2021", "-D", "warnings"),
}


@pytest.mark.parametrize("source", COMPILERS)
def test_the_writer_compiles_and_writes_a_dump(source: str, tmp_path: Path) -> None:
    command = COMPILERS[source]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    subprocess.run([*command, TOP / "fixtures" / "dumps" / source, "-o", "writer"], cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "writer"], cwd=tmp_path, check=True)
    dump = read_dump(tmp_path / "dump.safetensors", load_config(TOP / "fixtures" / "trained"))
    assert (dump.token_ids.tolist(), dump.sizes, dump.format, dump.unknown) == ([5, 6, 7], (2, 1), "float32", ())
    assert dump.stored == {"model.layers.0": "float32"}
    assert np.array_equal(dump.tensors["model.layers.0"], np.full((3, 128), 0.5))


def test_the_page_lists_every_name_that_a_dump_may_have() -> None:
    listed = re.sub(r"\[.*", "", PAGE.partition("## The dump")[2].partition("## Recorded")[0])
    words = {word.rstrip(",").rpartition(".")[2] for line in listed.splitlines() for word in line.split()}
    assert {part.rpartition(".")[2] for part in {name for name, *_ in LAYER}} <= words
