"""Puts tests/oracle on the path: its folders share `engines` and `vector_sets`."""

from pathlib import Path

import pytest

import lfm2np
from lfm2np.engine.loading import Model
from lfm2np.oracle.judging import constants


@pytest.fixture(scope="session")
def model() -> Model:
    """The trained model of the package."""
    return lfm2np.load()


@pytest.fixture(scope="session")
def published() -> Model:
    """8 experts, 2 a token, in three of five layers."""
    return lfm2np.load(Path(__file__).parents[2] / "fixtures" / "torture" / "moe_published")


@pytest.fixture
def without_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search for constants that are off, which is most of a check that is wrong everywhere: others are named.

    Not where results are kept for other files.
    """
    monkeypatch.setattr(constants, "MOST_PRODUCTS", 0)
