"""One test a demand: passed, failed with the smallest program, or skipped with the reason. See --scheduler."""

from __future__ import annotations

import pytest

from lfm2np.suite.plugin import cases, chosen_profile, option, summarise
from lfm2np.suite.schedulers import suite

OUTCOME = pytest.StashKey[suite.Outcome]()


def outcome_of(config: pytest.Config) -> suite.Outcome:
    """All demands are judged in one pass."""
    if OUTCOME not in config.stash:
        config.stash[OUTCOME] = suite.try_scheduler(option(config, "scheduler") or "", chosen_profile(config))
        summarise(config, config.stash[OUTCOME].summary)
    return config.stash[OUTCOME]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("demand", cases({name: name for name in suite.sentences()}, metafunc.config))


def test_demand(demand: str, request: pytest.FixtureRequest) -> None:
    status, message = outcome_of(request.config).status(demand)
    if status == "skipped":
        pytest.skip(message)
    if status == "failed":
        pytest.fail(f"{demand}: {suite.sentences()[demand]}\n{message}", pytrace=False)
