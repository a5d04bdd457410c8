"""Files with a flipped bit, or without their last lines, never pass for right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from damage import KINDS, Kind, cut, flipped, traces, tried

pytestmark = [pytest.mark.rounding, pytest.mark.slow]


@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
def test_no_damaged_file_passes_for_right(made: Callable[[Path], Kind], tmp_path: Path) -> None:
    """Of results what a cut file lacks is computed."""
    kind = made(tmp_path)
    counts, failures = tried(kind, flipped(kind.content, 40, seed=1))
    assert failures == []
    assert counts.total() == 40 and counts["harmless"] <= 1
    if kind.has_lines:
        counts, failures = tried(kind, cut(kind.content))
        assert failures == []
        assert counts.total() == counts["harmless" if kind.name == "results" else "refused"] > 5


def test_a_reader_that_looks_away_is_seen(tmp_path: Path) -> None:
    """The control: a trace's lines as they are, without their checksums."""
    kind = traces(tmp_path)
    careless = Kind("careless", kind.content, without_checksums, lambda actual: True)
    counts, failures = tried(careless, flipped(kind.content, 40, seed=1))
    assert counts["right"] == len(failures) > 20


def without_checksums(content: bytes) -> list[str]:
    return [text.partition(',"sha256"')[0] for text in content.decode(errors="replace").splitlines()]
