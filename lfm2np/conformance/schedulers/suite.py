"""All demands on one scheduler: programs are drawn until one breaks a demand, which is then shrunk.

One pass judges everything at once, so a right scheduler costs one pass. For each demand that was broken, programs are
drawn again that judge this demand alone, and the smallest that breaks it is kept.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis

from lfm2np.conformance.schedulers.calls import Calls, Factory, Unjudged, Violation
from lfm2np.conformance.schedulers.demands import DEMANDS
from lfm2np.conformance.schedulers.programs import Call, carry_out, programs
from lfm2np.conformance.schedulers.run import Run
from scheduler.protocol import FEATURES, POLICIES

PROGRAMS = {"quick": 1500, "ci": 6000, "deep": 60_000}  # by profile


@dataclass(frozen=True)
class Broken:
    """A demand that is not met, by the smallest program found."""

    demand: str
    message: str
    script: str  # Python that shows it again
    schedule: list[dict[str, Any]]  # its steps
    programs: int  # until it was first met


@dataclass(eq=False)
class Outcome:
    """Of all demands on one scheduler."""

    name: str
    profile: str
    kind: str
    lacks: frozenset[str]
    policies: frozenset[str]
    programs: int = 0
    seconds: float = 0.0
    met: Counter[str] = field(default_factory=Counter)
    broken: dict[str, Broken] = field(default_factory=dict)
    stopped: Counter[str] = field(default_factory=Counter)  # by demand, the programs that ended at it

    def status(self, demand: str) -> tuple[str, str]:
        """passed, failed or skipped, and why."""
        if demand in self.broken:
            found = self.broken[demand]
            return "failed", f"after {found.programs} programs: {found.message}\n# shows it again:\n{found.script}"
        if demand in POLICIES and demand not in self.policies:
            return "skipped", f"the scheduler does not promise it: {demand!r} in `policies`"
        for feature, of in (("states", "states"), ("windows", "windows"), ("free", "leaks"), ("refusals", "refusals")):
            if demand == of and feature in self.lacks:
                return "skipped", f"the scheduler lacks {feature}: {FEATURES[feature]}"
        return "passed", ""


def try_scheduler(factory: Factory | str, profile: str = "quick", name: str = "") -> Outcome:
    """RequestError if the factory's object is no scheduler or declares what is unknown."""
    calls = Calls(factory, FIRST_SIZES)
    outcome = Outcome(name or str(factory), profile, calls.kind, calls.lacks, calls.policies)
    started = time.perf_counter()
    first: dict[str, int] = {}

    def judge_all(sizes: dict[str, Any], program: list[Call]) -> None:
        outcome.programs += 1
        run = Run(factory, sizes)
        try:
            carry_out(run, program)
        except Violation as violation:
            outcome.stopped[violation.demand] += 1
            first.setdefault(violation.demand, outcome.programs)
        outcome.met.update(run.met)

    drawn(judge_all, calls.lacks, profile)
    for demand, number in first.items():
        outcome.broken[demand] = smallest(factory, outcome.name, calls.lacks, demand, number, profile)
    outcome.seconds = time.perf_counter() - started
    return outcome


FIRST_SIZES = {
    "block_size": 2,
    "num_blocks": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 12,
    "prefix_caching": True,
    "num_host_blocks": 6,
    "sliding_window": 3,
    "num_window_blocks": 8,
    "seed": 0,
}


def drawn(test: Callable[[dict[str, Any], list[Call]], None], lacks: frozenset[str], profile: str) -> None:
    settings = hypothesis.settings(
        max_examples=PROGRAMS[profile],
        derandomize=profile != "deep",
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @settings
    @hypothesis.given(program=programs(lacks))
    def run_one(program: tuple[dict[str, Any], list[Call]]) -> None:
        test(dict(program[0]), program[1])

    run_one()


def smallest(
    factory: Factory | str, name: str, lacks: frozenset[str], demand: str, number: int, profile: str
) -> Broken:
    found: list[tuple[Violation, Run]] = []

    def judge_one(sizes: dict[str, Any], program: list[Call]) -> None:
        run = Run(factory, sizes, {demand})
        try:
            carry_out(run, program)
        except Unjudged:
            return
        except Violation as violation:
            found.append((violation, run))
            raise

    with contextlib.suppress(Violation):
        drawn(judge_one, lacks, profile)
    violation, run = found[-1]  # Hypothesis runs the smallest again at the end
    return Broken(demand, str(violation), script(name, run), run.schedule, number)


def script(name: str, run: Run) -> str:
    """The program as Python that runs without Hypothesis."""
    calls = "".join(f"run.{call}\n" for call in run.log)
    return f"from lfm2np.conformance.schedulers.run import Run\n\nrun = Run({name!r}, {run.calls.given})\n{calls}"


def demands() -> dict[str, str]:
    """Each demand and policy, with its sentence."""
    return {**DEMANDS, **POLICIES}
