"""All demands on one scheduler: programs are drawn until one breaks a demand, which is then shrunk.

One pass judges everything at once, so a right scheduler costs one pass. For each demand that was broken, programs are
drawn again that judge this demand alone, and the smallest that breaks it is kept.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import hypothesis

from lfm2np.suite.schedulers.adapter_calls import Calls, Factory, Unjudged, Violation
from lfm2np.suite.schedulers.demands import ALWAYS, DEMANDS
from lfm2np.suite.schedulers.program_run import Run
from lfm2np.suite.schedulers.programs import Call, carry_out, programs
from lfm2np.suite.shrinking import bounded_shrinking, seconds_left
from scheduler.protocol import FEATURES, POLICIES

COUNTED = {  # what a run counts, and the feature that brings it
    "chunks": "chunks",
    "hits": "prefix-caching",
    "preemptions": "preemptions",
    "accepted drafts": "drafts",
    "rejected drafts": "drafts",
    "forks": "fork",
    "children": "children",
    "aborts": "abort",
    "refused": "refusals",
}
PROGRAMS = {"quick": 1500, "ci": 6000, "deep": 60_000}  # by profile


@dataclass(frozen=True)
class Broken:
    """A demand that is not met, by the smallest program found."""

    demand: str
    message: str
    script: str  # Python that shows it again
    programs: int  # until it was first met


@dataclass(eq=False)
class Outcome:
    """Of all demands on one scheduler."""

    name: str
    lacks: frozenset[str]
    policies: frozenset[str]
    programs: int = 0
    seconds: float = 0.0  # of processor time
    met: Counter[str] = field(default_factory=Counter)
    broken: dict[str, Broken] = field(default_factory=dict)
    stopped: Counter[str] = field(default_factory=Counter)  # by demand, the programs that ended at it

    def status(self, demand: str) -> tuple[str, str]:
        """passed, failed or skipped, and why."""
        if demand in self.broken:
            broken = self.broken[demand]
            text = f"after {broken.programs} programs:\n{broken.message}\n# shows it again:\n{broken.script}"
            return "failed", text
        if demand in POLICIES and demand not in self.policies:
            return "skipped", f"the scheduler does not promise it: {demand!r} in `policies`"
        if not self.met["finished"] and demand not in ALWAYS:
            return "skipped", "not seen: no request ended in any program"
        feature = {"leaks": "free"}.get(demand, demand)
        if feature in self.lacks:
            return "skipped", f"the scheduler lacks {feature}: {FEATURES[feature]}"
        return "passed", ""

    def summary(self) -> list[str]:
        """What was tried, what was met of it, and what hid what."""
        rate = self.programs / self.seconds if self.seconds else 0.0
        counts = {what: self.met[what] for what in ("requests", "scheduled tokens", *COUNTED)}
        met = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "nothing"
        lines = [
            f"{self.name}: {self.programs:,} programs, {rate:,.0f} a second of processor time; met: {met}",
            f"lacks: {', '.join(sorted(self.lacks)) or 'nothing'}",
        ]
        never = [what for what, feature in COUNTED.items() if feature not in self.lacks and not self.met[what]]
        if never:
            lines.append(f"WARNING: never met {', '.join(never)}")
        for demand, count in self.stopped.items():
            lines.append(f"{count:,} programs ended at {demand!r}: what comes behind it was not seen in these")
        return lines


def try_scheduler(factory: Factory | str, profile: str = "quick", name: str = "") -> Outcome:
    """RequestError if the factory's object is no scheduler or declares what is unknown."""
    calls = Calls(factory, FIRST_SIZES)
    outcome = Outcome(name or str(factory), calls.lacks, calls.policies)
    started = time.process_time()
    first: dict[str, int] = {}
    endless: list[Broken] = []  # a call that does not return is waited for once

    def judge_all(sizes: dict[str, Any], program: list[Call]) -> None:
        if endless:
            return
        outcome.programs += 1
        run, violation = attempt(factory, sizes, program)
        if run is not None:
            outcome.policies |= run.calls.policies
            outcome.met.update(run.met)
        if violation is not None:
            outcome.stopped[violation.demand] += 1
            first.setdefault(violation.demand, outcome.programs)
            if violation.is_endless:
                message, text = str(violation), script(outcome.name, sizes, run)
                endless.append(Broken("calls", message, text, outcome.programs))

    drawn(judge_all, calls.lacks, profile)
    outcome.seconds = time.process_time() - started
    outcome.broken.update((each.demand, each) for each in endless)
    shrinking = time.monotonic()
    for demand, number in () if endless else first.items():
        with bounded_shrinking(seconds_left(profile, time.monotonic() - shrinking)):
            outcome.broken[demand] = smallest(factory, outcome.name, calls.lacks, demand, number, profile)
    return outcome


def require_scheduler(name: str) -> frozenset[str]:
    """What it lacks. RequestError if there is no such factory, or what it makes is no scheduler or declares what is
    unknown."""
    return Calls(name, FIRST_SIZES).lacks


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


def drawn(
    test: Callable[[dict[str, Any], list[Call]], None], lacks: frozenset[str], profile: str, shrinks: bool = True
) -> None:
    """Up to as many programs as the profile says, until one raises; that is shrunk, if wanted, and raised."""
    settings = hypothesis.settings(
        max_examples=PROGRAMS[profile],
        derandomize=profile != "deep",
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrinks else [])],
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
    failing: list[tuple[dict[str, Any], list[Call]]] = []

    def judge_one(sizes: dict[str, Any], program: list[Call]) -> None:
        violation = attempt(factory, sizes, program, {demand})[1]
        if violation is not None:
            failing.append((sizes, program))
            raise violation

    with contextlib.suppress(Violation):
        drawn(judge_one, lacks, profile)
    sizes, program = failing[-1]  # Hypothesis runs the smallest again at the end
    run, violation = attempt(factory, sizes, program, {demand})
    unsure = f"{demand}: met once, and not again by the same calls: the scheduler depends on more than its calls"
    return Broken(demand, unsure if violation is None else str(violation), script(name, sizes, run), number)


def attempt(
    factory: Factory | str, sizes: dict[str, Any], program: list[Call], judged: Collection[str] = ()
) -> tuple[Run | None, Violation | None]:
    """The run, unless its scheduler could not be made, and the demand that it broke of those that are judged."""
    run = None
    try:
        run = Run(factory, sizes, judged)
        carry_out(run, program)
    except Violation as violation:
        return run, violation if not judged or violation.demand in judged else None
    except Unjudged:
        pass
    return run, None


def script(name: str, sizes: dict[str, Any], run: Run | None) -> str:
    """The program as Python that runs without Hypothesis."""
    calls = "".join(f"run.{call}\n" for call in (run.log if run is not None else ()))
    imports = "from lfm2np.suite.schedulers.program_run import Run\n"
    if name.startswith("with_fault("):
        imports += "from lfm2np.suite.schedulers.scheduler_faults import with_fault\n"
    factory = name if name.startswith("with_fault(") else repr(name)
    return f"{imports}\nrun = Run({factory}, {sizes})\n{calls}"


def sentences() -> dict[str, str]:
    """Each demand and policy, with its sentence."""
    return {**DEMANDS, **POLICIES}
