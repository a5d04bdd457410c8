"""Eight types of one checkpoint: files of the same bytes and figures of the same bits, whatever computes them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import blas
import numpy as np
import pytest
from quantise import FILE_TYPES, FP4_VALUES, IQ4_VALUES, PLAIN, quantised, write_types
from sides import LINES, MOE, TRAINED, figures, written

import lfm2np
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED, values_of

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
KERNELS = [one for one in ("Haswell", "Prescott") if blas.can_run(one)]


def arguments(folder: Path, names: Sequence[str]) -> list[str]:
    """Of `lfm2np compare`, with the files that it takes."""
    paths = write_types(TRAINED, list(names), folder)
    return [str(word) for word in (TRAINED, *paths, "--requests", written(folder / "r.jsonl", LINES))]


@pytest.mark.parametrize("names", [ALL, FEW], ids=["all", "few"])
def test_files_and_figures_have_the_bits_of_every_machine(names: tuple[str, ...], tmp_path: Path, capsys: Any):
    """What tests/machines.py runs elsewhere."""
    report = figures(capsys, *arguments(tmp_path, names))
    sha = hashlib.sha256()
    for name in names:
        sha.update((tmp_path / f"trained-{name}.gguf").read_bytes())
    assert (sha.hexdigest(), report["digest"]) == PINNED[names]
    errors = [entry["kl"]["mean"] for entry in report["quantised"]]
    assert names == FEW or errors[0] < errors[1] < min(errors[2:])  # F16, Q8_0, all others


@pytest.mark.slow
@pytest.mark.skipif(len(KERNELS) < 2, reason=f"no kernels to choose from: NumPy has {blas.here().blas}")
def test_figures_are_the_same_under_other_kernels_and_threads(tmp_path: Path):
    command = [sys.executable, "-m", "lfm2np", "compare", *arguments(tmp_path, FEW), "--json"]
    for kernel, threads in zip(KERNELS, ("1", "2"), strict=True):
        variables = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OPENBLAS_CORETYPE": kernel}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["figures"]["digest"] == PINNED[FEW][1], kernel


@pytest.mark.parametrize("name", FILE_TYPES)
def test_no_other_code_is_nearer(name: str):
    """Of blocks of any size, of one sign, of zeros: the scale is kept, and every code tried."""
    random = np.random.default_rng(11)
    rows = np.concatenate(
        [
            random.normal(0.0, 1.0, (6, 32)) * 2.0 ** np.array([[0], [-9], [5], [-3], [1], [-6]]),
            np.abs(random.normal(3.0, 1.0, (2, 32))),
            -np.abs(random.normal(3.0, 1.0, (1, 32))),
            np.zeros((1, 32)),
            np.full((1, 32), 0.5),
        ]
    ).astype(np.float32)
    content = np.frombuffer(quantised(rows, name), np.uint8)
    if name in PLAIN:
        assert np.array_equal(content.view("<f2").reshape(rows.shape), rows.astype(np.float16))
        return
    kind = QUANTISED[name]
    blocks = content.reshape(-1, kind.size)
    values = values_of(blocks, name)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    assert np.array_equal(values[9], np.zeros(32)) and (np.abs(values - rows) <= largest / 3.5).all()
    codes = {"Q8_0": range(-127, 128), "Q4_0": range(-8, 8), "Q5_0": range(-16, 16), "Q4_1": range(16)}
    codes |= {"Q5_1": range(32), "IQ4_NL": IQ4_VALUES.tolist(), "MXFP4": FP4_VALUES.tolist()}
    halves = [blocks[:, at : at + 2].copy().view("<f2").astype(np.float64) for at in kind.halves]  # [n, 1] each
    scale, *added = halves or [np.ldexp(1.0, blocks[:, :1].astype(np.int32) - 128)]
    tried = scale[:, :, None] * np.array(list(codes[name]), np.float64) + (added[0][:, :, None] if added else 0.0)
    best = np.abs(rows[:, :, None] - tried).min(axis=2)
    assert np.array_equal(np.abs(rows - values), best)


def test_a_mixture_has_its_factor_in_its_weights(tmp_path: Path):
    """So that its answers stay: the logits of F16 are nearly the base's."""
    (path,) = write_types(MOE, ["F16"], tmp_path)
    ids = lfm2np.load(MOE).prompt_ids("add: 34 + 58 ->")
    one, two = (lfm2np.load(side).logits(ids) for side in (MOE, path))
    assert np.abs(one - two).max() < 1e-3 * np.abs(one).max()
