"""Checkpoints with the shapes of published models and random weights, against transformers wholly in float64.

LFM2-350M takes some three minutes on two cores, 0.7 GB of disk and 6 GB of memory, LFM3-1.7B ten minutes, 3.5 and 16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import make_goldens
import numpy as np
import pytest
import torch
from random_checkpoint import random_checkpoint

import lfm2np
from lfm2np.arithmetic import numerics_named
from lfm2np.checkpoint.config_json import load_config
from lfm2np.truth.layers import parameter_count

pytestmark = [pytest.mark.peers, pytest.mark.night]

GIGABYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
too_small = pytest.mark.skipif(GIGABYTES < 20, reason=f"{GIGABYTES:.0f} GB of memory, expected 20")
DECIDED = 1e-4  # a token counts where its float64 margin is larger
MEASURE = """
import json, resource, sys
import lfm2np
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
imported = peak()
lfm2np.load(sys.argv[1], sys.argv[2])
print(json.dumps([imported, peak() - imported]))
"""
# Linux counts the memory of the process that forked as the child's own peak: a small one must stand in between.
IN_BETWEEN = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"


def theirs(directory: Path, ids: list[int], dtype: torch.dtype, true_float64: bool) -> np.ndarray:
    return make_goldens.peer_logits(directory, ids, dtype, true_float64=true_float64)


def ours(directory: Path, ids: list[int], numerics: str) -> np.ndarray:
    return lfm2np.load(directory, numerics).logits(ids)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("LFM2-350M", 64), pytest.param("LFM3-1.7B", 320, marks=too_small)],  # over the window of 256
)
def test_float64_is_transformers_and_exact_is_about_as_near_to_it_as_its_float32(
    name: str, tokens: int, tmp_path: Path
) -> None:
    directory = random_checkpoint(tmp_path / "model", name=name)
    ids = np.random.default_rng(2).integers(0, load_config(directory).vocab_size, tokens).tolist()

    def logits(function: Callable[..., np.ndarray], *values: object) -> np.ndarray:
        """In a process of its own, whose memory is free afterwards."""
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(function, directory, ids, *values).result()

    truth = logits(theirs, torch.float64, True)
    assert np.abs(logits(ours, "float64") - truth).max() < 1e-11
    exact, single = logits(ours, "exact"), logits(theirs, torch.float32, False)
    errors = [np.sqrt(np.mean((side - truth) ** 2)) for side in (exact, single)]
    assert errors[0] < 2.0 * errors[1]  # measured, of LFM3-1.7B: 1.45
    decided = np.diff(np.partition(truth, -2, axis=-1)[:, -2:])[:, 0] > DECIDED
    assert decided.mean() > 0.9
    assert exact.argmax(-1)[decided].tolist() == truth.argmax(-1)[decided].tolist()


@pytest.mark.parametrize("numerics", ["exact", "float32"])
def test_loading_peaks_at_little_more_than_the_prepared_weights(numerics: str, tmp_path: Path) -> None:
    """Apart from the imports, and from the mapped file, whose pages the system may drop."""
    directory = random_checkpoint(tmp_path / "model")
    command = [sys.executable, "-c", IN_BETWEEN, sys.executable, "-c", MEASURE, str(directory), numerics]
    imported, peak = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert imported < 300e6
    file_bytes = (directory / "model.safetensors").stat().st_size
    weight_bytes = numerics_named(numerics).weight_bytes * parameter_count(load_config(directory))
    assert peak - file_bytes <= 1.25 * weight_bytes
