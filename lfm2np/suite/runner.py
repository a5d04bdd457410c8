"""Runs properties under a profile, and says what came of each: for the plugin, for a script."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import HypothesisException

from lfm2np.oracle.engines.protocol import FEATURES, Factory, lacking, missing, told
from lfm2np.suite.properties.driver import TOTALS, WIDE, make
from lfm2np.suite.properties.property import Property, Violation
from lfm2np.suite.properties.rounding import Rounding, format_of, unjudged
from lfm2np.suite.shrinking import bounded_shrinking, seconds_left
from lfm2np.suite.strategies.features import WORDS, fit
from lfm2np.suite.strategies.lengths import lengths_of
from lfm2np.suite.strategies.scenarios import size_of
from lfm2np.suite.strategies.tiny_models import TinyModel

OF_RECORDS = "lfm2np rollouts judges filters and penalties of recorded answers"
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


def run_property(
    prop: Property,
    factory: Factory,
    name: str,
    shrink: bool = True,
    sizes: Mapping[str, int] | None = None,
    spent: float = 0.0,
) -> Result:
    """One property under a profile; never raises for what the engine does.

    sizes  of engines.protocol.TOLD, before the engine's
    spent  seconds on properties that failed: less is left to shrink the next
    """
    began = time.perf_counter()
    try:
        engine = first_engine(factory)
    except Exception as error:
        return Result(prop.id, "failed", message=f"the factory makes no engine: {described(error)}")
    lacks = lacking(engine) | unjudged(factory)
    reason = missing(engine, prop.needs) or withheld(prop, factory)
    if reason is not None:
        return Result(prop.id, "skipped", message=reason)
    tried, first_failure, smallest, failure = 0, None, None, None

    @profile(name, prop.weight, shrink)
    @given(prop.strategy(lengths_of({**told(engine), **(sizes or {})}, "sizes of the engine")))
    def test(example: Any) -> None:  # Hypothesis draws by the text of this function: what it draws changes with that
        nonlocal tried, first_failure, smallest
        tried += 1
        example = fit(example, lacks)
        try:
            prop.check(factory, example)
        except Exception:
            first_failure = tried if first_failure is None else first_failure
            smallest = example
            raise

    with bounded_shrinking(seconds_left("deep" if hasattr(engine, "is_lfm2np") else name, spent)) as stopped:
        try:
            test()
        except Exception as error:
            failure = error
    seconds = time.perf_counter() - began
    if failure is None:
        return Result(prop.id, "passed", tried, seconds)
    lines = [described(failure), script_of(prop.id, factory, smallest), *stopped[:1]]
    if not isinstance(failure, Violation | HypothesisException):
        lines.append(to_declare(smallest, lacks))
    return Result(prop.id, "failed", first_failure or tried, seconds, "\n".join(lines), size_of(smallest))


def to_declare(example: Any, lacks: frozenset[str]) -> str:
    """What of an example that raised an engine may declare not to have."""
    used = {word: FEATURES.get(word, "it can not be set") for word in WORDS if word not in lacks}
    used = {word: what for word, what in used.items() if fit(example, lacks | {word}) != fit(example, lacks)}
    lines = [f"    {word}: {what}" for word, what in used.items()]
    return "\n".join(["if one of these is more than the engine can do, let its class say so in `lacks`:", *lines])


def first_engine(factory: Factory) -> Any:
    """One on a plain drawn model; where that can't be run, on one with the shapes of published checkpoints."""
    try:
        return make(factory, TinyModel(), {})
    except Exception:
        return make(factory, fit(TinyModel(), frozenset({"odd-shapes"})), {})


def withheld(prop: Property, factory: Factory) -> str | None:
    """Why how the engine computes allows no verdict, or None."""
    for need in prop.needs:
        if need in unjudged(factory):
            return f"{need}: not judged where an engine computes in {format_of(factory)}"
    return None


def totals() -> str:
    return f"compared: {TOTALS.runs:,} runs of an engine ({TOTALS.steps:,} steps counted, {TOTALS.tokens:,} tokens)"


def met(factory: Factory) -> str:
    """How often this process met the situations in which engines break, and which of them never."""
    counted = {
        "runs that report prefix hits": TOTALS.hits,
        f"steps with batches over {WIDE}": TOTALS.wide,
        "preemptions": TOTALS.preemptions,
        "forks": TOTALS.forks,
        "aborts": TOTALS.aborts,
    }
    often = ", ".join(f"{count:,} {name}" for name, count in counted.items() if count) or "nothing"
    never = [name for name, count in counted.items() if not count]
    if "processors" in unjudged(factory):
        never.append(f"{FEATURES['processors']}: with --number-format none are sent; {OF_RECORDS}")
    return f"met: {often}; never: {', '.join(never) or 'nothing'}"


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def script_of(property_id: str, factory: Factory, example: Any) -> str:
    number_format = format_of(factory)
    made_by = factory.factory if isinstance(factory, Rounding) else factory
    name = made_by.__qualname__ if "<locals>" not in made_by.__qualname__ else "FACTORY"  # as --engine names it
    engine = f"{made_by.__module__}:{name}"
    rounding = "" if number_format is None else f", {number_format!r}"
    call = f"check({property_id!r}, {engine!r}, {short(example)}{rounding})"
    return f"# shows it again:\nfrom lfm2np.suite.again import *\n{call}"


def short(example: Any) -> str:
    """As repr, but of a dataclass only the fields that are not the default."""
    if dataclasses.is_dataclass(example) and not isinstance(example, type):
        fields = []
        for each in dataclasses.fields(example):
            value, factory = getattr(example, each.name), each.default_factory
            default = each.default if factory is dataclasses.MISSING else factory()
            if value != default or default is dataclasses.MISSING:
                fields.append(f"{each.name}={short(value)}")
        return f"{type(example).__name__}({', '.join(fields)})"
    if isinstance(example, tuple):
        return f"({', '.join(map(short, example))}{',' if len(example) == 1 else ''})"
    if isinstance(example, list):
        return f"[{', '.join(map(short, example))}]"
    return repr(example)
