"""What is made once for all tests of the laboratory."""

from __future__ import annotations

from functools import cache

import pytest

from lfm2np.teaching.lab.lab_page import again_with
from lfm2np.teaching.lab.models import Models, load_models
from lfm2np.teaching.lab.predictions import Again


@pytest.fixture(scope="session")
def models() -> Models:
    return load_models()


@pytest.fixture(scope="session")
def again(models: Models) -> Again:
    """Runs without drawings, each once."""
    return cache(again_with(models))
