"""One test a fault of a scheduler: passed if a demand catches it, failed if it survives. See --faults.

How each was caught, with a script that shows it again, is what the test prints: -rP shows it.
"""

from __future__ import annotations

import pytest

from lfm2np.suite.plugin import TRIALS, chosen_profile, option, outcome_of
from lfm2np.suite.schedulers.fault_trials import try_fault
from lfm2np.suite.schedulers.faulty import SchedulerFault


def test_fault(fault: SchedulerFault, request: pytest.FixtureRequest) -> None:
    config = request.config
    trial = try_fault(option(config, "scheduler") or "", fault, outcome_of(config), chosen_profile(config))
    config.stash.setdefault(TRIALS, []).append(trial)
    print(trial.message)
    if not trial.applied:
        pytest.skip(f"it changed nothing in {trial.programs} programs")
    if not trial.by:
        pytest.fail(f"{fault.name} survives {trial.programs} programs: {fault.sentence}", pytrace=False)
