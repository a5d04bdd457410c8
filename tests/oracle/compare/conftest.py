from pathlib import Path

import pytest
from sides import LINES, MOE, TRAINED, quantised, written


@pytest.fixture(scope="package")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both fixtures in Q4_0, one in Q8_0, and requests."""
    folder = tmp_path_factory.mktemp("compared")
    for directory, name in ((TRAINED, "Q4_0"), (TRAINED, "Q8_0"), (MOE, "Q4_0")):
        quantised(directory, name, folder)
    written(folder / "r.jsonl", LINES)
    return folder
