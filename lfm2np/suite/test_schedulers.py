"""One test a demand: passed, failed with the smallest program, or skipped with the reason. See --scheduler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lfm2np.suite.plugin import OUTCOME, chosen_profile, option
from lfm2np.suite.schedulers.suite import sentences, try_scheduler


def test_demand(demand: str, request: pytest.FixtureRequest) -> None:
    stash = request.config.stash
    if OUTCOME not in stash:  # all demands are judged in one pass
        name = option(request.config, "scheduler") or "lfm2np.suite.schedulers.own:factory"
        stash[OUTCOME] = try_scheduler(name, chosen_profile(request.config))
    status, message = stash[OUTCOME].status(demand)
    if status == "skipped":
        pytest.skip(message)
    folder = option(request.config, "schedules")
    if status == "failed" and folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        schedule = json.dumps(stash[OUTCOME].broken[demand].schedule)
        Path(folder, f"{demand}.json").write_text(schedule + "\n", encoding="utf-8")
    if status == "failed":
        pytest.fail(f"{demand}: {sentences()[demand]}\n{message}", pytrace=False)
