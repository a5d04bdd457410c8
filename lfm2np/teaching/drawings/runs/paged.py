"""What stands in the blocks, followed through a run's steps: keys and values as attention finds them, and tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lfm2np.teaching.drawings.runs.derive import num_kept
from lfm2np.teaching.drawings.runs.recorded_run import Run, Step

Row = Sequence[float]
Place = tuple[int, int]  # block, place in it
Cells = dict[int, dict[Place, tuple[Row, Row]]]  # layer -> place -> key, value


def before_steps(run: Run) -> Iterator[Cells]:
    """For each step what its own tokens find: after its moves, before they are written. The same object every time.

    The run has the detail of every step, with all numbers of keys and values.
    """
    cells: Cells = {}
    size = int(run.config["block_size"])
    for step in run.steps:
        for source, destination in copies(step):
            copy(cells, source, destination, size)
        yield cells
        write(cells, step, size)


def copies(step: Step) -> Iterator[tuple[int, int]]:
    """From which block to which the moves of a plan copy; those of the state do not."""
    for kind, source, destination in step.moves:
        if kind == "copy_block":
            yield source, destination


def copy(cells: Cells, source: int, destination: int, size: int) -> None:
    for layer_cells in cells.values():
        for place in range(size):
            if (source, place) in layer_cells:
                layer_cells[destination, place] = layer_cells[source, place]


def write(cells: Cells, step: Step, size: int) -> None:
    """The step's tokens but rejected drafts, which are not written."""
    for operation in step.operations:
        if operation["operation"] != "cache_entries":
            continue
        places, first = cells.setdefault(operation["layer"], {}), 0
        keys, values = operation["inputs"]["keys"]["values"], operation["inputs"]["values"]["values"]
        for entry in step.entries:
            for index in range(num_kept(step, entry)):
                block, place = divmod(entry.start + index, size)
                places[entry.block_table[block], place] = keys[first + index], values[first + index]
            first += len(entry.token_ids)


def context(cells: Cells, layer: int, table: Sequence[int], stop: int, size: int) -> tuple[list[Row], list[Row]]:
    """Keys and values of the positions before `stop`. KeyError for one that was never written."""
    layer_cells = cells.get(layer, {})
    pairs = [layer_cells[table[position // size], position % size] for position in range(stop)]
    return [key for key, _ in pairs], [value for _, value in pairs]


# --- tokens


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
        for source, destination in copies(step):
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
