"""The stored goldens against the installed transformers: `fixtures/make_goldens.py --check`, fixture by fixture."""

from __future__ import annotations

from pathlib import Path

import make_goldens
import make_torture
import numpy as np
import pytest

pytestmark = pytest.mark.peers

GOLDENS = make_goldens.FIXTURES / "goldens"


@pytest.mark.parametrize("directory", make_goldens.fixture_directories(), ids=lambda path: path.name)
def test_a_golden_is_what_transformers_computes(directory: Path) -> None:
    assert (directory / "config.json").is_file()
    right, line = make_goldens.check(directory, GOLDENS / f"{directory.name}.safetensors")
    assert right, line


@pytest.mark.parametrize(
    ("array", "change"),
    [("float64_4", 1e-3), ("float32_4", 1e-2), ("true_minus_stock_4", 1e-8), ("prompt_4", 1), ("float64_4", np.nan)],
)
def test_the_check_refuses_a_golden_with_one_number_changed(tmp_path: Path, array: str, change: float) -> None:
    """The changes are ten to a hundred times the tolerances."""
    directory = make_goldens.FIXTURES / "torture" / "wide_heads"
    arrays, metadata = make_goldens.read_golden(GOLDENS / "wide_heads.safetensors")
    arrays[array] = arrays[array].copy()
    arrays[array].reshape(-1)[7] += change
    stored = {name: make_goldens.as_stored(a) for name, a in arrays.items()}
    altered = tmp_path / "wide_heads.safetensors"
    altered.write_bytes(make_torture.safetensors_bytes(stored, metadata))
    right, line = make_goldens.check(directory, altered)
    assert not right, line
