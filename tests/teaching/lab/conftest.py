"""What is made once for all tests of the laboratory."""

from __future__ import annotations

from functools import cache

import pytest

from lfm2np.teaching.lab import lessons
from lfm2np.teaching.lab.lessons import Again


@pytest.fixture(scope="session")
def again() -> Again:
    """Runs without drawings, each once."""
    return cache(lessons.again)
