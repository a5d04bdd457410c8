"""Runs properties under a profile, and says what came of each: for the plugin, for `lfm2np faults`, for a script."""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.stateful import run_state_machine_as_test

from lfm2np.conformance.demands.demands import Machine, Property
from lfm2np.conformance.protocol import Factory, lacking, missing
from lfm2np.conformance.trials.models import TinyModel, checkpoint
from lfm2np.conformance.trials.rounding import Rounding, format_of, unjudged
from lfm2np.conformance.trials.strategies import fit, size_of

EXAMPLES = {"quick": 8, "ci": 100, "deep": 3000}  # of a property whose weight is 1


@dataclass(frozen=True)
class Result:
    """What came of one property. `status` is passed, failed or skipped."""

    id: str
    status: str
    examples: int = 0  # tried before the first failure, that one included; all of them if it passed
    seconds: float = 0.0
    message: str = ""  # why it was skipped, or the first difference and a script that shows it
    size: int | None = None  # of the smallest example that fails


def profile(name: str, weight: float = 1.0, shrink: bool = True) -> settings:
    """Hypothesis's settings: `deep` draws new examples, the others always the same."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
    return settings(
        max_examples=max(2, int(EXAMPLES[name] * weight)),
        derandomize=name != "deep",
        deadline=None,
        phases=phases if shrink else phases[:-1],
        suppress_health_check=list(HealthCheck),
        print_blob=name == "deep",
        report_multiple_bugs=False,
        database=DirectoryBasedExampleDatabase(".hypothesis/lfm2np") if name == "deep" else None,
    )


def run_property(prop: Property | Machine, factory: Factory, name: str, shrink: bool = True) -> Result:
    """One property under a profile; never raises for what the engine does."""
    began = time.perf_counter()
    engine = factory(str(checkpoint(TinyModel())), {})
    reason, lacks = missing(engine, prop.needs), lacking(engine) | unjudged(factory)
    for need in prop.needs:
        if need in unjudged(factory):
            reason = reason or f"{need}: not judged where an engine computes in {format_of(factory)}"
    if reason is not None:
        return Result(prop.id, "skipped", message=reason)
    chosen = profile(name, prop.weight, shrink)
    if isinstance(prop, Machine):
        count, failure, size = _run_machine(prop, factory, chosen)
    else:
        count, failure, size = _run_examples(prop, factory, chosen, lacks)
    seconds = time.perf_counter() - began
    return Result(prop.id, "failed" if failure else "passed", count, seconds, failure or "", size)


def _run_examples(
    prop: Property, factory: Factory, chosen: settings, lacks: frozenset[str]
) -> tuple[int, str | None, int | None]:
    """Examples until the first failure, the message and the size of the smallest."""
    tried, first_failure, smallest = 0, None, None

    @chosen
    @given(prop.strategy())
    def test(example: Any) -> None:
        nonlocal tried, first_failure, smallest
        tried += 1
        example = fit(example, lacks)
        try:
            prop.check(factory, example)
        except Exception:
            first_failure = tried if first_failure is None else first_failure
            smallest = example
            raise

    try:
        test()
    except Exception as error:
        script = script_of(prop.id, factory, smallest)
        return first_failure or tried, f"{described(error)}\n{script}", size_of(smallest)
    return tried, None, None


def _run_machine(machine: Machine, factory: Factory, chosen: settings) -> tuple[int, str | None, int | None]:
    """The same with a state machine; its size is the number of calls of the shortest failing program."""
    kind = machine.make(factory)
    tried, first_failure = 0, None

    class Counted(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            nonlocal tried
            tried += 1
            super().__init__()

        def teardown(self) -> None:
            nonlocal first_failure
            problem = sys.exception()
            if isinstance(problem, Exception) and not isinstance(problem, UnsatisfiedAssumption):
                first_failure = tried if first_failure is None else first_failure
            try:
                super().teardown()
            except Exception:
                first_failure = tried if first_failure is None else first_failure
                raise

    Counted.__name__ = Counted.__qualname__ = kind.__name__
    try:
        run_state_machine_as_test(Counted, settings=settings(chosen, stateful_step_count=machine.steps))
    except Exception as error:
        program = "\n".join(getattr(error, "__notes__", ()))
        calls = sum(line.startswith("state.") for line in program.splitlines())
        return first_failure or tried, f"{described(error)}\n{program}", calls or None
    return tried, None, None


def totals() -> str:
    """What this process compared so far."""
    from lfm2np.conformance.machines.machines import SchedulerMachine
    from lfm2np.conformance.trials.driver import TOTALS

    return (
        f"compared: {TOTALS.runs:,} runs of an engine ({TOTALS.steps:,} steps counted, {TOTALS.tokens:,} tokens); "
        f"{SchedulerMachine.schedules:,} schedules without a model ({SchedulerMachine.steps:,} steps, "
        f"{SchedulerMachine.tokens:,} rows)"
    )


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def script_of(property_id: str, factory: Factory, example: Any) -> str:
    """A few lines that show the failure again."""
    number_format = format_of(factory)
    made_by = factory.factory if isinstance(factory, Rounding) else factory
    engine = f"{made_by.__module__}:{made_by.__qualname__}"
    rounding = "" if number_format is None else f", {number_format!r}"
    return "\n".join(
        [
            "# shows it again:",
            "from lfm2np.conformance.again import *",
            f"check({property_id!r}, {engine!r}, {short(example)}{rounding})",
        ]
    )


def short(example: Any) -> str:
    """As repr, but of a dataclass only the fields that are not the default."""
    if dataclasses.is_dataclass(example) and not isinstance(example, type):
        fields = []
        for each in dataclasses.fields(example):
            value = getattr(example, each.name)
            if value != each.default or each.default is dataclasses.MISSING:
                fields.append(f"{each.name}={short(value)}")
        return f"{type(example).__name__}({', '.join(fields)})"
    if isinstance(example, tuple):
        return f"({', '.join(map(short, example))}{',' if len(example) == 1 else ''})"
    if isinstance(example, list):
        return f"[{', '.join(map(short, example))}]"
    return repr(example)
