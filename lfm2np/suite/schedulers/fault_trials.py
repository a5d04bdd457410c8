"""Does the suite catch bugs in your scheduler? Each of scheduler_faults.py is put in; programs run until it shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from lfm2np.errors import RequestError
from lfm2np.suite.schedulers import scheduler_faults as _catalogue  # noqa: F401  (fills FAULTS)
from lfm2np.suite.schedulers.adapter_calls import Factory, Violation
from lfm2np.suite.schedulers.faulty import FAULTS, SchedulerFault, faults_for, with_fault
from lfm2np.suite.schedulers.programs import Call
from lfm2np.suite.schedulers.suite import Outcome, attempt, drawn, script, sentences, try_scheduler


def trials(
    factory: Factory | str, faults: Sequence[SchedulerFault], profile: str
) -> Iterator[Outcome | dict[str, Any]]:
    """What the suite says of the scheduler as it is, then one row a fault.

    A demand that is broken without a fault is not judged with one: its failure would be no catch.
    """
    bare = try_scheduler(factory, profile)
    yield bare
    judged = frozenset(sentences()) - bare.broken.keys()
    for fault in faults:
        yield try_fault(factory, fault, bare.lacks, judged, profile)


def chosen(names: Sequence[str], lacks: frozenset[str]) -> list[SchedulerFault]:
    """RequestError for a name that no fault has, or that the scheduler can't have."""
    for name in names:
        if name not in FAULTS:
            raise RequestError(f"fault {name!r}: expected one of {', '.join(FAULTS)}")
        missing = lacks & set(FAULTS[name].needs)
        if missing:
            raise RequestError(f"fault {name!r}: the scheduler lacks {', '.join(sorted(missing))}")
    return [FAULTS[name] for name in names] if names else faults_for(lacks)


def try_fault(
    factory: Factory | str, fault: SchedulerFault, lacks: frozenset[str], judged: frozenset[str], profile: str
) -> dict[str, Any]:
    """Whether it is caught, by which demand, after how many programs, and in how many it changed anything."""
    row: dict[str, Any] = {
        "name": fault.name,
        "sentence": fault.sentence,
        "seen_in": list(fault.seen_in),
        "caught": False,
        "by": "",
        "programs": 0,
        "applied": 0,
        "message": "",
    }
    faulty = with_fault(factory, fault.name)

    def judge(sizes: dict[str, Any], program: list[Call]) -> None:
        row["programs"] += not row["caught"]
        run, violation = attempt(faulty, sizes, program, judged)
        row["applied"] += run is not None and bool(run.calls.adapted.applied)
        if violation is not None and not row["caught"]:
            row["caught"], row["by"] = True, violation.demand
            row["message"] = f"{violation}\n{script(with_name(factory, fault.name), sizes, run)}"
        if violation is not None:
            raise violation

    with contextlib.suppress(Violation):
        drawn(judge, lacks, profile, shrinks=False)
    return row


def with_name(factory: Factory | str, fault: str) -> str:
    return f"with_fault({factory!r}, {fault!r})"
