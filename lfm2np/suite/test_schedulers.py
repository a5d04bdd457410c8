"""One test a demand: passed, failed with the smallest program, or skipped with the reason. See --scheduler."""

from __future__ import annotations

import pytest

from lfm2np.suite.plugin import outcome_of
from lfm2np.suite.schedulers.suite import sentences


def test_demand(demand: str, request: pytest.FixtureRequest) -> None:
    outcome = outcome_of(request.config)
    status, message = outcome.status(demand)
    if status == "skipped":
        pytest.skip(message)
    if status == "failed":
        pytest.fail(f"{demand}: {sentences()[demand]}\n{message}", pytrace=False)
