"""One test a fault of a scheduler: passed if a demand catches it, failed if it survives. See --faults.

How each was caught, with a script that shows it again, is what the test prints: -rP shows it.
"""

from __future__ import annotations

import pytest

from lfm2np.suite.plugin import chosen_profile, option, summarise
from lfm2np.suite.schedulers.faulty import SchedulerFault
from lfm2np.suite.schedulers.scheduler_faults import faults_for, try_fault
from lfm2np.suite.schedulers.suite import require_scheduler
from lfm2np.suite.test_schedulers import outcome_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    faults = faults_for(require_scheduler(option(metafunc.config, "scheduler") or ""))
    metafunc.parametrize("fault", faults, ids=[fault.name for fault in faults])


def test_fault(fault: SchedulerFault, request: pytest.FixtureRequest) -> None:
    config = request.config
    trial = try_fault(option(config, "scheduler") or "", fault, outcome_of(config), chosen_profile(config))
    summarise(config, lambda: [trial.line()])
    print(trial.message)
    if not trial.applied:
        pytest.skip(f"it changed nothing in {trial.programs} programs")
    if not trial.by:
        pytest.fail(f"{fault.name} survives {trial.programs} programs: {fault.sentence}", pytrace=False)
