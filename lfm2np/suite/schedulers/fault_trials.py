"""Does the suite catch bugs in your scheduler? Each of scheduler_faults.py is put in; programs run until it shows."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from lfm2np.suite.schedulers import scheduler_faults as _catalogue  # noqa: F401  (fills FAULTS)
from lfm2np.suite.schedulers.adapter_calls import Factory, Violation
from lfm2np.suite.schedulers.faulty import FAULTS, SchedulerFault, faults_for, with_fault
from lfm2np.suite.schedulers.programs import Call
from lfm2np.suite.schedulers.suite import Outcome, attempt, drawn, script, sentences

__all__ = ["FAULTS", "Trial", "faults_for", "try_fault", "with_fault"]


@dataclass
class Trial:
    """What the suite says of a scheduler with a fault."""

    fault: SchedulerFault
    by: str = ""  # the demand that caught it; "": none did
    programs: int = 0  # until then, that one included
    applied: int = 0  # programs in which the fault changed anything
    message: str = ""  # how it was caught, and a script that shows it again

    def line(self) -> str:
        """For the summary of a run."""
        seen_in = f" ({', '.join(self.fault.seen_in)})" if self.fault.seen_in else ""
        how = f"caught by {self.by}" if self.by else "survives" if self.applied else "changed nothing"
        return f"{self.fault.name}{seen_in}: {how} after {self.programs} programs"


def try_fault(factory: Factory | str, fault: SchedulerFault, bare: Outcome, profile: str) -> Trial:
    """`bare` is of the scheduler as it is: a demand that it breaks is not judged with a fault, as that is no catch."""
    trial, faulty = Trial(fault), with_fault(factory, fault.name)
    judged = frozenset(sentences()) - bare.broken.keys()

    def judge(sizes: dict[str, Any], program: list[Call]) -> None:
        trial.programs += not trial.by
        run, violation = attempt(faulty, sizes, program, judged)
        trial.applied += run is not None and bool(run.calls.adapted.applied)
        if violation is not None and not trial.by:
            trial.by = violation.demand
            name = f"with_fault({factory!r}, {fault.name!r})"
            trial.message = f"{violation}\n{script(name, sizes, run)}"
        if violation is not None:
            raise violation

    with contextlib.suppress(Violation):
        drawn(judge, bare.lacks, profile, shrinks=False)
    return trial
