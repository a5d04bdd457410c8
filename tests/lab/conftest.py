"""What is made once for all tests of the laboratory."""

from __future__ import annotations

import pytest

from lfm2np.lab.models import Models, load_models


@pytest.fixture(scope="session")
def models() -> Models:
    return load_models()
