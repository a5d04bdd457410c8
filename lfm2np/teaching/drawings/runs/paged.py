"""Which tokens stand in the blocks, followed through a run's steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lfm2np.teaching.drawings.runs.derive import num_kept
from lfm2np.teaching.drawings.runs.recorded_run import Run, Step


@dataclass(frozen=True)
class Contents:
    """After a step. What a block holds stays there when nobody owns it any more, until another owner writes to it."""

    tokens: Mapping[int, Mapping[int, int]] = field(default_factory=dict)  # block -> place -> token
    written: frozenset[tuple[int, int]] = frozenset()  # block and place, by this step


def contents(run: Run) -> Iterator[Contents]:
    """For each step what stands there after it."""
    tokens: dict[int, dict[int, int]] = {}
    size = int(run.config["block_size"])
    for step in run.steps:
        for source, destination in [places for kind, *places in step.moves if kind == "copy_block"]:
            tokens[destination] = dict(tokens.get(source, {}))
        written = write_tokens(tokens, step, size)
        yield Contents({block: dict(slots) for block, slots in tokens.items()}, frozenset(written))


def write_tokens(tokens: dict[int, dict[int, int]], step: Step, size: int) -> set[tuple[int, int]]:
    """Puts a step's tokens, but rejected drafts, in their places; returns these."""
    written = set()
    for entry in step.entries:
        for index in range(num_kept(step, entry)):
            number, place = divmod(entry.start + index, size)
            block = entry.block_table[number]
            slots = tokens.setdefault(block, {})
            for later in [at for at in slots if at >= place]:  # of its last owner
                del slots[later]
            slots[place] = entry.token_ids[index]
            written.add((block, place))
    return written
