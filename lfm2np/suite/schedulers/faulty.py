"""Bugs of schedulers, put into whatever scheduler is tested: an author sees the suite catch them on his own.

A fault stands between the scheduler and the suite. It changes what a step reports, as a scheduler with that bug would
report it, or a call on its way; the scheduler itself goes on undisturbed. Every fault counts how often it changed
something: one that never could (no chunks, no prefix hits) says nothing about the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from lfm2np.oracle.engines.protocol import load_factory
from lfm2np.suite.schedulers.adapter_calls import Factory
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

    more: ClassVar[Mapping[str, int]] = {}  # than the sizes say: what the scheduler gets

    def __init__(self, inner: Any, sizes: dict[str, Any]) -> None:
        self.inner, self.sizes = inner, sizes
        self.block_size = sizes.get("block_size") or 1
        self.applied = 0
        self.last: dict[str, Entry] = {}  # by request, of the steps so far
        self.ended: list[Entry] = []  # the last entries of requests that ended
        self.added = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self) -> Step:
        step = self.inner.step()
        changed = self.changed(step)
        self.applied += plain(changed) != plain(step)
        for name in step.preempted:
            self.last.pop(name, None)
        self.last.update((entry.request_id, entry) for entry in step.entries)
        return changed

    def changed(self, step: Step) -> Step:
        return replace(step, entries=[self.entry(each) for each in step.entries])

    def entry(self, each: Entry) -> Entry:
        return each

    def update(self, tokens: Mapping[str, Sequence[int]]) -> Collection[str] | None:
        ended: Collection[str] | None = self.inner.update(tokens)
        for name in ended or ():
            if name in self.last:
                self.ended.append(self.last.pop(name))
        if ended is None:
            return None
        changed = self.finished(list(ended), tokens)
        self.applied += changed != list(ended)
        return changed

    def finished(self, ended: list[str], tokens: Mapping[str, Sequence[int]]) -> list[str]:
        return ended

    def is_new(self, each: Entry) -> bool:
        """Its first entry since it came, or since it was preempted."""
        return each.request_id not in self.last

    def is_decode(self, each: Entry) -> bool:
        return not self.is_new(each) and len(each.token_ids) == 1


class Freeing(Faulty):
    """One that says of other blocks that they are free."""

    freed: Callable[..., list[int] | int]

    def free_blocks(self) -> Collection[int] | int:
        free = self.inner.free_blocks()
        free = free if isinstance(free, int) else list(free)
        changed = self.freed(free)
        self.applied += changed != free
        return changed


class Exceeding(Faulty):
    """One that gets larger limits than it says."""

    exceeds: Callable[..., bool]

    def step(self) -> Step:
        step = super().step()
        self.applied += self.exceeds(step)
        return step


Change = TypeVar("Change", bound=Callable[..., Any])
FAULTS: dict[str, SchedulerFault] = {}


def fault_of(
    method: str,
    sentence: str,
    *,
    base: type[Faulty] = Faulty,
    needs: tuple[str, ...] = (),
    seen: tuple[str, ...] = (),
    **more: int,
) -> Callable[[Change], Change]:
    """Puts a method of such a Faulty into FAULTS under its name, too_large as too-large; `more`: Faulty.more."""

    def register(change: Change) -> Change:
        name = change.__name__.replace("_", "-")
        faulty = type(name, (base,), {method: change, "more": more})
        FAULTS[name] = SchedulerFault(name, sentence, faulty, needs, seen)
        return change

    return register


of_entry = partial(fault_of, "entry")  # each entry by itself
of_step = partial(fault_of, "changed")  # a step as a whole
of_ends = partial(fault_of, "finished")  # which requests are said to have ended
of_add = partial(fault_of, "add")
of_free = partial(fault_of, "freed", base=Freeing, needs=("free",))
exceeding = partial(fault_of, "exceeds", base=Exceeding)


def with_fault(factory: Factory | str, name: str) -> Factory:
    """A factory of the same scheduler with that bug."""
    make: Any = load_factory(factory, "scheduler") if isinstance(factory, str) else factory

    def faulty(sizes: Mapping[str, Any]) -> Faulty:
        fault = FAULTS[name].make
        given = {key: size + fault.more[key] if key in fault.more else size for key, size in sizes.items()}
        inner = make(given)
        other = {
            key: size for key, size in getattr(inner, "sizes", {}).items() if key not in given or size != given[key]
        }
        return fault(inner, {**sizes, **other})

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
