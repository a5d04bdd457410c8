"""A schedule that broke a demand, as text: each step, what every place held, and the place that was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lfm2np.suite.schedulers.named_memory import Memory
from lfm2np.values import plain
from scheduler.protocol import Entry, Step

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Drawn:
    """One step. `calls` are those since the step before, without those that only take steps."""

    calls: list[str]
    entries: str
    cells: dict[int, list[str]]  # by block a sign for each place
    moved: str  # who was preempted, and what was copied before the step


@dataclass(eq=False)
class Drawing:
    """A line a step: each place by the letter of whose token it holds, a capital where this step wrote it."""

    block_size: int
    letters: dict[str, str] = field(default_factory=dict)  # by request, in the order of appearance
    steps: list[Drawn] = field(default_factory=list)

    def add(self, number: int, calls: Sequence[str], step: Step, memory: Memory) -> None:
        """The step with this number, with what memory holds after its writes."""
        for each in step.entries:
            self.letters.setdefault(each.request_id, LETTERS[len(self.letters) % len(LETTERS)])
        cells = {place // self.block_size: ["."] * self.block_size for each in step.entries for place in each.reads}
        for (name, block), held in memory.blocks.items():
            if name == "block":
                letters = ["." if cell is None else self.letters[cell.request_id] for cell in held]
                is_new = [cell is not None and cell.step == number for cell in held]
                cells[block] = [a.upper() if new else a for a, new in zip(letters, is_new, strict=True)]
        entries = ", ".join(map(entry_text, step.entries)) or "nothing"
        before = [call for call in calls if not call.startswith(("step(", "drain("))]
        self.steps.append(Drawn(before, entries, cells, moved(step)))

    def text(self, message: str, place: tuple[str, int] | None) -> str:
        """With the place that was wrong in the last step. Without steps the message alone."""
        if not self.steps:
            return message
        if place is not None and place[0] == "block":
            block, offset = divmod(place[1], self.block_size)
            self.steps[-1].cells.setdefault(block, ["."] * self.block_size)[offset] = "!"
        key = ", ".join(f"{letter} {plain(name)}" for name, letter in self.letters.items())
        lines = [f"blocks of {self.block_size}: {key}; capitals were written in that step, . nothing, ! wrong"]
        width = max(len(step.entries) for step in self.steps)
        blocks = range(1 + max(block for step in self.steps for block in (*step.cells, 0)))
        for number, step in enumerate(self.steps):
            lines += [f"  {call if call.isprintable() else repr(call)}" for call in step.calls]
            signs = "|".join("".join(step.cells.get(block, "." * self.block_size)) for block in blocks)
            lines.append(f"  step {number:>2}  {step.entries:<{width}}  {signs}{step.moved}")
        return "\n".join([*lines, message])


def entry_text(entry: Entry) -> str:
    last = entry.start + len(entry.token_ids) - 1
    places = f"{entry.start}" if entry.start == last else f"{entry.start}-{last}"
    return f"{plain(entry.request_id)} {places}"


def moved(step: Step) -> str:
    copies = [f"{end_text(each.source)} to {end_text(each.destination)}" for each in step.copies]
    preempted = f"  preempted: {', '.join(map(plain, sorted(step.preempted)))}" if step.preempted else ""
    return preempted + (f"  copied: {', '.join(copies)}" if copies else "")


def end_text(end: tuple[str, int] | None) -> str:
    return "zeros" if end is None else f"{end[0]} {end[1]}"
