"""A checkpoint with the shapes of LFM3-1.7B and random weights, against transformers wholly in float64.

Some ten minutes on two cores, 3.5 GB of disk and 16 GB of memory.
"""

from __future__ import annotations

import os
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

pytest.importorskip("transformers.models.lfm3", reason="LFM3 is in transformers since 5.23")

GIGABYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(GIGABYTES < 20, reason=f"{GIGABYTES:.0f} GB of memory, expected 20"),
]
TOKENS = 320  # over the window of 256


def theirs(directory: Path, ids: list[int], dtype: torch.dtype, true_float64: bool) -> np.ndarray:
    return make_goldens.peer_logits(directory, ids, dtype, true_float64=true_float64)


def ours(directory: Path, ids: list[int], numerics: str) -> np.ndarray:
    return lfm2np.load(directory, numerics).logits(ids)


def test_float64_is_transformers_and_exact_is_about_as_near_to_it_as_its_float32(tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path / "model", name="LFM3-1.7B")
    ids = np.random.default_rng(2).integers(0, 124_000, TOKENS).tolist()

    def logits(function: Callable[..., np.ndarray], *values: object) -> np.ndarray:
        """In a process of its own, whose memory is free afterwards."""
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(function, directory, ids, *values).result()

    truth = logits(theirs, torch.float64, True)
    assert np.abs(logits(ours, "float64") - truth).max() < 1e-11
    exact, single = logits(ours, "exact") - truth, logits(theirs, torch.float32, False) - truth
    print(f"largest: exact {np.abs(exact).max():.1e}, transformers float32 {np.abs(single).max():.1e}")
    assert np.sqrt(np.mean(exact**2)) < 2.0 * np.sqrt(np.mean(single**2))  # measured: 1.45
