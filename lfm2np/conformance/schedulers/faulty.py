"""Bugs of schedulers, put into whatever scheduler is tested: an author sees the suite catch them on his own.

A fault stands between the scheduler and the suite. It changes what a step reports, as a scheduler with that bug would
report it, or a call on its way; the scheduler itself goes on undisturbed. Every fault counts how often it changed
something: one that never could (no chunks, no prefix hits) says nothing about the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lfm2np.conformance.schedulers.calls import Factory
from lfm2np.conformance.schedulers.managed import as_scheduler
from lfm2np.engine_protocol import load_factory
from scheduler.protocol import Entry, Step


@dataclass(frozen=True)
class SchedulerFault:
    name: str
    sentence: str
    make: type[Faulty]
    needs: tuple[str, ...] = ()  # features
    seen_in: tuple[str, ...] = ()


class Faulty:
    """A scheduler behind a fault: whatever is not changed is passed on."""

    def __init__(self, inner: Any, sizes: dict[str, Any]) -> None:
        self.inner, self.sizes = inner, sizes
        self.block_size = sizes.get("block_size") or 1
        self.applied = 0
        self.last: dict[str, Entry] = {}  # by request, of the steps so far
        self.ended: list[Entry] = []  # the last entries of requests that ended
        self.rows: list[Entry] = []  # of the step before

    @staticmethod
    def given(sizes: dict[str, Any]) -> dict[str, Any]:
        """The sizes that the scheduler gets."""
        return sizes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self) -> Step:
        step = self.inner.step()
        changed = self.changed(step)
        self.applied += plain(changed) != plain(step)
        for name in step.preempted:
            self.last.pop(name, None)
        self.last.update((entry.request_id, entry) for entry in step.entries)
        self.rows = list(step.entries)
        return changed

    def changed(self, step: Step) -> Step:
        return replace(step, entries=[self.entry(each, step) for each in step.entries])

    def entry(self, each: Entry, step: Step) -> Entry:
        return each

    def update(self, tokens: Mapping[str, Sequence[int]]) -> Collection[str] | None:
        ended: Collection[str] | None = self.inner.update(tokens)
        for name in ended or ():
            if name in self.last:
                self.ended.append(self.last.pop(name))
        return ended

    def is_new(self, each: Entry) -> bool:
        """Its first entry since it came, or since it was preempted."""
        return each.request_id not in self.last

    def is_decode(self, each: Entry) -> bool:
        return not self.is_new(each) and len(each.token_ids) == 1


EntryChange = Callable[[Faulty, Entry, Step], Entry]
StepChange = Callable[[Faulty, Step], Step]
FAULTS: dict[str, SchedulerFault] = {}


def of_entry(
    sentence: str, *, needs: tuple[str, ...] = (), seen: tuple[str, ...] = ()
) -> Callable[[EntryChange], EntryChange]:
    """A fault that changes each entry by itself; its name is the function's."""

    def register(function: EntryChange) -> EntryChange:
        note(function.__name__, sentence, {"entry": function}, needs, seen)
        return function

    return register


def of_step(
    sentence: str, *, needs: tuple[str, ...] = (), seen: tuple[str, ...] = ()
) -> Callable[[StepChange], StepChange]:
    """A fault that changes a step as a whole."""

    def register(function: StepChange) -> StepChange:
        note(function.__name__, sentence, {"changed": function}, needs, seen)
        return function

    return register


def of_calls(
    sentence: str, *, needs: tuple[str, ...] = (), seen: tuple[str, ...] = ()
) -> Callable[[type[Faulty]], type[Faulty]]:
    """A fault that is a class of its own: of calls, or of what they return."""

    def register(fault: type[Faulty]) -> type[Faulty]:
        name = "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in fault.__name__).strip("-")
        FAULTS[name] = SchedulerFault(name, sentence, fault, needs, seen)
        return fault

    return register


def note(name: str, sentence: str, methods: dict[str, Any], needs: tuple[str, ...], seen: tuple[str, ...]) -> None:
    name = name.replace("_", "-")
    FAULTS[name] = SchedulerFault(name, sentence, type(name, (Faulty,), methods), needs, seen)


def with_fault(factory: Factory | str, name: str) -> Factory:
    """A factory of the same scheduler with that bug."""
    make: Any = load_factory(factory, "scheduler") if isinstance(factory, str) else factory

    def faulty(sizes: Mapping[str, Any]) -> Faulty:
        fault, asked = FAULTS[name].make, dict(sizes)
        given = fault.given(asked)
        inner = as_scheduler(make(given), given)
        used = {**given, **getattr(inner, "sizes", {})}
        return fault(
            inner, {key: asked[key] if key in asked and value == given[key] else value for key, value in used.items()}
        )

    return faulty


def plain(step: Step) -> tuple[Any, ...]:
    """For comparison: lists and tuples of the same are the same."""
    entries = [
        (
            (each.request_id, each.start, each.window, each.state_from, each.state_to),
            *map(tuple, (each.token_ids, each.writes, each.reads, each.checkpoints)),
        )
        for each in step.entries
    ]
    return (entries, list(step.copies))


def faults_for(lacks: frozenset[str]) -> list[SchedulerFault]:
    """Those that a scheduler can have that lacks this."""
    return [fault for fault in FAULTS.values() if not lacks & set(fault.needs)]
