"""One test a demand: passed, failed with the smallest program, or skipped with the reason. See --scheduler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lfm2np.suite.plugin import option, outcome_of
from lfm2np.suite.schedulers.suite import sentences


def test_demand(demand: str, request: pytest.FixtureRequest) -> None:
    outcome = outcome_of(request.config)
    status, message = outcome.status(demand)
    if status == "skipped":
        pytest.skip(message)
    folder = option(request.config, "schedules")
    if status == "failed" and folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        schedule = json.dumps(outcome.broken[demand].schedule)
        Path(folder, f"{demand}.json").write_text(schedule + "\n", encoding="utf-8")
    if status == "failed":
        pytest.fail(f"{demand}: {sentences()[demand]}\n{message}", pytrace=False)
